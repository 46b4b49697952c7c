"""Does the simulator predict real runs? Each schedule trains the demo on a CPU, and is simulated with its lengths.

    python -m studies.simulator [KIND ...] [--drafts] [--results FOLDER] [--processes N] [--repeats N]

The costs come from another run (`synchronous`, a seed that no compared run has), with one factor for the machine's
speed: that run's median step time over the one that it has when it is simulated itself. Each schedule is trained
`--repeats` times, from seed 0 on, and each run compared with its own simulation; the table has means over the runs, and
the 95 % interval (Student's t) of the difference. Of each run the last `MARGIN` updates are left out: what was
unfinished when it ended has no recorded length. Weights hardly move (learning rate 1e-6), so a response that is
generated again is as long as before; a simulated one is by definition. Runs are kept and resumed: called again, the
study goes on. Counts mean something on any machine, seconds on an idle one only. Writes `FOLDER/table.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from stretto import metrics_file
from stretto.config import Config, load_config
from stretto.engine.simulated import StepCost
from stretto.schedule import make_schedule
from stretto.simulate.calibrate import calibration
from stretto.simulate.cost import Costs
from stretto.simulate.workload import Recorded
from stretto.simulate.world import Cluster, Drafting, SimulatedWorld

MARGIN = 2
CALIBRATION_SEED = 1000  # which no compared run has
SMALL = (
    "--schedule.prompts", "8", "--schedule.samples", "8", "--engine.max_num_seqs", "32", "--eval.limit", "8",
    "--learner.learning_rate", "1e-6",
)  # fmt: skip
KINDS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "sorted": ("--schedule.load_prompts", "4", "--schedule.max_staleness", "0"),
    "concurrency": ("--schedule.max_staleness", "none", "--schedule.concurrency", "32"),
    "tail_batching": (),
    "divided": ("--schedule.chunk_size", "32"),
    "stream": (),
    "async": (),
    "histopipe": ("--schedule.bands", "2"),
    "elastic": (),
}
Figures = dict[str, float]
Both = dict[str, Figures]
"""Of one run, "real" and "simulated"."""


def train(run: Path, words: Sequence[str]) -> None:
    """Bring a run to its end; one that was broken off goes on."""
    command = [sys.executable, "-m", "stretto"]
    if (run / "config.toml").exists():
        command += ["resume", str(run)]
    else:
        command += ["train", "demo", *SMALL, *words, "--runs", str(run.parent), "--name", run.name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def available_seconds(line: dict[str, Any], config: Config) -> float:
    """Of an update, how long a slot could have been busy: not while the learner or the recorder work in its stead."""
    if config.fleet.kind == "processes" and make_schedule(config.schedule).overlaps:
        return float(line["time/total"])
    return float(line["time/total"] - line["time/update"] - line["time/boundary"])


def measured(lines: Sequence[dict[str, Any]], config: Config) -> Figures:
    """A run's figures, from its metrics."""
    steps = sum(line["engine/steps"] for line in lines)
    decoding = sum(line["engine/decode_steps"] for line in lines)
    available = [available_seconds(line, config) for line in lines]
    idle = sum(s * line["rollout/bubble_ratio"] for s, line in zip(available, lines, strict=True))
    return {
        "steps": steps,
        "idle by counts": 1.0 - decoding / (config.engine.max_num_seqs * steps),
        "idle": idle / sum(available),
        "median s": statistics.median(line["time/total"] for line in lines),
    }


def simulated(run: Path, measured: dict[str, Any], updates: int, drafts: bool) -> Figures:
    """The same figures of the run's prompts and lengths, simulated at the costs `measured`.

    A simulated slot is busy from step to step, a real one in them; what is between them is the calibration run's share.
    """
    costs, steps_share = measured["cost"], 1.0 - measured["between_steps"]
    config = load_config(run / "config.toml")
    beside = config.fleet.kind == "processes"
    workers, slots = config.fleet.workers if beside else 1, config.engine.max_num_seqs
    step = StepCost(*(costs[name] for name in ("base", "per_token", "per_context", "per_prefill")))
    world = SimulatedWorld(
        config.schedule,
        Recorded(run),
        Cluster(
            workers=workers,
            slots=slots,
            shared=0 if beside else workers,
            reward_seconds=costs["reward"],
            report_seconds=max(
                1e-3, costs["base"]
            ),  # schedules that watch lengths hear of them at every step
        ),
        Costs(step, costs["train_base"], costs["train_per_token"], costs["sync"], None),
        max_new_tokens=config.sampling.max_new_tokens,
        seed=config.seed,
        drafting=Drafting(nodes=measured["drafts"]["nodes"]) if drafts else None,
    ).run(updates)
    counters = [update.counters for update in world.updates]

    def total(name: str) -> float:
        return sum(c[name] for c in counters)

    harvests = [0.0, *(update.harvested for update in world.updates)]
    return {
        "steps": total("steps"),
        "idle by counts": 1.0 - total("decode_steps") / (slots * total("steps")),
        "idle": 1.0 - steps_share * total("busy_slot_seconds") / total("available_slot_seconds"),
        "median s": statistics.median(b - a for a, b in zip(harvests, harvests[1:], strict=False)),
    }


