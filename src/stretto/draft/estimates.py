"""What probably follows a text, from where its longest match in a source's automaton is.

How probable a token is given the text is estimated from the match and, since a long match has few occurrences, from
its suffixes: at each level the share of occurrences followed by the token, blended with the next shorter match's by
N occurrences against T different successors (escape method C of prediction by partial matching, Moffat 1990).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stretto.history.automaton import Pool, find_live
from stretto.history.frozen import Frozen, find_frozen
from stretto.records import FloatArray, IntArray
from stretto.sampling import kernel

BRANCHES = 6  # successors looked at per match, the most frequent ones
LEVELS = 3  # matches that an estimate is blended from, the longest and its suffixes
WIDEST = 128  # edges of a live state that is asked: what has more, a short text, says little and costs most


class Successors(NamedTuple):
    """What may follow one match, and room to compute it in."""

    tokens: IntArray  # (BRANCHES,)
    estimates: FloatArray  # (BRANCHES,), probabilities
    shares: FloatArray  # (LEVELS, BRANCHES), of each token at each level
    weights: FloatArray  # (LEVELS,), of a level against those after it
    occurrences: FloatArray  # (BRANCHES,), and behaviour probabilities, of the successors of one level
    probabilities: FloatArray


@kernel()
def room_for_successors() -> Successors:
    """Empty columns."""
    return Successors(
        np.empty(BRANCHES, np.int64),
        np.empty(BRANCHES),
        np.empty((LEVELS, BRANCHES)),
        np.empty(LEVELS),
        np.empty(BRANCHES),
        np.empty(BRANCHES),
    )


@kernel()
def _frozen_level(
    frozen: Frozen,
    bases: tuple[int, int],
    state: int,
    probabilities: bool,
    found: Successors,
    count: int,
    level: int,
) -> None:
    """Shares of the first `count` tokens of `found` among what followed `state`, and the level's weight."""
    begin = bases[1] + frozen.first[bases[0] + state]
    kinds = bases[1] + frozen.first[bases[0] + state + 1] - begin
    looked = min(kinds, BRANCHES)
    total = float(frozen.counts[bases[0] + state])
    found.weights[level] = total / (total + kinds)
    if probabilities:
        for i in range(looked):
            child = bases[0] + frozen.target[begin + i]
            found.occurrences[i] = frozen.counts[child]
            found.probabilities[i] = frozen.weight[child] / frozen.counts[child]
    for i in range(count):
        edge = find_frozen(frozen, bases[0], bases[1], state, found.tokens[i])
        child = bases[0] + frozen.target[edge]
        mass = float(frozen.weight[child])
        if not probabilities:
            found.shares[level, i] = mass / frozen.weight[bases[0] + state]
            continue
        # The token's probability where it was taken is known. Where another was, what that left over bounds it.
        own = mass / frozen.counts[child]
        for other in range(looked):
            if begin + other != edge:
                left = 1.0 - found.probabilities[other]
                mass += found.occurrences[other] * max(0.0, min(own, left))
        found.shares[level, i] = min(1.0, mass / total)


@kernel()
def _blend(found: Successors, count: int, levels: int) -> None:
    """The estimates, from the shares at `levels` levels."""
    for i in range(count):
        estimate = found.shares[levels - 1, i]
        for level in range(levels - 1, -1, -1):
            weight = found.weights[level]
            estimate = weight * found.shares[level, i] + (1.0 - weight) * estimate
        found.estimates[i] = estimate


@kernel()
def frozen_successors(
    frozen: Frozen, bases: tuple[int, int], state: int, probabilities: bool, found: Successors
) -> tuple[int, float]:
    """Fill `found` for a `state` that is not the root; how many there are, and what they leave to other tokens.

    `bases` are those of the automaton in `frozen`. `probabilities`: its weights are sums of behaviour probabilities.
    """
    begin = bases[1] + frozen.first[bases[0] + state]
    end = bases[1] + frozen.first[bases[0] + state + 1]
    count = min(end - begin, BRANCHES)
    for i in range(count):
        found.tokens[i] = frozen.token[begin + i]
    levels, left = 0, 1.0
    while count > 0 and levels < LEVELS and state > 0:
        _frozen_level(frozen, bases, state, probabilities, found, count, levels)
        if levels == 0:
            left = 1.0 - found.weights[0]
            if probabilities:
                left = max(0.0, 1.0 - found.probabilities[:count].sum())
        state = frozen.link[bases[0] + state]
        levels += 1
    if count > 0:
        _blend(found, count, levels)
    return int(count), left


@kernel()
def _most_frequent(pool: Pool, state: int, found: Successors) -> int:
    """Put the tokens that follow `state` most often into `found`, falling; how many there are."""
    count = looked = 0
    edge = int(pool.head[state])
    while edge >= 0 and looked < WIDEST:
        looked += 1
        times = pool.counts[pool.target[edge]]
        if count < BRANCHES or times > found.occurrences[BRANCHES - 1]:
            place = min(count, BRANCHES - 1)
            count = place + 1
            while place > 0 and found.occurrences[place - 1] < times:
                found.occurrences[place] = found.occurrences[place - 1]
                found.tokens[place] = found.tokens[place - 1]
                place -= 1
            found.occurrences[place], found.tokens[place] = times, pool.token[edge]
        edge = int(pool.following[edge])
    return count if edge < 0 else 0


@kernel()
def live_successors(pool: Pool, state: int, found: Successors) -> int:
    """Fill `found` for a live `state` that is not a root; how many there are. None where it has more than WIDEST."""
    count = _most_frequent(pool, state, found)
    levels = 0
    while count > 0 and levels < LEVELS and pool.link[state] >= 0:
        total, kinds = 0.0, 0
        found.shares[levels, :count] = 0.0
        edge = int(pool.head[state])
        while edge >= 0 and kinds < WIDEST:
            times = pool.counts[pool.target[edge]]
            total += times
            kinds += 1
            for i in range(count):
                if found.tokens[i] == pool.token[edge]:
                    found.shares[levels, i] = times
            edge = int(pool.following[edge])
        if edge >= 0:  # of many tokens each follows seldom
            found.shares[levels, :count] = 0.0
            found.weights[levels] = 0.0
            levels += 1
            break
        for i in range(count):
            found.shares[levels, i] /= total
        found.weights[levels] = total / (total + kinds)
        state = int(pool.link[state])
        levels += 1
    if count > 0:
        _blend(found, count, levels)
    return count


@kernel()
def advance_live(pool: Pool, group: int, state: int, length: int, token: int) -> tuple[int, int]:
    """`frozen.advance` in a live automaton that does not contain the text."""
    while True:
        edge = find_live(pool, group, state, token)
        if edge >= 0:
            return int(pool.target[edge]), length + 1
        if pool.link[state] < 0:
            return state, 0
        state = int(pool.link[state])
        length = int(pool.length[state])
