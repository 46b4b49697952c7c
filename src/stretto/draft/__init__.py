"""Drafting: what a response's next tokens may be, as trees of tokens for the engine to verify. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.records import BoolArray, FloatArray, IntArray
from stretto.sampling import kernel

SOURCES = ("history", "siblings", "prompt", "dropped")
MAX_NODES = 64
"""Nodes of one tree: the engine keeps room for so many behind each response."""


@dataclass(slots=True)
class Drafts:
    """Token trees of R requests as columns over N nodes: request after request, parents before their children, in
    order of falling estimate within a request.
    """

    counts: IntArray  # (R,) nodes of each request
    token_ids: IntArray  # (N,)
    parents: IntArray  # (N,) index among the request's own nodes; -1: child of its newest token
    depth: IntArray  # (N,) 1 for those
    estimates: FloatArray  # (N,) estimated probability that the node is reached and accepted
    sources: npt.NDArray[np.int8]  # (N,) index into SOURCES

    def select(self, keep: BoolArray) -> Drafts:
        """The nodes that `keep` (N,) marks; with a node it must mark its parent."""
        counts, parents, kept = _thinned(self.counts, self.parents, keep)
        return Drafts(
            counts, self.token_ids[kept], parents, self.depth[kept], self.estimates[kept], self.sources[kept]
        )


@kernel()
def _thinned(counts: IntArray, parents: IntArray, keep: BoolArray) -> tuple[IntArray, IntArray, IntArray]:
    """Counts and parents of the nodes that `keep` (N,) marks, and which nodes these are."""
    number = np.empty(keep.size, np.int64)  # of each kept node, among those of its request
    kept = np.empty(keep.size, np.int64)
    left, renumbered = np.zeros(counts.size, np.int64), np.empty(keep.size, np.int64)
    begin = total = 0
    for request in range(counts.size):
        for node in range(begin, begin + counts[request]):
            if keep[node]:
                parent = parents[node]
                renumbered[total] = number[begin + parent] if parent >= 0 else -1
                number[node] = left[request]
                kept[total] = node
                left[request] += 1
                total += 1
        begin += counts[request]
    return left, renumbered[:total].copy(), kept[:total].copy()


def join(some: Drafts, others: Drafts) -> tuple[Drafts, IntArray]:
    """The trees of R requests, each of which has nodes in one of the two at most; `order` (N,) is where a node of
    `some`, then `others`, has come from.
    """
    requests = np.arange(some.counts.size)
    owner = np.concatenate([np.repeat(requests, some.counts), np.repeat(requests, others.counts)])
    order = np.argsort(owner, kind="stable")
    columns = ("token_ids", "parents", "depth", "estimates", "sources")
    joined = [np.concatenate([getattr(some, name), getattr(others, name)])[order] for name in columns]
    return Drafts(some.counts + others.counts, *joined), order


@dataclass(slots=True)
class Verified:
    """What became of the N nodes of the R requests' trees."""

    reached: BoolArray  # (N,) whether the parent was on the emitted path: the node was put to the test
    accepted: BoolArray  # (N,)
    emitted: IntArray  # (R,) tokens emitted, the one after the last accepted node included


def no_drafts(requests: int) -> Drafts:
    """Empty trees for R requests."""
    none = np.zeros(0, np.int64)
    return Drafts(np.zeros(requests, np.int64), none, none, none, np.zeros(0), np.zeros(0, np.int8))
