"""The walk down a draft's tree that verifies it.

Sampling is keyed, so verification is equality: from the newest token on, draw what plain decoding would draw, and go
on at the child with that token while there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stretto.alternatives import Alternatives
from stretto.draft import MAX_NODES, Drafts, Verified
from stretto.errors import StrettoError
from stretto.records import BoolArray, FloatArray, IntArray
from stretto.sampling import Sampled, kernel


def refuse_unfit(drafts: Drafts, room: IntArray, most: int) -> None:
    """Raise RuntimeError for trees that a drafter must not propose: memory behind a response ends after MAX_NODES.

    `room` (R,) is how deep each may be, `most` how many nodes there may be in all.
    """
    deepest = np.repeat(room, drafts.counts)
    if drafts.token_ids.size > most or (drafts.counts > MAX_NODES).any() or (drafts.depth > deepest).any():
        raise RuntimeError(
            f"the drafter proposed {drafts.token_ids.size} nodes where {most} fit, a tree of "
            f"{int(drafts.counts.max(initial=0))} where {MAX_NODES} fit, or one deeper than its response can go on"
        )


@kernel()
def _children(
    begins: IntArray,
    drafts: tuple[IntArray, IntArray, IntArray],
    which: IntArray,
    here: IntArray,
    token_ids: IntArray,
) -> IntArray:
    """For each of `which` requests the child of node `here` with this token, an index within its tree; -1: none."""
    counts, parents, drafted = drafts
    found = np.full(which.size, -1)
    for i in range(which.size):
        r = which[i]
        for k in range(here[r] + 1, counts[r]):
            if parents[begins[r] + k] == here[r] and drafted[begins[r] + k] == token_ids[i]:
                found[i] = k
                break
    return found


class Walk:
    """Verification of the drafts of R requests.

    `draw(rows, requests, depth)` samples from logits `rows` (A,), one for each of `requests` (A,), which have emitted
    `depth` (A,) tokens in this step. `end(requests, token_ids)` takes these tokens and says which responses end there.
    The logits' rows are, request after request, its newest token's and those of its nodes.
    """

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        requests, nodes = drafts.counts.size, drafts.token_ids.size
        self._begins = np.cumsum(drafts.counts) - drafts.counts
        self._first = self._begins + np.arange(requests)
        self.emitted = np.zeros(requests, np.int64)
        self.ended = np.zeros(requests, np.bool_)
        self.path = np.full(
            nodes, -1
        )  # accepted nodes of each request in order of depth, from its first place on
        self.accepted = np.zeros(requests, np.int64)
        self._parts: list[tuple[IntArray, Sampled]] = []

    def go(
        self,
        draw: Callable[[IntArray, IntArray, IntArray], Sampled],
        end: Callable[[IntArray, IntArray], BoolArray],
        ahead: bool = False,
    ) -> None:
        """`ahead`: draw from all rows at once, also from those of nodes that are not reached."""
        everywhere = self._everywhere(draw) if ahead and self.drafts.token_ids.size else None
        drafts, here = self.drafts, np.full(self.emitted.size, -1)
        tree = (drafts.counts, drafts.parents, drafts.token_ids)
        active = np.arange(self.emitted.size)
        while active.size:
            rows = self._first[active] + here[active] + 1
            drawn = draw(rows, active, self.emitted[active]) if everywhere is None else everywhere[rows]
            self._parts.append((active, drawn))
            self.emitted[active] += 1
            self.ended[active] = end(active, drawn.token_ids)
            child = _children(self._begins, tree, active, here, drawn.token_ids)
            hit = child >= 0
            self.path[self._begins[active[hit]] + self.accepted[active[hit]]] = child[hit]
            here[active[hit]] = child[hit]
            self.accepted[active[hit]] += 1
            active = active[hit & ~self.ended[active]]

    def _everywhere(self, draw: Callable[[IntArray, IntArray, IntArray], Sampled]) -> Sampled | None:
        """What is drawn from each row; None where logits are broken, which matters only if they are reached."""
        owner = np.repeat(np.arange(self._first.size), self.drafts.counts + 1)
        depth, node = np.zeros(owner.size, np.int64), np.ones(owner.size, np.bool_)
        node[self._first] = False
        depth[node] = self.drafts.depth
        try:
            return draw(np.arange(owner.size), owner, depth)
        except StrettoError:
            return None

    def columns(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """Token ids, log-probs and raw log-probs, (T,) each, request after request."""
        if len(self._parts) == 1:
            _, drawn = self._parts[0]
            return drawn.token_ids, drawn.logprobs, drawn.raw_logprobs
        order = np.argsort(np.concatenate([which for which, _ in self._parts]), kind="stable")
        return (
            np.concatenate([drawn.token_ids for _, drawn in self._parts])[order],
            np.concatenate([drawn.logprobs for _, drawn in self._parts])[order],
            np.concatenate([drawn.raw_logprobs for _, drawn in self._parts])[order],
        )

    def top(self) -> Alternatives:
        """The alternatives to these tokens."""
        if len(self._parts) == 1:
            return self._parts[0][1].top
        order = np.argsort(np.concatenate([which for which, _ in self._parts]), kind="stable")
        return Alternatives(
            np.concatenate([drawn.top.token_ids for _, drawn in self._parts])[order],
            np.concatenate([drawn.top.logprobs for _, drawn in self._parts])[order],
        )

    def verified(self) -> Verified:
        """What became of the nodes: `reached` is where the walk stood at the parent."""
        drafts = self.drafts
        owner = np.repeat(np.arange(drafts.counts.size), drafts.counts)
        accepted = np.zeros(drafts.token_ids.size, np.bool_)
        kept = self.path >= 0
        accepted[self._begins[owner[kept]] + self.path[kept]] = True
        parent = self._begins[owner] + drafts.parents
        reached = (drafts.parents < 0) | accepted[np.maximum(parent, 0)]
        reached &= (
            drafts.depth <= self.emitted[owner]
        )  # below the end of a response nothing is put to the test
        return Verified(reached, accepted, self.emitted)

    def moves(self) -> tuple[IntArray, IntArray, IntArray]:
        """Accepted nodes that are out of line: their requests (M,), and the places within the tree from and to."""
        owner = np.repeat(np.arange(self.drafts.counts.size), self.drafts.counts)
        place = np.arange(self.path.size) - self._begins[owner]
        out = (self.path >= 0) & (self.path != place)
        return owner[out], self.path[out], place[out]


def compile_kernels() -> None:
    """Compile, or load from numba's cache, what a walk needs."""
    one = np.ones(1, np.int64)
    _children(one, (one, one, one), one - 1, -one, one)
