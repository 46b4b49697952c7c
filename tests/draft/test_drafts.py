"""Selecting nodes keeps the trees' shape."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.draft import Drafts
from tests.draft.trees import drafts


def lineages(trees: Drafts) -> list[tuple[int, tuple[int, ...]]]:
    """Of every node: its request, and the token ids from its root down to it."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for request, count in enumerate(trees.counts.tolist()):
        start = len(found)
        for i in range(start, start + count):
            parent = int(trees.parents[i])
            above = found[start + parent][1] if parent >= 0 else ()
            found.append((request, (*above, int(trees.token_ids[i]))))
    return found


@given(drafts(requests=4, largest=8), st.data())
def test_select_keeps_lineages_and_columns(trees: Drafts, data: st.DataObject) -> None:
    before = lineages(trees)
    wanted = data.draw(st.lists(st.booleans(), min_size=len(before), max_size=len(before)))
    starts = np.repeat(np.cumsum(trees.counts) - trees.counts, trees.counts)
    keep = np.array(wanted, np.bool_)
    for i in np.flatnonzero(trees.parents >= 0):
        keep[i] &= keep[starts[i] + trees.parents[i]]
    kept = trees.select(keep)
    assert lineages(kept) == [before[i] for i in np.flatnonzero(keep)]
    assert kept.counts.size == trees.counts.size
    for column in ("token_ids", "depth", "estimates", "sources"):
        assert getattr(kept, column).tolist() == getattr(trees, column)[keep].tolist()
