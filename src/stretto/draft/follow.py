"""Where the requests in flight are in every source, by slot: taken along token by token, and asked for all at once.

A step of a few requests is short, and handing an array to a kernel takes longer than looking something up in it (half
a microsecond, for each of fifty). So one call follows new tokens in all sources and grows all trees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stretto.draft.estimates import advance_live
from stretto.draft.tree import Grown, Matches, Rules, grow
from stretto.history.automaton import Pool, say
from stretto.history.frozen import Frozen, advance
from stretto.records import FloatArray, IntArray
from stretto.sampling import KeyArray, kernel


def nowhere(slots: int) -> Matches:
    """The matches of so many slots without requests."""

    def column(value: int) -> IntArray:
        return np.full(slots, value, np.int64)

    no, zero = column(-1), column(0)
    return Matches(
        no, no.copy(), zero, zero.copy(), no.copy(), zero.copy(), no.copy(), zero.copy(), zero.copy()
    )


class Said(NamedTuple):
    """New tokens of R requests."""

    slots: IntArray  # (R,); a slot may come several times, its earlier tokens first
    counts: IntArray  # (R,)
    tokens: IntArray  # (counts.sum(),), request after request


@kernel(inline=True)
def _advance_history(frozen: Frozen, matches: Matches, slot: int, tokens: IntArray) -> None:
    state, length = matches.state[slot], matches.length[slot]
    for token in tokens:
        state, length = advance(
            frozen, matches.state_base[slot], matches.edge_base[slot], state, length, token
        )
    matches.state[slot], matches.length[slot] = state, length


@kernel()
def follow_history(frozen: Frozen, matches: Matches, said: Said) -> None:
    """Take requests over tokens in their histories alone, in place."""
    at = 0
    for r in range(said.slots.size):
        _advance_history(frozen, matches, said.slots[r], said.tokens[at : at + said.counts[r]])
        at += said.counts[r]


@kernel()
def follow(frozen: Frozen, pool: Pool, matches: Matches, said: Said) -> None:
    """Take requests over their new tokens, in place.

    What a request says is added to the responses in flight, for which `pool` must have room.
    """
    at = 0
    for r in range(said.slots.size):
        slot, new = said.slots[r], said.tokens[at : at + said.counts[r]]
        at += said.counts[r]
        if matches.state_base[slot] >= 0:
            _advance_history(frozen, matches, slot, new)
        if matches.prompt[slot] >= 0:
            state, length = matches.prompt_state[slot], matches.prompt_length[slot]
            for token in new:
                state, length = advance_live(pool, matches.prompt[slot], state, length, token)
            matches.prompt_state[slot], matches.prompt_length[slot] = state, length
        if matches.group[slot] >= 0:
            matches.last[slot] = say(pool, matches.group[slot], matches.last[slot], new)


@kernel()
def grow_at(
    frozen: Frozen,
    pool: Pool,
    matches: Matches,
    said: Said,
    keys: KeyArray,
    slots: IntArray,
    positions: IntArray,
    room: IntArray,
    table: FloatArray,
    rules: Rules,
    floor: float,
    grown: Grown,
) -> tuple[IntArray, int]:
    """`follow`, then `grow` for the requests in `slots` (R,): nodes of each, and of all.

    `matches` and `keys` are those of all slots.
    """
    follow(frozen, pool, matches, said)
    here = Matches(
        matches.state_base[slots],
        matches.edge_base[slots],
        matches.state[slots],
        matches.length[slots],
        matches.group[slots],
        matches.last[slots],
        matches.prompt[slots],
        matches.prompt_state[slots],
        matches.prompt_length[slots],
    )
    counts = grow(frozen, pool, here, keys[slots], positions, room, table, rules, floor, grown)
    return counts, counts.sum()
