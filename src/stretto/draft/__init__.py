"""Drafting: what a response's next tokens may be, as trees of tokens for the engine to verify. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.records import BoolArray, FloatArray, IntArray

SOURCES = ("history", "siblings", "prompt")
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
        owner = np.repeat(np.arange(self.counts.size), self.counts)
        begins = np.cumsum(self.counts) - self.counts
        place = np.cumsum(keep) - 1  # among all kept nodes
        counts = np.bincount(owner[keep], minlength=self.counts.size)
        parents = self.parents[keep]
        parent = np.maximum(begins[owner[keep]] + parents, 0)
        renumbered = place[parent] - (np.cumsum(counts) - counts)[owner[keep]] if parents.size else parents
        return Drafts(
            counts,
            self.token_ids[keep],
            np.where(parents < 0, -1, renumbered),
            self.depth[keep],
            self.estimates[keep],
            self.sources[keep],
        )


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
