"""`stretto show`: what a run folder holds, as figures for a program and as text for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stretto.config import load_config
from stretto.errors import StrettoError, nearest
from stretto.history.log import read_rollouts
from stretto.metrics_file import plain
from stretto.observe.live import sparkline
from stretto.observe.progress import evaluation_text, headline, number, percent, without_reward
from stretto.records import Rollout
from stretto.run_folder import RunFolder

ROWS = 12  # of the summary's table: steps evenly spread over the run, first and last among them
CURVE = 60  # cells
Decode = Callable[[Iterable[int]], str]

COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward/mean", ".3f"),
    ("length", "response_length/mean", ".0f"),
    ("p99", "response_length/p99", ".0f"),
    ("tokens/s", "throughput/useful_tokens_per_s", ",.0f"),
    ("tokens/check", "spec/mean_acceptance_length", ".2f"),
    ("drafts right", "spec/accepted_share", ".0%"),
    ("idle", "rollout/bubble_ratio", ".0%"),
    ("seconds", "time/total", ".1f"),
    ("accuracy", "eval/accuracy", ".1%"),
)
DISPENSABLE = (
    "tokens/check",
    "p99",
    "idle",
    "drafts right",
    "seconds",
    "tokens/s",
    "accuracy",
    "length",
    "reward",
)
GAP = 2  # between columns
PIPED = 200  # characters in a line where no terminal sets a limit


# ---- the whole run --------------------------------------------------------------------------------------


def summary(path: Path) -> dict[str, Any]:
    """The run's state and every line of its metrics.

    Raises:
        StrettoError: `path` is no run folder, or a file of it is damaged.
    """
    folder = RunFolder.open(path)
    config = load_config(path / "config.toml", saved=True)
    metrics = folder.metrics()
    return {
        "run": str(path),
        "steps": max((row["step"] for row in metrics), default=0),
        "total_steps": config.steps,
        "checkpoints": folder.checkpoint_steps(),
        "metrics": [plain(row) for row in metrics],
        "config": config.model_dump(mode="json"),
    }


def summary_text(found: Mapping[str, Any], width: int) -> RenderableType:
    """The summary for a person: the curve of the reward, a table of steps in up to `width` characters, evaluations,
    checkpoints.
    """
    config = load_config(found["config"])
    steps = [row | _accepted_share(row) for row in found["metrics"] if row["step"] > 0]
    parts: list[RenderableType] = [Text(headline(config, found["total_steps"], found["run"]), style="bold")]
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    if rewards:
        curve = Text(sparkline(rewards, CURVE), style="green")
        parts.append(Text.assemble("reward  ", curve, f"  {rewards[0]:.3f} to {rewards[-1]:.3f}"))
    if failed := sum(map(without_reward, steps)):
        without = len(steps) - len(rewards)
        text = f"{failed:,} responses had no usable reward; in {without} of {len(steps)} steps no response had one"
        parts.append(Text(text, style="red"))
    evaluated = [row for row in found["metrics"] if row.get("eval/accuracy") is not None]
    parts += [Text(f"evaluation step {row['step']}: {evaluation_text(row)}") for row in evaluated]
    if steps:
        parts += _steps_table([steps[i] for i in _spread(len(steps), ROWS)], width)
    done = (
        "complete"
        if found["steps"] >= found["total_steps"]
        else f"goes on with: stretto resume {found['run']}"
    )
    kept = ", ".join(map(str, found["checkpoints"])) or "none"
    parts.append(
        Text(f"{found['steps']} of {found['total_steps']} steps, {done}; checkpoints: {kept}", style="dim")
    )
    return Group(*parts)


def _steps_table(rows: Sequence[Mapping[str, Any]], width: int) -> list[RenderableType]:
    """A table, and what it leaves out, the least telling first, where the terminal is too narrow."""
    shown = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    cells = {title: [title, *(number(row, key, spec) for row in rows)] for title, key, spec in shown}
    left_out: list[str] = []
    while sum(max(map(len, column)) + GAP for column in cells.values()) - GAP > width and len(cells) > 1:
        left_out.append(next(title for title in DISPENSABLE if title in cells))
        del cells[left_out[-1]]
    table = _table(cells)
    for row in list(zip(*cells.values(), strict=True))[1:]:
        table.add_row(*row)
    said = f"left out, as the terminal is narrow: {', '.join(left_out)}"
    return [table, *([Text(said, style="dim")] if left_out else [])]


def _table(titles: Iterable[str]) -> Table:
    """A table without rows, of right-aligned columns."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _accepted_share(row: Mapping[str, Any]) -> dict[str, float]:
    drafted = row.get("spec/drafted")
    return {"spec/accepted_share": row["spec/accepted"] / drafted} if drafted else {}


def _spread(count: int, wanted: int) -> list[int]:
    if count <= wanted:
        return list(range(count))
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


# ---- rollouts -------------------------------------------------------------------------------------------


