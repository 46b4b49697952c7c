"""Drafting replayed on recorded rollouts: tokens per step by source, weight, tree and budget; against arctic-inference.

History and targets are responses of two checkpoints to the same prompts (see `stretto.bench.recorded`). Each target is
walked through a drafter as if a model decoded it, 64 at a time, siblings side by side; what is accepted is exact, times
of steps are modelled. Where `arctic_inference` can be imported, its suffix decoding drafts the same targets, and both
are timed on synthetic histories of 10,000 tokens and more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.bench.arctic import INSTALL, UNLIMITED, ArcticDrafter, arctic
from stretto.bench.draft_matrix import geometric_means, matrix, step_cost
from stretto.bench.draft_noise import by_noise, show_noise
from stretto.bench.draft_speed import growth, speed, weight_bytes
from stretto.bench.pairs import Ratio, require_idle
from stretto.bench.recorded import EXCERPT, Recorded, read
from stretto.bench.replay import Replayed, replay
from stretto.draft import MAX_NODES, Drafts
from stretto.draft.budget import KINDS, Batch, Budget, Fixed, make_budget
from stretto.draft.drafter import HistoryDrafter
from stretto.engine import Drafter
from stretto.history.builds import Weight
from stretto.history.index import HistoryIndex
from stretto.records import BoolArray, IntArray
from stretto.sampling import kernel

SLOTS = 64
TREES = ("path of 8", "4 nodes", "16 nodes")
BUDGETS = (*KINDS, "aimd, multiplicative")
PARTS = ("acceptance", "noise", "budgets", "matrix", "speed")
REPLAYED = ("history", "siblings", "prompt")  # sources; nothing is dropped in a replay
COMBINATIONS = (REPLAYED[:1], REPLAYED[1:2], REPLAYED[2:], REPLAYED[:2], REPLAYED)
BATCHES = (1, 8, 64)
ALL = " + ".join(REPLAYED)
BAR_TOKENS = 1_000_000  # of history: where the speed bars are set
FASTER = {
    "step": "a step",
    "propose": "proposing alone",
    "proposed": "a step per proposed token",
    "insertion": "insertion",
}

Row = dict[str, Any]


@kernel()
def _first_children(counts: IntArray, parents: IntArray, most: int, keep: BoolArray) -> None:
    """Mark the first child of the root, its first child, and so on, at most `most` of each tree."""
    start = 0
    for count in counts:
        node, taken = -1, 0
        for child in range(count):
            if taken < most and parents[start + child] == node:
                keep[start + child] = True
                node, taken = child, taken + 1
        start += count


class BestPath(Budget):
    """One path: from the root on the most probable child, at most `nodes`, as far as a tree of MAX_NODES has it."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def choose(self, drafts: Drafts, batch: Batch) -> BoolArray:
        del batch
        keep = np.zeros(drafts.token_ids.size, np.bool_)
        _first_children(drafts.counts, drafts.parents, self.nodes, keep)  # siblings come best first
        return keep


def ours(
    recorded: Recorded,
    budget: Budget,
    nodes: int,
    *,
    slots: int = SLOTS,
    sources: Collection[str] = REPLAYED,
    weight: Weight = "count",
    noise_aware: bool = False,
) -> HistoryDrafter:
    """A drafter that remembers the recorded history."""
    drafter = HistoryDrafter(
        HistoryIndex(window=max(1, len({r.visit for r in recorded.history})), weight=weight),
        budget,
        slots=slots,
        sources=sources,
        max_nodes=nodes,
        noise_aware=noise_aware,
        probabilities=weight == "probability",
    )
    drafter.remember(recorded.history)
    return drafter


def tree(name: str) -> tuple[Budget, int]:
    """The budget and the nodes to propose for one of TREES."""
    if name.startswith("path"):
        return BestPath(int(name.split()[-1])), MAX_NODES
    nodes = int(name.split()[0])
    return Fixed(nodes), nodes


