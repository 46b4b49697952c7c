"""What the reuse modes, which are not exact, gain in time and do to training, against the exact mode.

    python -m studies.reuse [--seeds 3] [--results FOLDER] [--key value ...]

Each cell trains the demo in one mode from one seed, with the same number of updates; further keys go to every run. A
cell's figures are kept in `FOLDER/cells/`, and a run that was broken off is resumed: called again, the study goes on.
At the end it writes `FOLDER/table.md`. Seconds mean something on an idle machine only; counts always do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from stretto.history.log import read_rollouts
from stretto.records import Rollout
from studies.cells import Cell, last_accuracy, mean, run_cells, steps_of, table

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


def measure(run: Path) -> Cell:
    """A finished run's figures: time and counts of all its updates, the rest of its last visit of the data."""
    steps = steps_of(run)
    logs = {line["step"]: read_rollouts(run / f"consumed/step-{line['step']:06}.parquet") for line in steps}
    newest = max(rollout.visit for rollouts in logs.values() for rollout in rollouts)
    last = [line for line in steps if any(r.visit == newest for r in logs[line["step"]])]
    groups: dict[int, list[Rollout]] = {}
    for line in last:
        for rollout in logs[line["step"]]:
            groups.setdefault(rollout.group_id, []).append(rollout)
    generated = sum(rollout.token_ids.size for rollouts in logs.values() for rollout in rollouts)
    kept = sum(line.get("reuse/kept_tokens", 0) for line in steps)
    return {
        "updates": len(steps),
        "rollout_seconds": sum(line["time/rollout"] for line in steps),
        "engine_steps": sum(line["engine/steps"] for line in steps),
        "sampled_tokens": generated - kept,
        "kept_share": kept / generated,
        "accuracy": last_accuracy(run),
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


def with_speed(cells: Sequence[Cell]) -> list[Cell]:
    """With `speed`: the exact mode's rollout seconds over this one's, seed by seed."""
    exact = {cell["seed"]: cell["rollout_seconds"] for cell in cells if cell["arm"] == "exact"}
    return [
        {**cell, "speed": exact[cell["seed"]] / cell["rollout_seconds"] if cell["seed"] in exact else None}
        for cell in cells
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="only these")
    parser.add_argument("--results", type=Path, default=Path("studies/results/reuse"))
    options, keys = parser.parse_known_args(arguments)
    arms = {mode: MODES[mode] for mode in options.modes}
    cells = run_cells(options.results, arms, options.seeds, keys, measure)
    text = table(with_speed(cells), COLUMNS, "mode")
    (options.results / "table.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
