"""The published tables beside ours: every scenario of studies/published, simulated.

    python -m studies.published [NAME ...] [--runs FOLDER] [--json]

Workloads and costs stand in the scenario files, with the reasoning; they are the same for all schedules and were fixed
before the schedules were run. Finished cells are kept in the folder's `cells.jsonl`; called again, the study goes on
with the missing ones, and with those whose scenario or code has changed. A schedule that does not exist yet is listed
as missing.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.simulate.command import run_candidate
from stretto.simulate.scenario import parse_scenario
from studies.kept import code, read_lines

HEAD = """\
# Published results, simulated

<!-- Written by studies/published.py (`make study-published ARGS="--docs docs/published.md"`). -->

Everything called "ours" on this page is **simulated**: the schedules, controller and ledger that train, in a simulated
cluster (see [simulate.md](simulate.md)). Nothing here was measured on GPUs. Workloads and costs, with the reasoning,
stand in `studies/published/`. They were committed before any of these schedules was run, only the synchronous rows
were fitted, and they are the same for all schedules; what was added later is said to be under each table. What the
papers do not say is assumed there, so a difference may be the assumption's. Idle is the slots' idle ratio; speed-ups
are in useful tokens per second over the first row. Explanations in the texts are asserted, in small, by
`tests/simulate/test_explanations.py`.
"""
SCENARIOS = Path(__file__).parent / "published"
Tree = dict[str, Any]


def variants(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """The scenario as it stands, and with one thing changed at a time where it names what to vary."""
    yield "", tree
    sensitivity = tree.get("published", {}).get("sensitivity", {})
    for fit in sensitivity.get("cost_ratio", []):
        changed = copy.deepcopy(tree)
        changed["workload"]["lognormal"][0] = fit["median"]
        changed["cost"] |= {"base": fit["base"], "per_token": fit["per_token"]}
        yield f"a / (b Q) = {fit['ratio']:g}", changed
    for slots in sensitivity.get("slots", []):
        changed = copy.deepcopy(tree)
        changed["cluster"]["slots"] = slots
        yield f"Q = {slots}", changed
    for load in sensitivity.get("load_prompts", []):
        changed = copy.deepcopy(tree)
        for table in changed["schedule"]:
            if "load_prompts" in table:
                table["steps"] = table["steps"] * load // table["load_prompts"]
                table["load_prompts"] = load
        yield f"load = {load} batches", changed
    for change in sensitivity.get("changed", []):
        changed = copy.deepcopy(tree)
        for section in ("cluster", "cost", "workload"):
            changed[section] |= change.get(section, {})
        chosen = [tree["published"]["baseline"], *change.get("schedules", [])]
        changed["schedule"] = [
            table | change.get("schedule", {}) if table["name"] != chosen[0] else table
            for table in changed["schedule"]
            if table["name"] in chosen
        ]
        yield change["name"], changed


def cells(tree: Tree) -> Iterator[tuple[str, str, Tree]]:
    """(variant, schedule's name, a scenario with that schedule alone)."""
    for variant, changed in variants(tree):
        for table in changed["schedule"]:
            alone = {key: value for key, value in changed.items() if key != "published"} | {
                "schedule": [table]
            }
            yield variant, table.get("name", table["kind"]), alone


def digest(tree: Tree, made_by: str) -> str:
    """Of all that a cell's result depends on: the scenario, and the hash of the code."""
    return hashlib.blake2b(json.dumps([tree, made_by], sort_keys=True).encode(), digest_size=8).hexdigest()


def simulate_cell(tree: Tree) -> dict[str, Any]:
    """The cell's figures, or why there are none: its schedule is not there yet."""
    try:
        scenario = parse_scenario(tree, SCENARIOS)
        found, _ = run_candidate(scenario, scenario.candidates[0])
    except (StrettoError, ModuleNotFoundError) as error:
        return {"missing": str(error)}
    del found["updates"]
    return found


def ratio_of(found: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Useful tokens per second of one cell over another's."""
    if "missing" in found or "missing" in other:
        return None
    return float(found["useful_tokens_per_s"] / other["useful_tokens_per_s"])


def responses_ratio(found: dict[str, Any], other: dict[str, Any]) -> float:
    """Responses trained on per second of one cell over another's: what counts where one keeps short responses only."""
    return float(found["responses"] / found["seconds"] / (other["responses"] / other["seconds"]))


def table(tree: Tree, done: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """One scenario's results in Markdown: published figures beside ours, and what to make of them."""
    published = tree["published"]
    rows, baseline = published["rows"], published["baseline"]
    lines = [f"## {published['source']}", ""]
    for variant, changed in variants(tree):
        if variant:
            lines += ["", f"### {variant}", ""]
        lines += [
            "| schedule | published speed-up | ours | in responses/s | published idle | ours | useful tok/s "
            "| discarded tok/s | re-verified tok/s | staleness mean / max |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        base = done[variant, baseline]
        for entry in changed["schedule"]:
            name = entry.get("name", entry["kind"])
            lines.append(_row(name, rows.get(name, {}) if not variant else {}, done[variant, name], base))
    for name, against in published.get("against", {}).items():
        ours = ratio_of(done["", name], done["", against["row"]])
        lines += ["", f"{name} over {against['row']}: published {against['speedup']}x, ours {_times(ours)}."]
    if "reading" in published:
        lines += ["", published["reading"].strip()]
    return [*lines, ""]


def _row(name: str, published: dict[str, Any], found: dict[str, Any], base: dict[str, Any]) -> str:
    low_high = published.get("speedup_range")
    claimed = f"{low_high[0]}-{low_high[1]}x" if low_high else _times(published.get("speedup"))
    idle = f"{published['slot_idle']:.1%}" if "slot_idle" in published else ""
    if "missing" in found:
        return f"| {name} | {claimed} | missing: {found['missing'].splitlines()[0]} | | {idle} | | | | | |"
    ours, responses = _times(ratio_of(found, base)), _times(responses_ratio(found, base))
    idled = 0.0 if -1e-9 < found["slot_idle"] < 0.0 else found["slot_idle"]  # a sum of rounded seconds
    return (
        f"| {name} | {claimed} | {ours} | {responses} | {idle} | {idled:.1%} "
        f"| {found['useful_tokens_per_s']:,.0f} | {found['discarded_tokens_per_s']:,.0f} "
        f"| {found['reverified_tokens_per_s']:,.0f} | {found['staleness_mean']:.2f} / {found['staleness_max']} |"
    )


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value is not None else ""


def main() -> int:
    """Simulate what is missing, then print all tables and write them to `published.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted(path.stem for path in SCENARIOS.glob("*.toml"))
    parser.add_argument("names", nargs="*", choices=[[], *names], help="scenarios; none: all")
    parser.add_argument("--runs", type=Path, default=Path("runs/published"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--docs", type=Path, help="also write the page there: docs/published.md")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    store = options.runs / "cells.jsonl"
    known = {(c["scenario"], c["variant"], c["schedule"], c["digest"]): c["found"] for c in read_lines(store)}
    made_by = code()
    report: list[str] = []
    for name in options.names or names:
        tree = tomllib.loads((SCENARIOS / f"{name}.toml").read_text("utf-8"))
        done: dict[tuple[str, str], dict[str, Any]] = {}
        for variant, schedule, alone in cells(tree):
            key = (name, variant, schedule, digest(alone, made_by))
            if key not in known:
                known[key] = simulate_cell(alone)
                if "missing" not in known[key]:  # what is missing today is tried again
                    cell = dict(zip(("scenario", "variant", "schedule", "digest"), key, strict=True))
                    with store.open("a") as file:
                        file.write(json.dumps({**cell, "found": known[key]}) + "\n")
            done[variant, schedule] = known[key]
        report += table(tree, done)
        if options.json:
            print(json.dumps({"scenario": name, "cells": [[*key, found] for key, found in done.items()]}))
    text = "\n".join(report)
    (options.runs / "published.md").write_text(text, "utf-8")
    if options.docs is not None:
        options.docs.write_text(f"{HEAD}\n{text}", "utf-8")
    if not options.json:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