def compare(run: Path, costs: dict[str, Any], drafts: bool) -> Both:
    """A run's figures, real and simulated."""
    lines = [line for line in metrics_file.read(run / "metrics.jsonl") if line["step"] > 0][:-MARGIN]
    real = measured(lines, load_config(run / "config.toml"))
    return {"real": real, "simulated": simulated(run, costs, len(lines), drafts)}


def interval(values: Sequence[float], form: str) -> str:
    """Their mean, and where there are several its 95 % interval, under the assumption that they are normal."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return f"{mean:+{form}}"
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(values) / n**0.5
    return f"{mean:+{form}} ({mean - half:+{form}} to {mean + half:+{form}})"


def table(found: dict[str, list[Both]], factor: float) -> list[str]:
    """In Markdown: means of the real runs, and what is simulated against them; seconds are simulated ones times
    `factor`.
    """
    lines = [
        f"The machine's speed against the calibration: {factor:.3f}. Differences: simulated - real.",
        "",
        "| schedule | runs | engine steps | difference | idle by counts | difference | idle by time | difference "
        "| median step s | difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, runs in found.items():

        def mean(name: str, runs: Sequence[Both] = runs) -> float:
            return statistics.fmean(both["real"][name] for both in runs)

        def ratio(name: str, scale: float = 1.0, runs: Sequence[Both] = runs) -> str:
            off = [scale * both["simulated"][name] / both["real"][name] - 1.0 for both in runs]
            return interval(off, ".1%")

        def points(name: str, runs: Sequence[Both] = runs) -> str:
            return interval([100.0 * (both["simulated"][name] - both["real"][name]) for both in runs], ".1f")

        lines.append(
            f"| {kind} | {len(runs)} | {mean('steps'):.0f} | {ratio('steps')} "
            f"| {mean('idle by counts'):.1%} | {points('idle by counts')} | {mean('idle'):.1%} | {points('idle')} "
            f"| {mean('median s'):.2f} | {ratio('median s', factor)} |"
        )
    return lines


def main() -> int:
    """Train what is missing, simulate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="schedules; none: all")
    parser.add_argument("--results", type=Path, default=Path("runs/simulator"))
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each schedule, from seed 0 on")
    parser.add_argument("--drafts", action="store_true", help="with drafts; else without")
    parser.add_argument(
        "--processes", type=int, default=0, help="workers of a fleet of processes; 0: in process"
    )
    options = parser.parse_args()
    folder = options.results / f"{'drafts' if options.drafts else 'plain'}-{options.processes}"
    words = ["--steps", str(options.steps)]
    if not options.drafts:
        words += ["--draft.budget", "none"]
    if options.processes:
        words += ["--fleet.kind", "processes", "--fleet.workers", str(options.processes)]
    calibrated = folder / f"calibration-{CALIBRATION_SEED}"
    train(calibrated, [*words, "--seed", str(CALIBRATION_SEED)])
    costs = calibration(calibrated)
    speed = compare(calibrated, costs, options.drafts)
    found: dict[str, list[Both]] = {}
    for kind in options.kinds or KINDS:
        for seed in range(options.repeats):
            run = folder / f"{kind}-{seed}"
            train(run, [*words, "--seed", str(seed), "--schedule.kind", kind, *KINDS[kind]])
            both = compare(run, costs, options.drafts)
            found.setdefault(kind, []).append(both)
            print(json.dumps({"schedule": kind, "seed": seed, **both}), flush=True)
    lines = table(found, speed["real"]["median s"] / speed["simulated"]["median s"])
    (folder / "table.md").write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
