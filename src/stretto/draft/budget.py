"""Which drafted nodes are worth checking: the default rule, `goodput`, and what every rule is asked.

A budget sees the trees that the sources propose and keeps part of each, a node only with its parent. Nothing that it
decides can change a token: it only decides how fast they come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.draft import Drafts, Verified
from stretto.draft.cost import CostModel, Curve, price
from stretto.errors import StrettoError, nearest
from stretto.records import BoolArray, FloatArray, IntArray
from stretto.sampling import kernel
from stretto.tally import Tally


@dataclass(slots=True)
class Batch:
    """The R requests of one engine step, in the order of the drafts."""

    slots: IntArray  # (R,), what the rules that learn per request know a request by
    generated: IntArray  # (R,), tokens of each so far
    tokens: int  # packed tokens of the step without drafts


class Budget(ABC):
    """One rule. `begin` and `end` bracket a request in a slot; rules that keep nothing per request ignore them."""

    floor = 0.0
    """At the next step no node with a smaller estimate is likely to be chosen: none need be proposed."""

    def begin(self, slot: int, predicted_length: float | None = None) -> None:
        """A request enters `slot`; its response is predicted to have so many tokens, None if nothing is known."""
        del slot, predicted_length

    def end(self, slot: int, length: int) -> None:
        """The response in `slot` has ended by itself with `length` tokens. Not called for one that was stopped."""
        del slot, length

    @abstractmethod
    def choose(self, drafts: Drafts, batch: Batch) -> BoolArray:
        """(N,): the nodes to check; with every node its parent."""

    def learn(self, drafts: Drafts, verified: Verified, slots: IntArray) -> None:
        """What became of the chosen nodes (`drafts`, after `select`) of the requests in `slots` (R,)."""
        del drafts, verified, slots

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state

    def counts(self) -> Tally:
        """Its own figures, since the last call where they count something."""
        return Tally()

    def metrics(self) -> dict[str, float]:
        """`counts`, as they are shown."""
        return self.counts().figures()


MARGIN = 0.5  # between the price of a node at one step and the least estimate worth proposing at the next
SURE = 0.8  # the same, where no choice could have been worth less at that step


class NoDrafts(Budget):
    """`none`: plain decoding."""

    def choose(self, drafts: Drafts, batch: Batch) -> BoolArray:
        del batch
        return np.zeros(drafts.estimates.size, dtype=np.bool_)


class Fixed(Budget):
    """`fixed`: the same number of nodes for every request at every step."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def choose(self, drafts: Drafts, batch: Batch) -> BoolArray:
        del batch
        return best_nodes(drafts, np.full(drafts.counts.size, self.nodes))


@kernel()
def _worth_their_price(
    gains: FloatArray, worth: float, tokens: int, curve: Curve, floor: float, keep: BoolArray
) -> tuple[int, float, float]:
    """Mark in `keep` (N,) the nodes that make the most of a step's time: how many; the least gain of those or, if none
    is worth its price, the largest of all and `floor`; and a gain that none is below.

    `worth` is what the step makes of its `tokens` without nodes, `gains` (N,) what each node would add. A node of the
    best choice gains at least the choice's rate times what it costs: no less than the rate without any at the
    curve's flattest.
    """
    order = np.argsort(-gains, kind="mergesort")
    nodes = np.arange(gains.size + 1)
    seconds = np.empty(gains.size + 1)
    price(curve, nodes + tokens, nodes, seconds)
    value, best, rate = worth, 0, worth / seconds[0]
    for count in range(1, gains.size + 1):
        value += gains[order[count - 1]]
        if value / seconds[count] > rate:
            best, rate = count, value / seconds[count]
    keep[order[:best]] = True
    flattest = curve.slope
    for right in range(1, curve.tokens.size):
        if curve.tokens[right] > tokens:
            rise = curve.seconds[right] - curve.seconds[right - 1]
            flattest = min(flattest, rise / (curve.tokens[right] - curve.tokens[right - 1]))
    if tokens < curve.tokens[0]:
        flattest = 0.0
    level = gains[order[best - 1]] if best else floor
    if not best and gains.size:
        level = max(level, gains[order[0]])
    return best, level, worth / seconds[0] * (flattest + curve.per_node)