def _row(recorded: Recorded, drafter: Drafter, **names: Any) -> Row:
    found = replay(drafter, recorded.targets, SLOTS)
    return {
        **names,
        "tokens_per_step": found.tokens_per_step,
        "drafted_per_step": found.drafted / found.checks,
    }


def by_source(recorded: Recorded) -> list[Row]:
    """Tokens per step of each combination of sources and each tree."""
    rows = []
    for sources in COMBINATIONS:
        for name in TREES:
            budget, nodes = tree(name)
            drafter = ours(recorded, budget, nodes, sources=sources)
            rows.append(_row(recorded, drafter, sources=" + ".join(sources), tree=name))
    return rows


def by_weight(recorded: Recorded) -> list[Row]:
    """Tokens per step of each weight that the record allows, 16 nodes; noise-aware too where keys are known."""
    kinds: list[Weight] = ["count", "reward"]
    if len({r.visit for r in recorded.history}) > 1:
        kinds.append("recency")
    if recorded.logprobs_known:
        kinds.append("probability")
    rows = []
    for weight in kinds:
        for aware in (False, True) if recorded.keys_known else (False,):
            drafter = ours(recorded, Fixed(16), 16, weight=weight, noise_aware=aware)
            rows.append(_row(recorded, drafter, weight=weight, noise_aware=aware))
    return rows


def by_budget(recorded: Recorded) -> list[Row]:
    """Of each budget and batch: tokens and nodes per step, and how much less time the steps take than without drafts.

    As many targets as fill the batch eight times, whole groups from all over the record.
    """
    cost, rows = step_cost(), []
    for batch in BATCHES:
        some = recorded.thinned(8 * batch)
        plain: Replayed | None = None
        for name in BUDGETS:
            kind, _, variant = name.partition(", ")
            budget = make_budget(kind, cost, nodes=16, aimd=variant or "additive")
            drafter = ours(some, budget, 32, slots=batch)
            found = replay(drafter, some.targets, batch, cost)
            plain = plain or found
            rows.append(
                {
                    "batch": batch,
                    "budget": name,
                    "tokens_per_step": found.tokens_per_step,
                    "drafted_per_step": found.drafted / found.checks,
                    "speedup": plain.seconds / found.seconds,
                }
            )
    return rows


def by_arctic(recorded: Recorded) -> list[Row]:
    """The same of arctic-inference, drafts of up to 8 and 16 tokens."""
    rows = []
    for nodes in (8, 16):
        for limits, label in (((1.0, 0.1), "vLLM's"), (UNLIMITED, "none")):
            for per_prompt in (False, True):
                for shape in ("path", "tree"):
                    drafter = ArcticDrafter(
                        nodes=nodes, per_prompt=per_prompt, tree=shape == "tree", limits=limits
                    )
                    drafter.remember(recorded.history)
                    caches = "one per prompt" if per_prompt else "one"
                    rows.append(
                        _row(recorded, drafter, nodes=nodes, shape=shape, caches=caches, limits=label)
                    )
    return rows


def measure(options: argparse.Namespace, recorded: Recorded) -> dict[str, Any]:
    """Everything that was asked for."""
    found: dict[str, Any] = {
        "rollouts": str(options.rollouts),
        "history": recorded.names[0],
        "target": recorded.names[1],
        "tokens": recorded.tokens,
        "targets": len(recorded.targets),
    }
    if "acceptance" in options.parts:
        found |= {"sources": by_source(recorded), "weights": by_weight(recorded)}
        found["path of 16"] = _row(recorded, ours(recorded, *tree("path of 16")))
        if arctic() is not None:
            found["arctic"] = by_arctic(recorded)
    if "noise" in options.parts and recorded.noise_known:
        found["noise"] = by_noise(recorded, SLOTS, (REPLAYED[:1], REPLAYED))
    if "budgets" in options.parts:
        found["budgets"] = by_budget(recorded)
    if "matrix" in options.parts:
        found["matrix"] = matrix(recorded)
    if "speed" in options.parts:
        sizes = [10_000, 100_000, 1_000_000] + ([10_000_000] if options.large else [])
        found["weight_bytes"] = weight_bytes(recorded)
        found["speed"] = [speed(recorded, size, options.steps) for size in sizes]
        found["growth"] = growth(recorded, 100_000, sizes[-1], options.steps)
    return found


