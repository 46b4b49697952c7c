"""Does the simulator predict real runs? Each schedule trains the demo on a CPU, and is simulated with its lengths.

    python studies/simulator.py [KIND ...] [--drafts] [--results FOLDER] [--processes N]

The costs come from another run (`synchronous`, another seed), scaled by one factor for the machine's speed, the ratio
of the median step times. Of each run the last `MARGIN` updates are left out: what was unfinished when it ended has no
recorded length. Weights hardly move (learning rate 1e-6), so a response that is generated again is as long as before;
a simulated one is by definition. Runs are kept and resumed: called again, the study goes on. Counts mean something on
any machine, seconds on an idle one only. Writes `FOLDER/table.md`.
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

from stretto import metrics_file
from stretto.config import load_config
from stretto.engine.simulated import StepCost
from stretto.simulate.calibrate import calibration
from stretto.simulate.cost import Costs
from stretto.simulate.workload import Recorded
from stretto.simulate.world import Cluster, Drafting, SimulatedWorld

MARGIN = 2
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


def train(run: Path, words: Sequence[str]) -> None:
    """Bring a run to its end; one that was broken off goes on."""
    command = [sys.executable, "-m", "stretto"]
    if (run / "config.toml").exists():
        command += ["resume", str(run)]
    else:
        command += ["train", "demo", *SMALL, *words, "--runs", str(run.parent), "--name", run.name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measured(lines: Sequence[dict[str, Any]], slots: int) -> Figures:
    """A run's figures, from its metrics."""
    steps = sum(line["engine/steps"] for line in lines)
    decoding = sum(line["engine/decode_steps"] for line in lines)
    return {
        "steps": steps,
        "idle by counts": 1.0 - decoding / (slots * steps),
        "idle": statistics.mean(line["rollout/bubble_ratio"] for line in lines),
        "median s": statistics.median(line["time/total"] for line in lines),
    }


def _busy(counted: dict[str, float]) -> float:
    return counted["busy_slot_seconds"] / counted["available_slot_seconds"]


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
            workers=workers, slots=slots, shared=0 if beside else workers, reward_seconds=costs["reward"]
        ),
        Costs(step, costs["train_base"], costs["train_per_token"], costs["sync"], None),
        max_new_tokens=config.sampling.max_new_tokens,
        seed=config.seed,
        drafting=Drafting(nodes=measured["drafts"]["nodes"]) if drafts else None,
    ).run(updates)
    counters = [update.counters for update in world.updates]
    steps = sum(c["steps"] for c in counters)
    harvests = [0.0, *(update.harvested for update in world.updates)]
    return {
        "steps": steps,
        "idle by counts": 1.0 - sum(c["decode_steps"] for c in counters) / (slots * steps),
        "idle": 1.0 - steps_share * statistics.mean(_busy(counted) for counted in counters),
        "median s": statistics.median(b - a for a, b in zip(harvests, harvests[1:], strict=False)),
    }


def compare(folder: Path, kind: str, drafts: bool) -> dict[str, Figures]:
    """One schedule's figures, real and simulated."""
    run = folder / kind
    lines = [line for line in metrics_file.read(run / "metrics.jsonl") if line["step"] > 0][:-MARGIN]
    real = measured(lines, load_config(run / "config.toml").engine.max_num_seqs)
    ours = simulated(run, calibration(folder / "calibration"), len(lines), drafts)
    return {"real": real, "simulated": ours}


def table(found: dict[str, dict[str, Figures]], factor: float) -> list[str]:
    """In Markdown; seconds are simulated ones times `factor`."""
    lines = [
        "| schedule | engine steps | simulated | idle by counts | simulated | idle by time | simulated "
        "| median step s | simulated |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, both in found.items():
        real, ours = both["real"], both["simulated"]
        lines.append(
            f"| {kind} | {real['steps']:.0f} | {ours['steps']:.0f} ({ours['steps'] / real['steps'] - 1:+.1%}) "
            f"| {real['idle by counts']:.1%} | {ours['idle by counts']:.1%} | {real['idle']:.1%} | {ours['idle']:.1%} "
            f"| {real['median s']:.2f} | {factor * ours['median s']:.2f} |"
        )
    return lines


def main() -> int:
    """Train what is missing, simulate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="schedules; none: all")
    parser.add_argument("--results", type=Path, default=Path("runs/simulator"))
    parser.add_argument("--steps", type=int, default=32)
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
    train(folder / "calibration", [*words, "--seed", "1"])
    found: dict[str, dict[str, Figures]] = {}
    for kind in options.kinds or KINDS:
        train(folder / kind, [*words, "--seed", "0", "--schedule.kind", kind, *KINDS[kind]])
        found[kind] = compare(folder, kind, options.drafts)
        print(json.dumps({"schedule": kind, **found[kind]}))
    base = found.get("synchronous", next(iter(found.values())))
    lines = table(found, base["real"]["median s"] / base["simulated"]["median s"])
    (folder / "table.md").write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
