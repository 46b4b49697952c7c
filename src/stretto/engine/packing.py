"""What a step of the embedded engine computes, as one row of packed tokens: where each goes, and what it sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.draft import Drafts
from stretto.engine.slots import Slots
from stretto.records import IntArray
from stretto.sampling import kernel

SPAN = 32  # from this many new tokens of one request on, matrix products beat the exact-length kernel


@dataclass(slots=True)
class Packing:
    """Where T packed tokens belong; a request's new tokens lie together, in order of position."""

    row: IntArray  # (T,) the request's own row
    shared_row: IntArray  # (T,) the row of its prompt
    shared: IntArray  # (T,) how many positions lie there
    place: IntArray  # (T,) where it is stored: its position, or for a draft's node the next free one
    visible: IntArray  # (T,) it sees so many positions from the first on
    first_ancestor: IntArray  # (T + 1,) and those of `ancestors` from here to the next token's
    ancestors: IntArray  # (A,) offsets in the own row
    spans: list[tuple[int, int]]  # begin and end of the runs that are at least SPAN long
    single: IntArray  # (<= T,) indices of all other tokens


def pack(
    columns: Slots, slots: IntArray, counts: IntArray, drafts: Drafts
) -> tuple[Packing, IntArray, IntArray]:
    """The next `counts` (R,) tokens of `slots` (R,), each one's tree behind them; with token ids and positions (T,)."""
    total = counts + drafts.counts
    begins = np.cumsum(total) - total
    owner = np.repeat(slots, total)
    within = np.arange(owner.size) - np.repeat(begins, total)
    node = within >= np.repeat(counts, total)
    place = columns.computed[owner] + within
    position, visible = place.copy(), place + 1
    token_ids = columns.tokens[owner, np.minimum(place, columns.max_model_len - 1)]
    first, ancestors = np.zeros(owner.size + 1, np.int64), place[:0]
    if drafts.token_ids.size:
        behind = columns.length[slots]
        position[node] = np.repeat(behind - 1, drafts.counts) + drafts.depth
        token_ids[node] = drafts.token_ids
        offset = behind - columns.shared[slots]
        visible[node], seen, ancestors = tree_views(drafts.counts, drafts.parents, behind, offset)
        first[1:][node] = np.diff(seen)
        first = np.cumsum(first)
    long = np.flatnonzero(counts >= SPAN)
    in_span = np.repeat(counts >= SPAN, total) & ~node
    packing = Packing(
        row=owner,
        shared_row=columns.shared_row[owner],
        shared=columns.shared[owner],
        place=place,
        visible=visible,
        first_ancestor=first,
        ancestors=ancestors,
        spans=[(int(begins[i]), int(begins[i] + counts[i])) for i in long],
        single=np.flatnonzero(~in_span),
    )
    return packing, token_ids, position


@kernel()
def tree_views(
    counts: IntArray, parents: IntArray, length: IntArray, offset: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """What the nodes of R trees see: `visible` (N,), `first_ancestor` (N + 1,), `ancestors` (A,) of `Packing`.

    `counts` (R,) nodes each with `parents` (N,), behind requests of `length` (R,) tokens, whose nodes lie at `offset`
    (R,) in their rows. A node sees its request, its ancestors and itself; as long as its path is the tree's first
    nodes in a row, that is contiguous.
    """
    nodes = parents.size
    visible, off_line = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    begin = 0
    for r in range(counts.size):
        for k in range(counts[r]):
            parent = parents[begin + k]
            in_line = parent < 0 or off_line[begin + parent] == 0
            if in_line and parent == k - 1:
                visible[begin + k] = length[r] + k + 1
            else:
                visible[begin + k] = length[r] if parent < 0 else visible[begin + parent]
                off_line[begin + k] = 1 if parent < 0 else off_line[begin + parent] + 1
        begin += counts[r]
    first = np.zeros(nodes + 1, np.int64)
    for n in range(nodes):
        first[n + 1] = first[n] + off_line[n]
    ancestors = np.zeros(first[nodes], np.int64)
    begin = 0
    for r in range(counts.size):
        for k in range(counts[r]):
            node = k
            for i in range(off_line[begin + k] - 1, -1, -1):
                ancestors[first[begin + k] + i] = offset[r] + node
                node = parents[begin + node]
        begin += counts[r]
    return visible, first, ancestors


def compile_kernels() -> None:
    """Compile, or load from numba's cache, what packing drafts needs."""
    one = np.ones(1, np.int64)
    tree_views(one, -one, one, one)
