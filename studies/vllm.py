"""The demo trained with vLLM's engine against the embedded one, from the same seeds: do both learn the same?

    python -m studies.vllm [--seeds 3] [--samples 4] [--results FOLDER] [--key value ...]

Needs vLLM (`make study-vllm` makes its environment). Each trained policy answers the held-out puzzles `--samples`
times with the same noise, so the difference is paired. Two intervals of it are given, 95 % each. Over puzzles, given
these policies: averaged over seeds and samples, it says what other puzzles would have changed. Over seeds, by Student's
t: it says what other trainings would have, which is what is asked here; with three seeds it is wide. Writes
`FOLDER/table.md`. Called again, the study goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stretto.assemble import read_inputs, settle_process
from stretto.config import load_config
from stretto.evaluation import evaluate
from stretto.history.log import read_rollouts
from stretto.model import load_model
from stretto.records import FloatArray
from stretto.tasks.sources import reward_spec
from stretto.tasks.workers import RewardWorkers
from studies.cells import Cell, run_cells, steps_of, table

ARMS: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "vllm": ("--engine.kind", "vllm"),
    "vllm, 2 processes": ("--engine.kind", "vllm", "--fleet.kind", "processes", "--fleet.workers", "2"),
}
NORMAL = 1.96
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles, of 1, 2, ... degrees of freedom for the latter."""
COLUMNS = {  # figure -> title, digits
    "accuracy": ("held-out accuracy", 4),
    "mismatch_max": ("largest difference of engine's and learner's log-probs", 7),
    "mismatch": ("mean", 9),
    "last_reward": ("reward of the last step", 3),
    "accepted": ("tokens per request and step", 3),
    "generated": ("tokens", 0),
}


def measure(run: Path, samples: int) -> Cell:
    """A finished run's figures; `answers` is how often each held-out puzzle was answered rightly, 0 to 1."""
    steps = steps_of(run)
    answers = answered(run, samples)
    tokens = sum(
        rollout.token_ids.size
        for file in sorted((run / "consumed").glob("*.parquet"))
        for rollout in read_rollouts(file)
    )
    return {
        "accuracy": float(np.mean(answers)),
        "answers": answers,
        "mismatch_max": max(float(line["off_policy/logprob_mismatch_max"]) for line in steps),
        "mismatch": float(np.mean([line["off_policy/logprob_mismatch"] for line in steps])),
        "last_reward": float(steps[-1]["reward/mean"]),
        "accepted": float(np.mean([line["spec/mean_acceptance_length"] for line in steps])),
        "generated": tokens,
    }


def answered(run: Path, samples: int) -> list[float]:
    """Rewards of the run's newest checkpoint on each held-out row, averaged over `samples` responses."""
    checkpoint = (run / "latest").resolve()
    config = load_config(run / "config.toml", {"eval.samples": samples}, saved=True)
    settle_process(config)
    inputs = read_inputs(config)
    model = load_model(config.model.model_copy(update={"path": str(checkpoint), "tokenizer": None}))
    spec = reward_spec(config.reward, inputs.data, None)
    with RewardWorkers(spec, config.reward, lambda event: None, lambda text: []) as workers:
        found = evaluate(
            model,
            inputs.tokenizer,
            inputs.test,
            workers,
            config,
            ends=inputs.ends,
            max_model_len=inputs.max_model_len,
        )
    if found.interrupted:
        raise KeyboardInterrupt
    rewards = np.array([rollout.reward for rollout in found.rollouts]).reshape(-1, samples)
    means: list[float] = rewards.mean(axis=1).tolist()
    return means


def difference(cells: Sequence[Cell], arm: str) -> str:
    """A sentence: `arm` minus embedded, with its intervals over puzzles and over seeds, and by seed."""

    def of(name: str) -> FloatArray:
        rows = sorted((cell for cell in cells if cell["arm"] == name), key=lambda cell: int(cell["seed"]))
        return np.array([cell["answers"] for cell in rows])

    each = of(arm) - of("embedded")  # (seeds, puzzles)
    puzzles = each.mean(axis=0)
    seeds = 100 * each.mean(axis=1)
    by_seed = ", ".join(f"{value:+.2f}" for value in seeds)
    text = (
        f"{arm} minus embedded, points of accuracy: mean over {seeds.size} seeds {seeds.mean():+.2f} "
        f"(by seed {by_seed}); 95 % interval over puzzles, given these policies, {_interval(100 * puzzles, NORMAL)}"
    )
    if 1 < seeds.size <= len(STUDENT) + 1:
        text += f"; over seeds {_interval(seeds, STUDENT[seeds.size - 2])}"
    return text + "\n"


def _interval(values: FloatArray, quantile: float) -> str:
    half = quantile * values.std(ddof=1) / np.sqrt(values.size)
    return f"{values.mean() - half:+.2f} to {values.mean() + half:+.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="answers to each held-out puzzle")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["embedded", "vllm"], help="only these")
    parser.add_argument("--results", type=Path, default=Path("studies/results/vllm"))
    options, keys = parser.parse_known_args(arguments)
    arms = {arm: ARMS[arm] for arm in options.arms}
    cells = run_cells(options.results, arms, options.seeds, keys, lambda run: measure(run, options.samples))
    text = table(cells, COLUMNS, "engine")
    for arm in options.arms:
        if arm != "embedded" and "embedded" in arms:
            text += "\n" + difference(cells, arm)
    (options.results / "table.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
