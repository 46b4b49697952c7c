"""The budgets of published systems, to be compared with `goodput`: RhymeRL's AIMD, DAS's length classes, Seer's MBA.

Each is built from its paper; where a paper leaves something open, or is printed unclearly, the docstring says how it
is read here. All take a request's best nodes; for a path, as in the papers, these are its first tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from stretto.draft import Drafts, Verified
from stretto.draft.budget import Batch, Budget, best_nodes
from stretto.draft.cost import CostModel
from stretto.errors import StrettoError, nearest
from stretto.records import BoolArray, FloatArray, IntArray
from stretto.tally import Tally


class Aimd(Budget):
    """`aimd` (RhymeRL, 2508.18588): every request has a window of nodes, which full acceptance widens.

    `additive` is the paper: start 2, +2 when everything was accepted, back to 2 on a rejection, at most 32.
    `multiplicative` is the released code: start 2, doubled or halved, between 2 and 16. That code compares what was
    accepted with the window, so that a short draft counts as a rejection; here, with what was proposed. No draft is no
    test and changes nothing. In a tree siblings exclude each other, so "everything" is a path down to its deepest
    level.
    """

    START = 2

    def __init__(self, variant: str = "additive") -> None:
        if variant not in ("additive", "multiplicative"):
            choice = nearest(variant, ("additive", "multiplicative"))
            raise StrettoError(f'budget "aimd": there is no variant "{variant}"; {choice}')
        self.additive = variant == "additive"
        self._windows: IntArray = np.empty(0, np.int64)

    def begin(self, slot: int, predicted_length: float | None = None) -> None:
        del predicted_length
        missing = max(slot + 1 - self._windows.size, 0)
        self._windows = np.append(self._windows, np.full(missing, self.START))
        self._windows[slot] = self.START

    def choose(self, drafts: Drafts, batch: Batch) -> BoolArray:
        return best_nodes(drafts, self._windows[batch.slots])

    def learn(self, drafts: Drafts, verified: Verified, slots: IntArray) -> None:
        owners = np.repeat(np.arange(slots.size), drafts.counts)
        deepest, accepted = np.zeros(slots.size, np.int64), np.zeros(slots.size, np.int64)
        np.maximum.at(deepest, owners, drafts.depth)
        np.add.at(accepted, owners, verified.accepted)
        window = self._windows[slots]
        if self.additive:
            wider, narrower = np.minimum(window + 2, 32), np.full_like(window, self.START)
        else:
            wider, narrower = np.minimum(window * 2, 16), np.maximum(window // 2, 2)
        tested = np.where(accepted == deepest, wider, narrower)
        self._windows[slots] = np.where(drafts.counts > 0, tested, window)

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._windows.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._windows = np.array(state["windows"], np.int64)

    def counts(self) -> Tally:
        """The mean window over all slots, as each was left."""
        windows = self._windows
        return Tally(ratios={"spec/budget/window": (float(windows.sum()), windows.size)})


class LengthClass(Budget):
    """`length_class` (DAS, 2511.13841): the longer a response will be, the more it is drafted; short ones not at all.

    Classes are short, medium and long. A request's initial class is that of its predicted length; at every step its
    class is argmax_c P(c | tokens so far, initial class), from the responses that have ended: those of that initial
    class that became longer than this one is now. The paper publishes neither thresholds nor budgets. Here the classes
    meet at the MIDDLE and TAIL quantiles of the last WINDOW lengths (a length on a threshold belongs to the longer
    class, so that equal lengths are all long), and the budgets are 0, a quarter of `nodes`, and `nodes`. One
    pseudo-observation for the initial class, or the shortest still possible if longer, breaks the silence where no such
    response was seen; ties go to the shorter class. A request without prediction is compared with all. Until FIRST
    responses have ended every request counts as medium.
    """

    MIDDLE, TAIL = 0.5, 0.8
    WINDOW, FIRST = 1_024, 8
    UNKNOWN = 3  # the initial class of a request without prediction

    def __init__(self, nodes: int) -> None:
        self._nodes: IntArray = np.array([0, math.ceil(nodes / 4), nodes])
        self._predicted: dict[int, float | None] = {}  # by slot
        self._ended: deque[tuple[float | None, int]] = deque(
            maxlen=self.WINDOW
        )  # predicted and actual length
        self._chosen = np.zeros(3)
        self._tables: tuple[FloatArray, list[IntArray]] | None = None  # of `_ended`, until it changes

    def begin(self, slot: int, predicted_length: float | None = None) -> None:
        self._predicted[slot] = predicted_length

    def end(self, slot: int, length: int) -> None:
        self._ended.append((self._predicted.pop(slot), length))
        self._tables = None

    def choose(self, drafts: Drafts, batch: Batch) -> BoolArray:
        classes = self.classes(batch)
        self._chosen += np.bincount(classes, minlength=3)
        return best_nodes(drafts, self._nodes[classes])

    def classes(self, batch: Batch) -> IntArray:
        """(R,): 0 short, 1 medium, 2 long."""
        if len(self._ended) < self.FIRST:
            return np.ones(batch.slots.size, np.int64)
        thresholds, lengths = self._tables = self._tables or self._tabulate()
        initial = self._initial([self._predicted[slot] for slot in batch.slots.tolist()], thresholds)
        at_least = batch.generated + 1  # it has not ended yet
        possible = np.searchsorted(
            thresholds, at_least, side="right"
        )  # the shortest class it can still be of
        bounds = np.maximum(at_least[:, None], np.concatenate(([0.0], thresholds, [np.inf])))
        seen = np.zeros((batch.slots.size, 3))
        for group, ended in enumerate(lengths):
            rows = initial == group
            seen[rows] = np.diff(np.searchsorted(ended, bounds[rows]), axis=1)
        prior = np.where(initial == self.UNKNOWN, possible, np.maximum(initial, possible))
        seen[np.arange(prior.size), prior] += 1.0
        classes: IntArray = np.argmax(seen, axis=1)
        return classes

    def state_dict(self) -> dict[str, Any]:
        return {
            "predicted": list(self._predicted.items()),
            "ended": list(self._ended),
            "chosen": self._chosen.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._predicted = dict(state["predicted"])
        self._ended = deque(((predicted, length) for predicted, length in state["ended"]), self.WINDOW)
        self._chosen = np.array(state["chosen"], np.float64)
        self._tables = None

    def counts(self) -> Tally:
        """Since the last call: the share of each class among the requests of all steps."""
        chosen, self._chosen = self._chosen.tolist(), np.zeros(3)
        classes = zip(("short", "medium", "long"), chosen, strict=True)
        return Tally(ratios={f"spec/budget/{name}": (count, sum(chosen)) for name, count in classes})

    def _tabulate(self) -> tuple[FloatArray, list[IntArray]]:
        """The thresholds (2,), and the sorted lengths of what ended, by initial class; last those of all."""
        lengths = np.array([length for _, length in self._ended])
        thresholds = np.quantile(lengths, (self.MIDDLE, self.TAIL), method="higher").astype(np.float64)
        initial = self._initial([predicted for predicted, _ in self._ended], thresholds)
        groups = [np.sort(lengths[initial == group]) for group in range(3)]
        return thresholds, [*groups, np.sort(lengths)]

    def _initial(self, predicted: list[float | None], thresholds: FloatArray) -> IntArray:
        known = np.array([math.nan if length is None else length for length in predicted], np.float64)
        classes = np.searchsorted(thresholds, known, side="right")
        return np.where(np.isnan(known), self.UNKNOWN, classes)


class Marginal(Budget):
    """`marginal` (Seer's marginal-benefit-aware speculation, 2511.14617, Algorithm 1).

    First the draft length for the batch: γ* = argmin over γ of the time per token, t(tokens + γB) / (1 + α + … + α^γ),
    where B is the number of requests, t the measured cost model (drafting included) and α the acceptance of a node put
    to the test, counted online. The paper then divides the budget of γ*·B nodes between a class of urgent requests and
    one of the others. No request is urgent here, since a response's length does not matter before it ends: each gets γ*
    nodes.

    Counts decay by steps, with or without tests, towards a prior of one node tested and accepted by half: a rule that
    has switched drafting off tries again after a while.
    """

    LARGEST = 8  # γ_max
    HALF_LIFE = 256.0  # steps
    PRIOR = 2.0  # tests per depth, half of them accepted

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._tested = np.zeros(self.LARGEST)  # requests of which a node at depth 1, 2, ... was reached
        self._accepted = np.zeros(self.LARGEST)

    def choose(self, drafts: Drafts, batch: Batch) -> BoolArray:
        requests = drafts.counts.size
        return best_nodes(drafts, np.full(requests, self.best_length(requests, batch.tokens)))

    def best_length(self, requests: int, tokens: int) -> int:
        """γ*, 0 to γ_max, for a step of `tokens` without drafts; ties to the shorter."""
        nodes = requests * np.arange(self.LARGEST + 1)
        emitted = np.cumsum(self._acceptance() ** np.arange(self.LARGEST + 1))
        return int(np.argmin(self.cost.seconds(tokens + nodes, nodes) / emitted))

    def learn(self, drafts: Drafts, verified: Verified, slots: IntArray) -> None:
        owners = np.repeat(np.arange(slots.size), drafts.counts)
        shallow = drafts.depth <= self.LARGEST
        decay = 0.5 ** (1.0 / self.HALF_LIFE)
        for counts, nodes in (
            (self._tested, shallow & verified.reached),
            (self._accepted, shallow & verified.accepted),
        ):
            found = np.zeros((slots.size, self.LARGEST), np.bool_)
            found[owners[nodes], drafts.depth[nodes] - 1] = True
            counts *= decay
            counts += found.sum(axis=0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "tested": self._tested.tolist(),
            "accepted": self._accepted.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tested, self._accepted = (np.array(state[name], np.float64) for name in ("tested", "accepted"))

    def counts(self) -> Tally:
        return Tally(ratios={"spec/budget/acceptance": self._levels()})

    def _levels(self) -> tuple[float, float]:
        """The levels at which a node was accepted, and those tested."""
        return float(self._accepted.sum() + self.PRIOR / 2), float(self._tested.sum() + self.PRIOR)

    def _acceptance(self) -> float:
        """α: the share of tested levels at which a node was accepted."""
        accepted, tested = self._levels()
        return accepted / tested