def bars(found: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """What was aimed at: name, measured, limit, and whether it is met."""
    rows = []

    def at_least(name: str, value: float, limit: float) -> None:
        rows.append((f"{name}, at least", value, limit, value >= limit))

    def at_most(name: str, value: float, limit: float) -> None:
        rows.append((f"{name}, at most", value, limit, value <= limit))

    if "arctic" in found:
        theirs = next(
            row["tokens_per_step"]
            for row in found["arctic"]
            if (row["nodes"], row["shape"], row["caches"], row["limits"]) == (16, "path", "one", "vLLM's")
        )
        trees = {row["tree"]: row["tokens_per_step"] for row in found["sources"] if row["sources"] == ALL}
        at_least(
            "acceptance length, path of 16 / arctic's", found["path of 16"]["tokens_per_step"] / theirs, 1.0
        )
        at_least("acceptance length, tree of 16 / arctic's path", trees["16 nodes"] / theirs, 1.25)
    for size in found.get("speed", []):
        if size["tokens"] < BAR_TOKENS:
            continue
        label = f"{size['tokens']:,} tokens: "
        if "proposed_ratio" in size:
            at_least(label + "arctic's time per proposed token / ours", size["proposed_ratio"]["median"], 2.0)
            at_least(label + "insertion rate / arctic's", size["insertion_ratio"]["median"], 1.0)
        at_most(label + "bytes per token", size["ours"]["bytes_per_token"], 100.0)
    if "growth" in found:
        grown = found["growth"]
        at_most(f"time of a step, {grown['many']:,} / {grown['few']:,} tokens", grown["ratio"]["median"], 1.5)
    if "matrix" in found:
        means = geometric_means(found["matrix"])
        rivals = max(value for name, value in means.items() if name != "goodput")
        at_least(
            "goodput / best fixed, worst cell", min(row["of_best_fixed"] for row in found["matrix"]), 0.97
        )
        at_least("goodput / best other, geometric means", means["goodput"] / rivals, 1.0)
    return rows


def _print_acceptance(found: dict[str, Any]) -> None:
    print("\nTokens per step (drafted)")
    print(f"  {'sources':30s}" + "".join(f"{name:>17s}" for name in TREES))
    for sources in dict.fromkeys(row["sources"] for row in found["sources"]):
        cells = [row for row in found["sources"] if row["sources"] == sources]
        print(f"  {sources:30s}" + "".join(f"{_cell(row):>17s}" for row in cells))
    print(f"  {ALL:30s}{_cell(found['path of 16']):>17s} as a path of up to 16")
    for row in found["weights"]:
        aware = ", noise-aware" if row["noise_aware"] else ""
        print(f"  {'weight: ' + row['weight'] + aware:30s}{_cell(row):>17s} with 16 nodes")
    for row in found.get("arctic", []):
        name = f"arctic, {row['shape']} of {row['nodes']}"
        print(f"  {name:30s}{_cell(row):>17s} caches: {row['caches']}; limits: {row['limits']}")


def _cell(row: Row) -> str:
    return f"{row['tokens_per_step']:.2f} ({row['drafted_per_step']:.1f})"


def _print_budgets(rows: list[Row]) -> None:
    print("\nBudgets, up to 32 nodes: tokens per step (drafted), speed-up of the steps by the cost model")
    for row in rows:
        print(f"  batch {row['batch']:2d}  {row['budget']:21s}{_cell(row):>14s}   {row['speedup']:.2f}x")


def _print_matrix(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["speedups"])[1:]
    print("\nSpeed-up of the steps by the cost model; no drafts: 1")
    print(f"  {'batch, lengths, acceptance':27s}" + "".join(f"{name:>13s}" for name in names))
    for row in rows:
        label = f"{row['batch']:2d} {row['lengths']}, {row['acceptance']}"
        print(f"  {label:27s}" + "".join(f"{row['speedups'][name]:13.2f}" for name in names))
    means = geometric_means(rows)
    print(f"  {'geometric mean':27s}" + "".join(f"{means[name]:13.2f}" for name in names))


def _print_speed(found: dict[str, Any]) -> None:
    print(f"\n64 requests; us per request and step; others {found['others']:.0%}")
    for size in found["speed"]:
        print(f"  {size['tokens']:,} tokens, {size['emitted_per_request']:.1f} emitted per request and step")
        for name, label in (("ours", "counts"), ("default", "default"), ("theirs", "arctic")):
            if name in size:
                side = size[name]
                print(
                    f"    {label:7s} propose {side['us_propose']:5.1f}, observe {side['us_observe']:5.1f}; "
                    f"{side['proposed_per_request']:.1f} proposed, {side['us_per_proposed']:.2f} us each; begin "
                    f"{side['us_per_begin']:.0f} us; insertion {side['inserted_per_s']:,.0f} tokens/s; "
                    f"{side['bytes_per_token']:.0f} bytes/token"
                )
        if "step_ratio" in size:
            for what in ("step", "propose", "proposed", "insertion"):
                print(f"    {FASTER[what]} faster than arctic: {Ratio(**size[f'{what}_ratio'])}")
    sizes = ", ".join(f"{kind} {bytes_:.0f}" for kind, bytes_ in found["weight_bytes"].items())
    print(f"  bytes per token by weight: {sizes}")


def main(argv: Sequence[str] = ()) -> int:
    """Prints tables, or with --json one object; 1 where a bar is not met."""
    parser = argparse.ArgumentParser(prog="stretto bench draft", description=__doc__)
    parser.add_argument("--rollouts", type=Path, default=EXCERPT, help="a run's folder, or JSON lines")
    parser.add_argument("--model", type=Path, help="a folder with the tokenizer, where rollouts are text")
    parser.add_argument("--history", help="the checkpoint to draft from (default: all before the target)")
    parser.add_argument("--target", help="the checkpoint to draft (default: the last)")
    parser.add_argument("--targets", type=int, help="only about so many responses")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=400, help="timed steps for each size of history")
    parser.add_argument(
        "--large", action="store_true", help="10,000,000 tokens too: minutes, and 7 GB with arctic"
    )
    parser.add_argument("--busy", action="store_true", help="measure times although others use the machine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    recorded = read(options.rollouts, options.model, options.history, options.target)
    if options.targets is not None:
        recorded = recorded.thinned(options.targets)
    others = require_idle(limit=float("inf") if options.busy or "speed" not in options.parts else 0.2)
    found = measure(options, recorded) | {"others": others}
    found["bars"] = [dict(zip(("name", "value", "limit", "met"), bar, strict=True)) for bar in bars(found)]
    status = 0 if all(bar["met"] for bar in found["bars"]) else 1
    if options.json:
        print(json.dumps(found))
        return status
    print(
        f"{options.rollouts}: {found['targets']} responses of {found['target']} ({found['tokens'][1]:,} tokens), "
        f"drafted from those of {found['history']} ({found['tokens'][0]:,})"
    )
    if arctic() is None:
        print(f"arctic_inference is not installed, so nothing is compared with it: {INSTALL}")
    for part, show in (("sources", _print_acceptance), ("speed", _print_speed)):
        if part in found:
            show(found)
    if "noise" in found:
        show_noise(found["noise"])
    if "budgets" in found:
        _print_budgets(found["budgets"])
    if "matrix" in found:
        _print_matrix(found["matrix"])
    for bar in found["bars"]:
        print(
            f"  {'met    ' if bar['met'] else 'NOT met'}  {bar['name']} {bar['limit']:g}: {bar['value']:.2f}"
        )
    return status
