"""Where the requests in flight are in every source, by slot: taken along token by token, and asked for all at once.

A step of a few requests is short, and handing an array to a kernel takes longer than looking something up in it. So
there is one call to follow new tokens in all sources, and one to grow all trees.
"""

from __future__ import annotations

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


@kernel()
def follow_history(frozen: Frozen, matches: Matches, slot: int, tokens: IntArray) -> None:
    """Take the request in `slot` over new `tokens` (T,) in its history alone, in place."""
    state, length = matches.state[slot], matches.length[slot]
    for token in tokens:
        state, length = advance(
            frozen, matches.state_base[slot], matches.edge_base[slot], state, length, token
        )
    matches.state[slot], matches.length[slot] = state, length


@kernel()
def follow(
    frozen: Frozen, pool: Pool, matches: Matches, slots: IntArray, counts: IntArray, tokens: IntArray
) -> None:
    """Take the requests in `slots` (R,) over their `counts` (R,) new tokens, in place.

    `tokens` (counts.sum(),) are request after request. What a request says is added to the responses in flight, for
    which `pool` must have room.
    """
    at = 0
    for r in range(slots.size):
        slot, new = slots[r], tokens[at : at + counts[r]]
        at += counts[r]
        if matches.state_base[slot] >= 0:
            follow_history(frozen, matches, slot, new)
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
    keys: KeyArray,
    slots: IntArray,
    positions: IntArray,
    room: IntArray,
    table: FloatArray,
    rules: Rules,
    floor: float,
    grown: Grown,
) -> IntArray:
    """`grow` for the requests in `slots` (R,); `matches` and `keys` are those of all slots."""
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
    return grow(frozen, pool, here, keys[slots], positions, room, table, rules, floor, grown)
