"""Followed in all sources at once as in each alone, whatever the other slots do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.draft.estimates import advance_live
from stretto.draft.follow import Said, follow, nowhere
from stretto.history.automaton import LivePool, find_text
from stretto.history.frozen import Arena, advance, freeze
from stretto.records import IntArray

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def ids(tokens: list[int]) -> IntArray:
    return np.array(tokens, np.int64)


@given(TOKENS.filter(bool), TOKENS, st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3))
def test_equals_each_source_alone(
    history: list[int], prompt: list[int], said: list[tuple[list[int], list[int]]]
) -> None:
    """Every slot but the first, which is nowhere, has the same history and prompt; each says its two pieces."""
    slots = len(said) + 1
    arena, pool, at = Arena(weighted=True), LivePool(), nowhere(slots)
    handle = arena.add(freeze(np.array(history, np.int32), ids([0, len(history)]), np.ones(len(history))))
    bases = arena.bases(np.array([handle]))
    quoted, group = pool.open(), pool.open()
    last = np.array([pool.root(quoted)])
    pool.extend(np.array([quoted]), last, ids([len(prompt)]), ids(prompt))
    at.state_base[1:], at.edge_base[1:] = bases
    at.prompt[1:], at.prompt_state[1:] = quoted, pool.root(quoted)
    at.group[1:], at.last[1:] = group, pool.root(group)
    for piece in (0, 1):
        texts = [[1, 2], *(pieces[piece] for pieces in said)]
        counts, tokens = ids([len(text) for text in texts]), ids([t for text in texts for t in text])
        arrays = pool.reserve(len(tokens) - 2)
        follow(arena.arrays, arrays, at, Said(np.arange(slots), counts, tokens))
    for slot, (first, second) in enumerate(said, 1):
        state = length = 0
        where, matched = pool.root(quoted), 0
        for token in first + second:
            state, length = advance(arena.arrays, int(bases[0][0]), int(bases[1][0]), state, length, token)
            where, matched = advance_live(pool.arrays, quoted, where, matched, token)
        assert (at.state[slot], at.length[slot]) == (state, length)
        assert (at.prompt_state[slot], at.prompt_length[slot]) == (where, matched)
        assert at.last[slot] == find_text(pool.arrays, group, ids(first + second))
    for column, new in zip(at, nowhere(slots), strict=True):
        assert column[0] == new[0]
