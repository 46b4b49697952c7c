"""Deterministic simulation testing: random worlds from seeds, invariants after every event.

    python -m studies.simulation [--seeds 100000] [--runs FOLDER]
    python -m studies.simulation --seed 123

From a seed, `tests/simulation` draws a schedule with its knobs, a workload, workers that come and go, late weights,
missing rewards, crashes, and runs the real controller, ledger and schedule in it. Finished parts are kept in the
folder's `parts.jsonl`; called again, the study goes on with the missing ones, and anew when the code has changed. With
`--seed` one world is run, and what happened before a violation is printed. Exit status 1 if an invariant does not hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

from studies.kept import code, read_lines
from tests.simulation.scenario import draw
from tests.simulation.world import Outcome, Violation, simulate

TESTS = Path(__file__).parent.parent / "tests" / "simulation"
PART = 250  # seeds
Part = dict[str, Any]


def run_part(first: int, last: int) -> Part:
    """Seeds `first` .. `last` - 1: by kind of schedule how much was tried, and the seeds that fail."""
    kinds: dict[str, Counter[str]] = {}
    failed: list[tuple[int, str]] = []
    began = time.process_time()
    for seed in range(first, last):
        tried = kinds.setdefault(draw(seed).config.kind, Counter())
        tried["seeds"] += 1
        try:
            outcome = simulate(seed)
        except Violation as violation:
            failed.append((seed, str(violation).partition("\n")[0]))
            continue
        tried.update(
            {field.name: getattr(outcome, field.name) for field in fields(Outcome) if field.type == "int"}
        )
    cpu = time.process_time() - began
    return {"first": first, "last": last, "kinds": kinds, "failed": failed, "cpu_seconds": cpu}


def read_parts(path: Path, wanted: str) -> dict[int, Part]:
    """Finished parts of this code, by their first seed."""
    return {part["first"]: part for part in read_lines(path) if part["code"] == wanted}


def run_missing(seeds: int, path: Path, wanted: str) -> Iterator[Part]:
    """All parts, the finished ones first; new ones are added to the file."""
    done = read_parts(path, wanted)
    yield from (part for part in done.values() if part["last"] <= seeds)
    path.parent.mkdir(parents=True, exist_ok=True)
    ranges = [(first, min(seeds, first + PART)) for first in range(0, seeds, PART)]
    missing = [(first, last) for first, last in ranges if done.get(first, {}).get("last") != last]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool, path.open("a") as file:
        for future in as_completed([pool.submit(run_part, *part) for part in missing]):
            part = {"code": wanted, **future.result()}
            file.write(json.dumps(part) + "\n")
            file.flush()
            yield part


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--runs", type=Path, default=Path("runs/simulation"))
    arguments = parser.parse_args()
    if arguments.seed is not None:
        try:
            print(draw(arguments.seed))
            print(simulate(arguments.seed))
        except Violation as violation:
            print(violation)
            return 1
        return 0
    kinds: dict[str, Counter[str]] = {}
    failed: list[tuple[int, str]] = []
    seconds = 0.0
    for part in run_missing(arguments.seeds, arguments.runs / "parts.jsonl", code(TESTS)):
        for kind, tried in part["kinds"].items():
            kinds.setdefault(kind, Counter()).update(tried)
        failed += part["failed"]
        seconds += part["cpu_seconds"]
        for seed, message in part["failed"]:
            print(f"  python -m studies.simulation --seed {seed}   # {message}")
    total = sum(kinds.values(), Counter())
    for kind, tried in [*sorted(kinds.items()), ("all", total)]:
        print(
            f"{kind:14}"
            + "".join(
                f"{tried[name]:>12,} {name}"
                for name in ("seeds", "updates", "events", "consumed", "discarded", "crashes")
            )
        )
    print(f"{1e3 * seconds / max(1, total['seeds']):.0f} ms of CPU time per seed; {len(failed)} violations")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
