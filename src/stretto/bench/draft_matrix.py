"""Budgets replayed under a frozen cost model, by counts: batch size x lengths x acceptance.

The time of a run is the sum of its steps' times by the cost model, so it is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stretto.bench.recorded import Recorded
from stretto.bench.replay import replay
from stretto.draft.budget import Budget, Fixed, make_budget
from stretto.draft.cost import CostModel
from stretto.draft.drafter import HistoryDrafter
from stretto.history.index import HistoryIndex
from stretto.records import Rollout

STEPS = {1: 84, 2: 93, 4: 101, 8: 103, 16: 111, 32: 204, 64: 240, 96: 333, 160: 449, 288: 723, 544: 1154}
"""Milliseconds of an engine step by packed tokens: SmolLM2-135M, float32, two cores, embedded engine."""
BATCHES = (1, 8, 64)
WAVES = 4  # targets for each place of the batch
FIXED = (1, 2, 4, 8, 16, 32)
ADAPTIVE = ("aimd", "length_class", "marginal", "goodput")
LARGEST = 32  # nodes of a proposed tree
SHORT = 48  # tokens that a target of a short cell is cut to, so that all end about together
REPLACED = 0.04  # of a target's tokens, in the history of a cell of high acceptance


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload."""

    batch: int
    lengths: str  # "short" or "long-tailed": as recorded
    acceptance: str  # "low": as recorded; "high": history holds nearly what comes


def step_cost() -> CostModel:
    """The cost model of STEPS."""
    cost = CostModel()
    cost.fit([(tokens, ms / 1e3) for tokens, ms in STEPS.items()])
    return cost


def workload(recorded: Recorded, cell: Cell) -> Recorded:
    """What the cell replays.

    Under the same keys and weights that moved little, nearly all tokens are sampled again. So the history of a cell of
    high acceptance holds the targets with REPLACED of their tokens exchanged for others of the same response.
    """
    some = recorded.thinned(WAVES * cell.batch)
    targets = [_cut(r, SHORT) for r in some.targets] if cell.lengths == "short" else some.targets
    history = some.history
    if cell.acceptance == "high":
        random = np.random.default_rng(0)
        history = [_disturbed(r, random) for r in targets]
    return Recorded(history, targets, some.names)


def _cut(rollout: Rollout, tokens: int) -> Rollout:
    kept = slice(tokens)
    top = rollout.top[kept] if rollout.top is not None else None
    return replace(rollout, token_ids=rollout.token_ids[kept], logprobs=rollout.logprobs[kept], top=top)


def _disturbed(rollout: Rollout, random: np.random.Generator) -> Rollout:
    tokens = rollout.token_ids.copy()
    places = random.random(tokens.size) < REPLACED
    tokens[places] = random.choice(rollout.token_ids, int(places.sum()))
    return replace(rollout, token_ids=tokens, visit=rollout.visit - 1)


def _drafter(cell: Recorded, budget: Budget, slots: int) -> HistoryDrafter:
    drafter = HistoryDrafter(
        HistoryIndex(), budget, slots=slots, max_nodes=LARGEST, noise_aware=False, probabilities=False
    )
    drafter.remember(cell.history)
    return drafter


def matrix(recorded: Recorded, batches: tuple[int, ...] = BATCHES) -> list[dict[str, Any]]:
    """Of each cell: every budget's speed-up against no drafts, and what part of the best fixed one's `goodput` has."""
    cost, rows = step_cost(), []
    budgets: dict[str, Callable[[], Budget]] = {"none": lambda: make_budget("none")}
    budgets |= {f"fixed {nodes}": lambda nodes=nodes: Fixed(nodes) for nodes in FIXED}  # type: ignore[misc]
    budgets |= {kind: lambda kind=kind: make_budget(kind, cost, nodes=LARGEST) for kind in ADAPTIVE}  # type: ignore[misc]
    for batch in batches:
        for lengths in ("short", "long-tailed"):
            for acceptance in ("low", "high"):
                cell = Cell(batch, lengths, acceptance)
                work = workload(recorded, cell)
                seconds = {
                    name: replay(_drafter(work, make(), batch), work.targets, batch, cost).seconds
                    for name, make in budgets.items()
                }
                speedups = {name: seconds["none"] / value for name, value in seconds.items()}
                best = max(("none", *(f"fixed {nodes}" for nodes in FIXED)), key=speedups.__getitem__)
                rows.append(
                    {
                        "batch": batch,
                        "lengths": lengths,
                        "acceptance": acceptance,
                        "speedups": speedups,
                        "best_fixed": best,
                        "of_best_fixed": speedups["goodput"] / speedups[best],
                    }
                )
    return rows


def geometric_means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Over the matrix, of each budget's speed-ups."""
    names = rows[0]["speedups"]
    return {name: float(np.exp(np.mean([np.log(row["speedups"][name]) for row in rows]))) for name in names}
