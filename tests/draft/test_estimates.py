"""What follows a text in a live automaton is told at bounded cost."""

from __future__ import annotations

import numpy as np

from stretto.draft.estimates import BRANCHES, WIDEST, live_successors, room_for_successors
from stretto.history.automaton import LivePool, find_text

KINDS = WIDEST + 60  # tokens that follow 7


def test_a_text_that_too_much_follows_says_nothing() -> None:
    """Each token follows 7 once, the last of them twice; behind 9, 7 only the last and the first do."""
    pool = LivePool()
    group, tokens = pool.open(), np.arange(100, 100 + KINDS)
    said = [
        np.column_stack([np.full(KINDS, 7), tokens]).ravel(),
        np.array([9, 7, 100]),
        np.array([9, 7, tokens[-1]]),
    ]
    for text in said:
        pool.extend(np.array([group]), np.array([pool.root(group)]), np.array([text.size]), text)
    found = room_for_successors()
    found.shares[:] = np.nan  # what was there before does not matter
    wide = find_text(pool.arrays, group, np.array([7]))
    assert live_successors(pool.arrays, wide, found) == 0
    narrow = find_text(pool.arrays, group, np.array([9, 7]))
    assert live_successors(pool.arrays, narrow, found) == 2
    # Half by two occurrences of two kinds; of what follows 7 alone each is taken to be seldom.
    assert dict(zip(found.tokens[:2].tolist(), found.estimates[:2].tolist(), strict=True)) == {
        100: 0.25,
        int(tokens[-1]): 0.25,
    }


def test_of_as_many_as_are_looked_at_all_count() -> None:
    pool = LivePool()
    group, tokens = pool.open(), np.arange(100, 100 + WIDEST)
    text = np.column_stack([np.full(WIDEST, 7), tokens]).ravel()
    pool.extend(np.array([group]), np.array([pool.root(group)]), np.array([text.size]), text)
    found = room_for_successors()
    assert live_successors(pool.arrays, find_text(pool.arrays, group, np.array([7])), found) == BRANCHES
    assert found.estimates[0] == 1 / WIDEST
