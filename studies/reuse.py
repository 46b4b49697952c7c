"""What the reuse modes, which are not exact, gain in time and do to training, against the exact mode.

    python studies/reuse.py [--seeds 3] [--results FOLDER] [--key value ...]

Each cell trains the demo in one mode from one seed, with the same number of updates; further keys go to every run. A
cell's figures are kept in `FOLDER/cells/`, and a run that was broken off is resumed: called again, the study goes on.
At the end it writes `FOLDER/table.md`. Seconds mean something on an idle machine only; counts always do.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.history.log import read_rollouts
from stretto.records import Rollout

PREFIX = ("--reuse.kind", "prefix")
MODES: dict[str, tuple[str, ...]] = {
    "exact": (),
    "noise, refresh 0.1": ("--reuse.kind", "noise", "--reuse.refresh", "0.1"),
    "prefix, lenience 1": (*PREFIX, "--reuse.lenience", "1"),
    "prefix, lenience e^0.5": (*PREFIX, "--reuse.lenience", "1.6487"),
    "prefix, e^0.5, residual": (*PREFIX, "--reuse.lenience", "1.6487", "--reuse.residual", "true"),
}
COLUMNS = {  # figure -> title, digits
    "speed": ("rollout speed", 2),
    "rollout_seconds": ("rollout s", 1),
    "engine_steps": ("engine steps", 0),
    "sampled_tokens": ("tokens sampled", 0),
    "kept_share": ("kept", 3),
    "accuracy": ("held-out accuracy", 3),
    "reward": ("reward", 3),
    "length": ("length", 1),
    "entropy": ("entropy", 3),
    "distinct_responses": ("distinct responses", 3),
    "distinct_4grams": ("distinct 4-grams", 3),
}


def train(run: Path, words: Sequence[str]) -> None:
    """Bring a run to its end; one that was broken off goes on."""
    command = [sys.executable, "-m", "stretto"]
    if (run / "config.toml").exists():
        command += ["resume", str(run)]
    else:
        command += ["train", "demo", *words, "--runs", str(run.parent), "--name", run.name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(run: Path) -> dict[str, Any]:
    """A finished run's figures: time and counts of all its updates, the rest of its last visit of the data."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/rollout" in line]
    logs = {line["step"]: read_rollouts(run / f"consumed/step-{line['step']:06}.parquet") for line in steps}
    newest = max(rollout.visit for rollouts in logs.values() for rollout in rollouts)
    last = [line for line in steps if any(r.visit == newest for r in logs[line["step"]])]
    groups: dict[int, list[Rollout]] = {}
    for line in last:
        for rollout in logs[line["step"]]:
            groups.setdefault(rollout.group_id, []).append(rollout)
    generated = sum(rollout.token_ids.size for rollouts in logs.values() for rollout in rollouts)
    kept = sum(line.get("reuse/kept_tokens", 0) for line in steps)
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    return {
        "updates": len(steps),
        "rollout_seconds": sum(line["time/rollout"] for line in steps),
        "engine_steps": sum(line["engine/steps"] for line in steps),
        "sampled_tokens": generated - kept,
        "kept_share": kept / generated,
        "accuracy": accuracies[-1] if accuracies else None,
        "reward": mean(line["reward/mean"] for line in last),
        "length": mean(line["response_length/mean"] for line in last),
        "entropy": mean(line["policy/entropy"] for line in last),
        **diversity([[r.token_ids.tolist() for r in rollouts] for rollouts in groups.values()]),
    }


def diversity(groups: Sequence[Sequence[Sequence[int]]]) -> dict[str, float]:
    """Of the responses of a group the share that are distinct, and so for their 4-grams; means over groups."""
    grams = [[tuple(r[i : i + 4]) for r in group for i in range(len(r) - 3)] for group in groups]
    return {
        "distinct_responses": mean(len({tuple(r) for r in group}) / len(group) for group in groups),
        "distinct_4grams": mean(len(set(found)) / len(found) for found in grams if found),
    }


def mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else math.nan


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each mode, means over seeds with the smallest and the largest.

    Speed is the exact mode's rollout seconds over this one's, seed by seed.
    """
    exact = {cell["seed"]: cell["rollout_seconds"] for cell in cells if cell["mode"] == "exact"}
    rows = [["mode", *(title for title, _ in COLUMNS.values())], ["---", *["---:"] * len(COLUMNS)]]
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        found = [dict(cell) for cell in cells if cell["mode"] == mode]
        for cell in found:
            cell["speed"] = exact[cell["seed"]] / cell["rollout_seconds"] if cell["seed"] in exact else None
        rows.append(
            [mode, *(spread([c[name] for c in found], digits) for name, (_, digits) in COLUMNS.items())]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def spread(values: Sequence[float | None], digits: int) -> str:
    """Mean (least to largest) of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    text = f"{np.mean(known):,.{digits}f}"
    return f"{text} ({min(known):,.{digits}f} to {max(known):,.{digits}f})" if len(known) > 1 else text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="only these")
    parser.add_argument("--results", type=Path, default=Path("studies/results/reuse"))
    options, keys = parser.parse_known_args(arguments)
    (options.results / "cells").mkdir(parents=True, exist_ok=True)
    cells = []
    for seed in range(options.seeds):
        for mode in options.modes:
            name = f"{''.join(c if c.isalnum() else '-' for c in mode)}-{seed}"
            file = options.results / "cells" / f"{name}.json"
            if not file.exists():
                run = options.results / "runs" / name
                train(run, [*keys, "--seed", str(seed), *MODES[mode]])
                cell = {"mode": mode, "seed": seed, "keys": keys, **measure(run)}
                file.write_text(json.dumps(cell, indent=1) + "\n")
                shutil.rmtree(run)
                print(
                    f"{mode}, seed {seed}: {cell['rollout_seconds']:.0f} s, reward {cell['reward']:.3f}",
                    flush=True,
                )
            cells.append(json.loads(file.read_text()))
    if len({json.dumps(cell["keys"]) for cell in cells}) > 1:
        raise SystemExit(
            f"the cells in {options.results} were run with different keys: remove some, or use another --results"
        )
    text = table(cells)
    (options.results / "table.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