class Goodput(Budget):
    """`goodput`: as many nodes over the whole batch as make the most expected tokens per second.

    Maximises Σ_i (1 + Σ π over i's kept nodes) / t(tokens + kept nodes) over all parent-closed choices, exactly: a
    node costs the same wherever it is, so the best choice of k nodes is that of the k largest π, and every k is tried.
    Estimates fall along a path and the sort is stable, so a node never comes before its parent. Ties go to fewer nodes.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._reset()

    def choose(self, drafts: Drafts, batch: Batch) -> BoolArray:
        """O(N log N)."""
        gains, worth = drafts.estimates, float(drafts.counts.size)
        keep = np.zeros(gains.size, dtype=np.bool_)
        curve = self.cost.curve
        best, level, least = _worth_their_price(gains, worth, batch.tokens, curve, self.floor, keep)
        # Half of the least that was worth its price, or of the best that was not: should prices fall, a few steps
        # find the new level.
        self.floor = max(MARGIN * level, SURE * least)
        self._proposed += gains.size
        self._kept += best
        return keep

    def learn(self, drafts: Drafts, verified: Verified, slots: IntArray) -> None:
        if drafts.estimates.size:
            self._expected += float(drafts.estimates.sum())
            self._accepted += int(np.count_nonzero(verified.accepted))

    def counts(self) -> Tally:
        """Since the last call: nodes proposed and kept; tokens expected of the kept ones, and accepted."""
        found = Tally(
            {
                "spec/budget/proposed": float(self._proposed),
                "spec/budget/kept": float(self._kept),
                "spec/budget/expected": self._expected,
                "spec/budget/accepted": float(self._accepted),
            }
        )
        self._reset()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "proposed": self._proposed,
            "kept": self._kept,
            "expected": self._expected,
            "accepted": self._accepted,
            "floor": self.floor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._proposed, self._kept = int(state["proposed"]), int(state["kept"])
        self._expected, self._accepted = float(state["expected"]), int(state["accepted"])
        self.floor = float(state["floor"])

    def _reset(self) -> None:
        self._proposed, self._kept, self._expected, self._accepted = 0, 0, 0.0, 0


def best_nodes(drafts: Drafts, limits: IntArray) -> BoolArray:
    """(N,): of every request its `limits` (R,) best nodes. They come first, and parents before children."""
    starts = np.cumsum(drafts.counts) - drafts.counts
    rank = np.arange(drafts.estimates.size) - np.repeat(starts, drafts.counts)
    within: BoolArray = rank < np.repeat(limits, drafts.counts)
    return within


KINDS = ("none", "fixed", "aimd", "length_class", "marginal", "goodput")


def make_budget(kind: str, cost: CostModel | None = None, nodes: int = 8, aimd: str = "additive") -> Budget:
    """The rule of that name.

    `cost` is for `goodput` and `marginal`; `nodes` for `fixed`, and the largest budget of `length_class`; `aimd`
    ("additive" or "multiplicative") for the rule of that name. Raises StrettoError for what does not exist or is
    missing.
    """
    from stretto.draft.published import Aimd, LengthClass, Marginal

    if nodes < 1:
        raise StrettoError(f'budget "{kind}": nodes must be 1 or more, not {nodes}; "none" is the rule for 0')
    match kind:
        case "none":
            return NoDrafts()
        case "fixed":
            return Fixed(nodes)
        case "aimd":
            return Aimd(aimd)
        case "length_class":
            return LengthClass(nodes)
        case "marginal" | "goodput":
            if cost is None:
                raise StrettoError(f'budget "{kind}" needs a cost model of the engine step')
            return Marginal(cost) if kind == "marginal" else Goodput(cost)
    raise StrettoError(f'there is no budget "{kind}"; {nearest(kind, KINDS)}')
