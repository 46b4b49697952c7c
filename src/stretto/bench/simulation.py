"""What simulating a cluster costs: microseconds of CPU time per response, schedule, ledger and engines all in.

Reasoning-like lengths, cut at 16k; one load of responses, four for each slot, is consumed in so many updates. The curve
goes through clusters that grow by fours up to the size asked for; n log n would let the cost per response grow by the
ratio of the logarithms, at most 1.25 from one to the next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from stretto.bench.pairs import require_idle
from stretto.simulate.command import run_candidate
from stretto.simulate.scenario import parse_scenario

SAMPLES = 8
OVERSUBSCRIBED = 4


def microseconds(kind: str, workers: int, slots: int, steps: int) -> dict[str, float]:
    """One run's cost per response generated, and what was simulated."""
    responses = OVERSUBSCRIBED * workers * slots
    prompts = max(1, responses // (SAMPLES * steps))
    tree = {
        "run": {"steps": steps, "warmup": 0},
        "cluster": {"workers": workers, "slots": slots, "trainer": "separate"},
        "cost": {"preset": "7b-h100", "kv_tokens": 4_000_000},
        "workload": {"trace": "reasoning", "max_new_tokens": 16384, "rows": prompts * steps},
        "schedule": [{"kind": kind, "prompts": prompts, "samples": SAMPLES, **_knobs(kind, steps)}],
    }
    scenario = parse_scenario(tree, Path())
    found, world = run_candidate(scenario, scenario.candidates[0])
    return {
        "workers": workers,
        "slots": slots,
        "responses": world.ended,
        "us_per_response": found["simulation_us_per_response"],
        "simulated_seconds": found["seconds"],
    }


def _knobs(kind: str, steps: int) -> dict[str, object]:
    """What lets the whole load in at once."""
    if kind == "sorted":
        return {"load_prompts": steps, "max_staleness": "none"}
    return {"max_staleness": steps - 1} if kind == "async" else {}


def main(argv: Sequence[str] = ()) -> int:
    """The curve up to the size asked for."""
    parser = argparse.ArgumentParser(prog="stretto bench simulation", description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="updates that consume the load")
    parser.add_argument("--kind", default="async", help="the schedule: async, sorted, synchronous")
    parser.add_argument("--points", type=int, default=3, help="sizes of the curve")
    parser.add_argument("--busy", action="store_true", help="measure though the machine is not idle")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if not options.busy:
        require_idle()
    sizes = [max(1, options.workers // 4**i) for i in reversed(range(options.points))]
    points = [microseconds(options.kind, workers, options.slots, options.steps) for workers in sizes]
    if options.json:
        print(json.dumps({"kind": options.kind, "steps": options.steps, "points": points}))
        return 0
    for point in points:
        print(
            f"{point['workers']:5,.0f} workers x {point['slots']:.0f} slots, {point['responses']:9,.0f} responses, "
            f"{options.steps} updates: {point['us_per_response']:.1f} us per response"
        )
    return 0