def rollouts(path: Path, step: int | None, prompt: str | None) -> list[tuple[int, Rollout]]:
    """(optimiser step, rollout) of what update `step` was made of, or of every visit of a prompt.

    `prompt` is a uid or the beginning of one. Responses that were given up are not part of an update and not here.

    Raises:
        StrettoError: the run has no such step or prompt, or `prompt` begins several uids.
    """
    folder = RunFolder.open(path)
    steps = folder.log_steps("consumed")
    if step is not None and step not in steps:
        had = f"it has {steps[0]} to {steps[-1]}" if steps else "it has none yet"
        raise StrettoError(f"{path}: no step {step}; {had}")
    found = [
        (number, rollout)
        for number in (steps if step is None else [step])
        for rollout in read_rollouts(folder.log_file("consumed", number))
    ]
    return found if prompt is None else _of_prompt(path, found, prompt)


def _of_prompt(path: Path, found: Sequence[tuple[int, Rollout]], prompt: str) -> list[tuple[int, Rollout]]:
    uids = {rollout.prompt.uid for _, rollout in found}
    matching = sorted(uid for uid in uids if uid.startswith(prompt))
    if not matching:
        raise StrettoError(
            f"{path}: no prompt {prompt}; {nearest(prompt, uids) if len(uids) <= 20 else _some(uids)}"
        )
    if len(matching) > 1:
        raise StrettoError(f"{path}: {prompt} begins {len(matching)} prompts: {', '.join(matching[:5])}")
    return [(step, rollout) for step, rollout in found if rollout.prompt.uid == matching[0]]


def _some(uids: Iterable[str]) -> str:
    return f"there are such as {', '.join(sorted(uids)[:3])}"


def rollout_record(step: int, rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """One rollout as plain JSON values, its tokens decoded."""
    record: dict[str, Any] = {
        "step": step,
        "prompt_uid": rollout.prompt.uid,
        "occurrence": rollout.prompt.occurrence,
        "visit": rollout.visit,
        "group_id": rollout.group_id,
        "sample_index": rollout.sample_index,
        "prompt": decode(rollout.prompt.token_ids.tolist()),
        "response": decode(rollout.token_ids.tolist()),
        "tokens": int(rollout.token_ids.size),
        "reward": rollout.reward,
        "reward_parts": plain(rollout.reward_parts),
        "reward_status": rollout.reward_status,
        "finish_reason": str(rollout.finish_reason),
        "versions": [int(version) for version in np.unique(rollout.versions)],
    }
    return {name: plain(value) for name, value in record.items()}


def groups_text(records: Sequence[Mapping[str, Any]], *, whole: bool) -> RenderableType:
    """Group after group: the prompt, then each response with its reward; unless `whole`, the ends of long ones."""
    parts: list[RenderableType] = []
    for (step, _), group in groupby(records, key=lambda record: (record["step"], record["group_id"])):
        members = list(group)
        first = members[0]
        rewards = [m["reward"] for m in members if m["reward"] is not None]
        mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward"
        parts.append(
            Rule(
                f"step {step} · prompt {first['prompt_uid']} · visit {first['visit']} · {mean}", align="left"
            )
        )
        parts.append(Text(first["prompt"] if whole else _end(first["prompt"], 400), style="bold"))
        parts += [_response_text(member, whole) for member in members]
    return Group(*parts)


def _response_text(record: Mapping[str, Any], whole: bool) -> Text:
    reward = number(record, "reward", ".3f") if record["reward_status"] == "ok" else record["reward_status"]
    style = "green" if (record["reward"] or 0.0) > 0 else "red"
    cut = " (cut off by its limit)" if record["finish_reason"] == "length" else ""
    response = record["response"] if whole else _end(record["response"], 160)
    return Text.assemble(
        (f"[{record['sample_index']}] {reward}", style),
        (f"  {record['tokens']} tokens{cut}  ", "dim"),
        response,
    )


def _end(text: str, characters: int) -> str:
    """The end of a long text, and how much of it is not shown."""
    if len(text) <= characters:
        return text
    return f"({len(text) - characters} characters) … {text[-characters:]}"


def visits_text(records: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A prompt's visits as a table: how rewards and lengths moved, and how far the samples agree."""
    table = _table(("step", "visit", "reward", "correct", "mean length", "longest"))
    for (step, visit), group in groupby(records, key=lambda record: (record["step"], record["visit"])):
        members = list(group)
        rewards = [m["reward"] for m in members if m["reward"] is not None]
        lengths = [m["tokens"] for m in members]
        table.add_row(
            str(step),
            str(visit),
            f"{sum(rewards) / len(rewards):.3f}" if rewards else "–",
            percent(sum(reward > 0 for reward in rewards) / len(rewards)) if rewards else "–",
            f"{sum(lengths) / len(lengths):.0f}",
            str(max(lengths)),
        )
    return table


def decoder(path: Path) -> Decode:
    """The run's tokenizer as a function from ids to text; special tokens are kept."""
    from stretto.model import load_tokenizer

    tokenizer = load_tokenizer(load_config(path / "config.toml", saved=True).model)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def show(path: Path, step: int | None, prompt: str | None, *, console: Console) -> None:
    """Print a run, a step's rollouts, or a prompt's visits, for a person."""
    if step is None and prompt is None:
        console.print(summary_text(summary(path), console.width))
        return
    found = rollouts(path, step, prompt)
    decode = decoder(path)
    records = [rollout_record(number, rollout, decode) for number, rollout in found]
    if step is None:
        console.print(visits_text(records))
    console.print(groups_text(records, whole=prompt is not None))
