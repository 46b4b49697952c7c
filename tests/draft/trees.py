"""Drafts for tests: drawn by hypothesis, or written down as paths. And where texts lead in an automaton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from stretto.draft import Drafts, Verified
from stretto.history.frozen import Arena, advance
from stretto.records import BoolArray, IntArray

Text = tuple[int, ...]
GRAIN = 64  # estimates are multiples of 1/GRAIN, so that float64 adds them exactly


def forest(requests: Sequence[Sequence[tuple[int, int]]]) -> Drafts:
    """Trees from (parent, estimate * GRAIN) of every node of every request, in order."""
    parents = [parent for nodes in requests for parent, _ in nodes]
    depth: list[int] = []
    for nodes in requests:
        start = len(depth)
        depth += [0] * len(nodes)
        for i, (parent, _) in enumerate(nodes):
            depth[start + i] = 1 if parent < 0 else depth[start + parent] + 1
    estimates = [estimate / GRAIN for nodes in requests for _, estimate in nodes]
    return Drafts(
        counts=np.array([len(nodes) for nodes in requests], np.int64),
        token_ids=np.arange(len(parents)),
        parents=np.array(parents, np.int64),
        depth=np.array(depth, np.int64),
        estimates=np.array(estimates, np.float64),
        sources=np.zeros(len(parents), np.int8),
    )


def paths(*lengths: int) -> Drafts:
    """One path for each request, estimates falling."""
    return forest([[(i - 1, GRAIN - i) for i in range(length)] for length in lengths])


def accept(drafts: Drafts, *levels: int) -> Verified:
    """The first `levels` nodes of every request's path are accepted."""
    depth, limit = drafts.depth, np.repeat(np.array(levels, np.int64), drafts.counts)
    return Verified(depth <= limit + 1, depth <= limit, np.array(levels, np.int64) + 1)


def parent_closed(drafts: Drafts, keep: BoolArray) -> bool:
    """Whether `keep` has every node's parent too."""
    starts = np.repeat(np.cumsum(drafts.counts) - drafts.counts, drafts.counts)
    inner = keep & (drafts.parents >= 0)
    return bool(keep[(starts + drafts.parents)[inner]].all())


@st.composite
def trees(draw: st.DrawFn, largest: int) -> list[tuple[int, int]]:
    """One request's tree of up to `largest` nodes; 0, 1 and equal estimates included."""
    nodes: list[tuple[int, int]] = []
    for i in range(draw(st.integers(0, largest))):
        parent = draw(st.integers(-1, i - 1))
        ceiling = nodes[-1][1] if nodes else GRAIN  # falling order, and the parent came before
        nodes.append((parent, draw(st.sampled_from([0, ceiling]) | st.integers(0, ceiling))))
    return nodes


def drafts(requests: int, largest: int) -> st.SearchStrategy[Drafts]:
    """Up to `requests` requests of up to `largest` nodes each."""
    return st.lists(trees(largest), max_size=requests).map(forest)


def advance_texts(
    arena: Arena, bases: tuple[IntArray, IntArray], texts: Sequence[Sequence[int]]
) -> tuple[IntArray, IntArray]:
    """States and lengths (R,) of the matches of these texts, each in the automaton at its bases; 0 where none is."""
    state, length = np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64)
    for r, text in enumerate(texts):
        if bases[0][r] >= 0:
            for token in text:
                at = (int(bases[0][r]), int(bases[1][r]), int(state[r]), int(length[r]))
                state[r], length[r] = advance(arena.arrays, *at, token)
    return state, length
