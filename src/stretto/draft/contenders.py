"""Which tokens win under the noise that is known beforehand, by what earlier tokens were drawn from.

With the probabilities p that decide, the sample is the token of the largest p / E, where E is an exponential variable
that the noise g = -log E makes known. History tells the p of the likely tokens, moved a little since; the tokens that
it leaves out, of probability r together, have their own best p / E, which is below x with probability exp(-r / x).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stretto.draft.estimates import LEVELS
from stretto.history.frozen import Frozen
from stretto.history.mixtures import ANYWHERE, LONGEST, WHOLE
from stretto.records import FloatArray, IntArray
from stretto.sampling import exponential_of, kernel

CONTENDERS = LEVELS * LONGEST + ANYWHERE
UNIGRAM = 0.5  # how often the sample is what the noise makes of the mean of all rows
FARTHEST = 0.02  # how probable it must be that longer matches are wrong, for a shorter one to be asked
NEGLIGIBLE = 1e-4  # an estimate that no calibration makes worth a node


class Contenders(NamedTuple):
    """Tokens that may win after one match, and room to compute it in."""

    tokens: IntArray  # (CONTENDERS,)
    estimates: FloatArray  # (CONTENDERS,), that they do
    exponentials: FloatArray  # (CONTENDERS,), E
    places: IntArray  # of a row's tokens among these
    quotients: FloatArray  # their p / E


@kernel()
def room_for_contenders() -> Contenders:
    """Empty columns."""
    longest = max(LONGEST, ANYWHERE)
    return Contenders(
        np.empty(CONTENDERS, np.int64),
        np.empty(CONTENDERS),
        np.empty(CONTENDERS),
        np.empty(longest, np.int64),
        np.empty(longest),
    )


@kernel()
def _add_row(
    frozen: Frozen,
    at: int,
    weight: float,
    known: bool,
    key: np.uint64,
    position: int,
    found: Contenders,
    count: int,
) -> int:
    """Add `weight` times the chances by the row that begins `at`; how many contenders there are then."""
    size, best, rest = 0, 0.0, 1.0
    last = False
    while not last:
        token = int(frozen.likely[at])
        last = token < 0
        token = ~token if last else token
        place = 0
        while place < count and found.tokens[place] != token:
            place += 1
        if place == count:
            found.tokens[place], found.estimates[place] = token, 0.0
            found.exponentials[place] = exponential_of(key, position, token)
            count += 1
        p = frozen.share[at] / WHOLE
        rest -= p
        found.places[size], found.quotients[size] = place, p / found.exponentials[place]
        best = max(best, found.quotients[size])
        size += 1
        at += 1
    if best == 0.0:
        return count
    # What moved the logarithms of p since is taken to be Gumbel noise, of scale 1/4 for the same text and else 1.
    total = 0.0
    for i in range(size):
        ratio = found.quotients[i] / best
        total += ratio**4 if known else ratio
    for i in range(size):
        ratio = found.quotients[i] / best
        share = weight * (ratio**4 if known else ratio) / total
        if share > NEGLIGIBLE:
            found.estimates[found.places[i]] += share * math.exp(-max(rest, 0.0) / found.quotients[i])
    return count


@kernel()
def frozen_contenders(
    frozen: Frozen,
    bases: tuple[int, int],
    state: int,
    length: int,
    key: np.uint64,
    position: int,
    found: Contenders,
) -> tuple[int, float]:
    """Fill `found` for a match of `length` at `state`; how many there are, and what they leave to others.

    The row of the longest match is right where the match is of the whole response. Otherwise it is right with
    probability 1 - 1 / (1 + length), and if not, that of the next shorter match is with its own, and so on; the mean of
    all rows comes last.
    """
    count, level, reach = 0, 0, 1.0
    while level < LEVELS and state > 0 and reach > FARTHEST:
        known = length == position + 1  # START, and all tokens before this position
        wrong = 0.0 if known else 1.0 / (1.0 + length)
        at = frozen.row[bases[0] + state]
        if at >= 0:
            count = _add_row(frozen, at, reach * (1.0 - wrong), known, key, position, found, count)
            reach *= wrong
        state = frozen.link[bases[0] + state]
        length = frozen.length[bases[0] + state]
        level += 1
    if reach > FARTHEST and frozen.row[bases[0]] >= 0:
        count = _add_row(frozen, frozen.row[bases[0]], reach * UNIGRAM, False, key, position, found, count)
    left = 1.0
    for i in range(count):
        left -= found.estimates[i]
    return count, max(left, 0.0)
