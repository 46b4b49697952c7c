"""TRL's `GRPOTrainer` with its own generation, the same with `HistoryRollout`, and `stretto train`, on the demo's task.

    python -m studies.trl [--seeds 3] [--visits 4] [--busy] [--results FOLDER]      # pip install '.[dev,trl]'

All arms make the same number of updates from the same model, at TRL's defaults: DAPO's loss, rewards scaled by group,
no KL, AdamW without weight decay and with linear decay, gradient norm 1, temperature 1; 8 prompts x 8 completions of up
to 256 tokens an update, 4 updates a visit of 32 puzzles, learning rate 3e-4. What is drawn differs between the arms, so
rewards agree as those of two seeds do.

A cell is an arm and a seed, in a process of its own. Writes `FOLDER/table.md`; called again, the study goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from stretto.bench.pairs import Ratio, require_idle
from studies.cells import Cell, spread, steps_of, train

PUZZLES, PROMPTS, SAMPLES, TOKENS, RATE = 32, 8, 8, 256, 3e-4
PER_VISIT = PUZZLES // PROMPTS
ARMS = {  # whose generation, whose training, gradient checkpointing
    "TRL": ("trl", True),
    "TRL, HistoryRollout": ("rollout", True),
    "stretto train": ("stretto", True),
    "TRL, no checkpointing": ("trl", False),
    "TRL, HistoryRollout, no checkpointing": ("rollout", False),
    "stretto train, no checkpointing": ("stretto", False),
}
LOGGED = ("engine_seconds", "drafting_seconds", "index_seconds", "tokens_per_step", "acceptance")


def by_trl(rollout: bool, checkpointing: bool, seed: int, updates: int, folder: Path) -> Cell:
    """Train with `GRPOTrainer`; what each update took."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from stretto.integrations.trl import HistoryRollout
    from stretto.model import location
    from stretto.tasks.knights import KnightsAndKnaves

    task = KnightsAndKnaves(size=PUZZLES)
    generation: list[float] = []
    ends: list[float] = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [task.score(text, {"answer": a}) for text, a in zip(completions, answer, strict=True)]

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        """Times generation, from prompts to completions as text, whoever does it."""

        def _generate(self, prompts: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate(prompts)
            generation.append(time.perf_counter() - began)
            return found

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not ends:
                ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(location("demo"), dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(location("demo")),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(task.rows("train")),
        rollout_func=HistoryRollout() if rollout else None,
        callbacks=[Clock()],
        args=_arguments(checkpointing, seed, updates, folder),
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    found: Cell = {name: [line.get(f"stretto/{name}") for line in lines] for name in LOGGED if rollout}
    return found | {
        "generation": generation,
        "step": np.diff(ends).tolist(),
        "rewards": [line["reward"] for line in lines],
        "length": [line["completions/mean_length"] for line in lines],
    }


def _arguments(checkpointing: bool, seed: int, updates: int, folder: Path) -> Any:
    """TRL's defaults, but for the size of things and where they run."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=updates,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        learning_rate=RATE,
        gradient_checkpointing=checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )


def by_stretto(checkpointing: bool, seed: int, updates: int, folder: Path) -> Cell:
    """Train with `stretto train`, with TRL's defaults where they are others than its own."""
    import torch

    words = {
        "threads": torch.get_num_threads(),
        "data.args": f"{{size = {PUZZLES}}}",
        "sampling.max_new_tokens": TOKENS,
        "schedule.prompts": PROMPTS,
        "schedule.samples": SAMPLES,
        "learner.learning_rate": RATE,
        "learner.lr_schedule": "linear",
        "learner.gradient_checkpointing": str(checkpointing).lower(),
        "eval.enabled": "false",
        "checkpoint.every": 1_000_000,
        "steps": updates,
        "seed": seed,
    }
    run = folder / "run"
    train(run, [f"--{key}={value}" for key, value in words.items()])
    lines = steps_of(run)
    return {
        "generation": [line["time/rollout"] for line in lines],
        "step": [line["time/total"] for line in lines],
        "rewards": [line["reward/mean"] for line in lines],
        "length": [line["response_length/mean"] for line in lines],
    }


def run_cell(arm: str, seed: int, updates: int, file: Path) -> None:
    """Train, and write what was found to `file`."""
    who, checkpointing = ARMS[arm]
    folder = file.with_suffix("")
    if who == "stretto":
        found = by_stretto(checkpointing, seed, updates, folder)
    else:
        found = by_trl(who == "rollout", checkpointing, seed, updates, folder)
    file.write_text(json.dumps({"arm": arm, "seed": seed, "updates": updates, **found}) + "\n")
    shutil.rmtree(folder)


def cells(results: Path, arms: Sequence[str], seeds: int, updates: int, busy: bool) -> list[Cell]:
    """All of them; what is not there yet is run, arms in turns."""
    folder = results / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for seed in range(seeds):
        for arm in arms if seed % 2 == 0 else list(reversed(arms)):
            file = folder / f"{''.join(c if c.isalnum() else '-' for c in arm)}-{seed}.json"
            if not file.exists():
                require_idle(limit=float("inf") if busy else 0.2)
                words = ["--cell", arm, "--seed", str(seed), "--updates", str(updates), "--file", str(file)]
                subprocess.run(
                    [sys.executable, "-m", "studies.trl", *words], check=True, stdout=subprocess.DEVNULL
                )
                print(f"{arm}, seed {seed}: done", flush=True)
            cell = json.loads(file.read_text())
            if cell["updates"] != updates:
                raise SystemExit(
                    f"{file} made {cell['updates']} updates: remove it, or use another --results"
                )
            found.append(cell)
    return found


def by_visit(found: Sequence[Cell], plain: str, drafted: str) -> str:
    """Seconds of generation with TRL's own and with ours, update by update of the same number and seed.

    The first of ours includes what the engine's steps are measured in, once a run.
    """
    text = (
        "| visit | TRL's own, s | ours, s | ratio | of which engine, s | drafting, s | index (beside), s "
        "| tokens per step | right drafts |\n" + "| --- |" + " ---: |" * 8 + "\n"
    )
    pairs = [
        (a, b) for a in found for b in found if (a["arm"], b["arm"], a["seed"]) == (plain, drafted, b["seed"])
    ]
    visits = len(pairs[0][0]["generation"]) // PER_VISIT
    for name, first, last in [*((str(v + 1), v, v + 1) for v in range(visits)), ("2 and later", 1, visits)]:
        steps = slice(first * PER_VISIT, last * PER_VISIT)
        theirs = np.array([a["generation"][steps] for a, _ in pairs])
        ours = np.array([b["generation"][steps] for _, b in pairs])
        means = {name: np.mean([b[name][steps] for _, b in pairs], dtype=float) for name in LOGGED}
        text += (
            f"| {name} | {theirs.mean():.2f} | {ours.mean():.2f} | {Ratio.of((theirs / ours).ravel().tolist())} "
            f"| {means['engine_seconds']:.2f} | {means['drafting_seconds']:.3f} | {means['index_seconds']:.3f} "
            f"| {means['tokens_per_step']:.1f} | {means['acceptance']:.0%} |\n"
        )
    return text


def by_arm(found: Sequence[Cell]) -> str:
    """Seconds of an update, without the first one of each run, and the last visit's reward."""
    text = "| arm | seconds per update | of which generation | reward, first visit | last visit |\n| --- |"
    text += " ---: |" * 4 + "\n"
    for arm in dict.fromkeys(cell["arm"] for cell in found):
        mine = [cell for cell in found if cell["arm"] == arm]
        seconds = ([float(np.mean(c[name][1:])) for c in mine] for name in ("step", "generation"))
        rewards = (
            [float(np.mean(c["rewards"][part])) for c in mine]
            for part in (slice(PER_VISIT), slice(-PER_VISIT, None))
        )
        text += f"| {arm} | {' | '.join(spread(s, 2) for s in seconds)} | "
        text += f"{' | '.join(spread(r, 3) for r in rewards)} |\n"
    return text


def differences(found: Sequence[Cell], base: str) -> str:
    """The last visit's reward against that of `base`, seed by seed, with a 95 % interval of the mean (Student's t)."""
    text = ""
    last = {(c["arm"], c["seed"]): float(np.mean(c["rewards"][-PER_VISIT:])) for c in found}
    for arm in dict.fromkeys(cell["arm"] for cell in found):
        values = [last[arm, seed] - last[base, seed] for a, seed in last if a == arm != base]
        if len(values) > 1:
            half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
            text += f"{arm} minus {base}: {np.mean(values):+.3f} +- {half:.3f}\n"
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--visits", type=int, default=4)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="only these")
    parser.add_argument("--busy", action="store_true", help="measure although others use the machine")
    parser.add_argument("--results", type=Path, default=Path("studies/results/trl"))
    for name, kind in (("cell", str), ("seed", int), ("updates", int), ("file", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        run_cell(options.cell, options.seed, options.updates, options.file)
        return
    updates = options.visits * PER_VISIT
    found = cells(options.results, options.arms, options.seeds, updates, options.busy)
    text = f"Generation of an update, {PROMPTS} x {SAMPLES} completions of up to {TOKENS} tokens.\n\n"
    text += (
        by_visit(found, "TRL", "TRL, HistoryRollout")
        if {"TRL", "TRL, HistoryRollout"} <= set(options.arms)
        else ""
    )
    text += f"\n{by_arm(found)}\nReward of the last visit:\n\n{differences(found, options.arms[0])}"
    (options.results / "table.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
