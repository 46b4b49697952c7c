"""The micro-curriculum and staleness in training: `sorted` against `synchronous` on the demo, from the same data.

    python -m studies.curriculum [--seeds 3] [--results FOLDER] [--key value ...]

`sorted` gives updates of short responses first and long ones last. On-policy it refreshes what has begun; the partial
mode trains on responses that several policies have written, with truncated importance weights, or without any
("uncorrected": as if the policy that is updated had written them); post hoc a whole load is generated and then sorted.
All arms take the same prompts in the same order, and as many updates. Writes `FOLDER/table.md` and, by updates and by
seconds, `FOLDER/reward.svg`. Called again, the study goes on. Seconds mean something only if nothing else is at work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stretto.history.log import read_rollouts
from studies.cells import Cell, last_accuracy, mean, run_cells, steps_of, table

SORTED = ("--schedule.kind", "sorted", "--schedule.load_prompts", "4")
UNCORRECTED = ("--learner.importance_cap", "none")
ARMS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "sorted, on-policy": (*SORTED, "--schedule.max_staleness", "0"),
    "sorted, partial": (*SORTED, "--schedule.max_staleness", "none"),
    "sorted, partial, uncorrected": (*SORTED, "--schedule.max_staleness", "none", *UNCORRECTED),
    "sorted, post hoc": (*SORTED, "--schedule.post_hoc", "true", "--schedule.max_staleness", "none"),
}
COLUMNS = {  # figure -> title, digits
    "accuracy": ("held-out accuracy", 3),
    "best_reward": ("best mean reward of a load", 3),
    "last_reward": ("reward of the last load", 3),
    "entropy": ("entropy of the last load", 3),
    "length": ("length of the last load", 1),
    "staleness": ("mean staleness", 2),
    "seconds": ("seconds", 0),
    "generated": ("tokens generated per trained", 3),
}
LOAD = 4  # updates


def measure(run: Path) -> Cell:
    """A finished run's figures; rewards are those of training, which each update sees another part of a load of."""
    steps = steps_of(run)
    rewards = [float(line["reward/mean"]) for line in steps]
    loads = [mean(iter(rewards[i : i + LOAD])) for i in range(0, len(rewards), LOAD)]
    logs = [read_rollouts(run / f"consumed/step-{line['step']:06}.parquet") for line in steps]
    trained = sum(rollout.token_ids.size for rollouts in logs for rollout in rollouts)
    last = steps[-LOAD:]
    return {
        "accuracy": last_accuracy(run),
        "best_reward": max(loads),
        "last_reward": loads[-1],
        "entropy": mean(float(line["policy/entropy"]) for line in last),
        "length": mean(float(line["response_length/mean"]) for line in last),
        "staleness": mean(float(line["off_policy/staleness_mean"]) for line in steps),
        "seconds": sum(line["time/total"] for line in steps),
        "generated": sum(line["engine/decode_steps"] + line["spec/accepted"] for line in steps) / trained,
        "rewards": rewards,
        "times": np.cumsum([line["time/total"] for line in steps]).tolist(),
    }


def plot(cells: Sequence[Cell], file: Path) -> None:
    """Mean reward of the loads, against updates and against seconds; a line for each arm, its seeds pale."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "stretto"  # the same picture from the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for number, arm in enumerate(dict.fromkeys(cell["arm"] for cell in cells)):
        of_arm = [cell for cell in cells if cell["arm"] == arm]
        ends = np.arange(LOAD, len(of_arm[0]["rewards"]) + 1, LOAD)
        loads = np.array([np.array(c["rewards"])[: ends[-1]].reshape(-1, LOAD).mean(axis=1) for c in of_arm])
        seconds = np.array([np.array(c["times"])[ends - 1] for c in of_arm])
        for axis, places in zip(axes, (np.broadcast_to(ends, loads.shape), seconds), strict=True):
            axis.plot(places.T, loads.T, color=f"C{number}", alpha=0.25, linewidth=0.8)
            axis.plot(places.mean(axis=0), loads.mean(axis=0), color=f"C{number}", label=arm)
    axes[0].set(xlabel="updates", ylabel=f"mean reward of {LOAD} updates")
    axes[1].set(xlabel="seconds")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="only these")
    parser.add_argument("--results", type=Path, default=Path("studies/results/curriculum"))
    options, keys = parser.parse_known_args(arguments)
    cells = run_cells(options.results, {arm: ARMS[arm] for arm in options.arms}, options.seeds, keys, measure)
    text = table(cells, COLUMNS, "arm")
    (options.results / "table.md").write_text(text)
    plot(cells, options.results / "reward.svg")
    print(text, end="")


if __name__ == "__main__":
    main()
