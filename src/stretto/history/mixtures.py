"""What could have followed a text, beside what did: the distributions that earlier tokens were drawn from.

The log may hold the most probable tokens of every place (`stretto.records.Alternatives`). The *row* of a place is what
is worth keeping of them, with the token that was drawn; the row of a state of a suffix automaton is the mean of those
of all places that its strings are followed by. Tokens that are left out count as one, the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stretto.alternatives import Alternatives
from stretto.history.automaton import TokenArray, WeightArray
from stretto.records import FloatArray, IntArray
from stretto.sampling import kernel

ShareArray = npt.NDArray[np.uint16]

WHOLE = 65535  # a probability of 1 as a share
LEAST = round(0.005 * WHOLE)  # tokens of a smaller share are left to the rest: they hardly ever win
LONGEST = 8  # tokens of a place's and of a state's row: kernels that read them have room for so many
ANYWHERE = 16  # of the root's
MIXED = 16  # tokens that are told apart while a row is mixed; the least probable of more are left to the rest


class Rows(NamedTuple):
    """The rows of the N tokens of one or several texts, one behind another."""

    first: TokenArray  # (N + 1,), row i: first[i] .. first[i + 1]
    token: TokenArray  # (M,)
    share: ShareArray  # (M,), of WHOLE

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


class Mixtures(NamedTuple):
    """The rows of the S states of an automaton. The last token of each row is stored as its complement, ~token."""

    row: (
        TokenArray  # (S,), where a state's row begins, -1: nothing followed it; (0,) if there are none at all
    )
    likely: TokenArray  # (M,), tokens
    share: ShareArray  # (M,), of WHOLE


def no_mixtures() -> Mixtures:
    """Of an automaton without them."""
    return Mixtures(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint16))


def rows_of(tokens: TokenArray, drawn: WeightArray, top: Alternatives | None) -> Rows:
    """The rows of a text of N `tokens`, drawn with probabilities `drawn` (N,), which are all that is known without
    `top`. Of more than LONGEST tokens the most probable, and the one that was drawn.
    """
    top = top or Alternatives.none(tokens.size)
    room = tokens.size * min(top.width + 1, LONGEST)
    first = np.zeros(tokens.size + 1, np.int32)
    token, share = np.empty(room, np.int32), np.empty(room, np.uint16)
    _compact(tokens, drawn, top.token_ids, np.exp(top.logprobs), first, token, share)
    return Rows(first, token[: first[-1]].copy(), share[: first[-1]].copy())


def join_rows(parts: list[Rows]) -> Rows:
    """The rows of texts behind one another."""
    shifts = np.cumsum([0, *(part.token.size for part in parts)])
    first = [part.first[:-1] + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
    return Rows(
        np.concatenate([*first, shifts[-1:]]).astype(np.int32),
        np.concatenate([part.token for part in parts]),
        np.concatenate([part.share for part in parts]),
    )


@kernel()
def _compact(
    tokens: TokenArray,
    drawn: WeightArray,
    ids: TokenArray,
    probabilities: WeightArray,
    first: TokenArray,
    token: TokenArray,
    share: ShareArray,
) -> None:
    at = 0
    for i in range(tokens.size):
        end, found = at + LONGEST, False
        for k in range(ids.shape[1]):
            taken = ids[i, k] == tokens[i]
            if at < end and ids[i, k] >= 0 and (taken or probabilities[i, k] * WHOLE >= LEAST):
                token[at], share[at] = ids[i, k], round(min(probabilities[i, k], 1.0) * WHOLE)
                at += 1
                found |= taken
        if not found:
            at = min(at, end - 1)
            token[at], share[at] = tokens[i], round(min(drawn[i], 1.0) * WHOLE)
            at += 1
        first[i + 1] = at


@kernel()
def _mix_in(tokens: TokenArray, masses: FloatArray, size: int, token: int, mass: float) -> int:
    """Add `mass` to a token of a row that is being mixed; its size then."""
    least = 0
    for k in range(size):
        if tokens[k] == token:
            masses[k] += mass
            return size
        if masses[k] < masses[least]:
            least = k
    if size < MIXED:
        tokens[size], masses[size] = token, mass
        return size + 1
    if masses[least] < mass:
        tokens[least], masses[least] = token, mass
    return size


@kernel()
def _store(
    tokens: TokenArray,
    masses: FloatArray,
    size: int,
    places: float,
    likely: TokenArray,
    share: ShareArray,
    at: int,
) -> int:
    """Put the mean of `places` rows into `likely` and `share` from `at` on, the most probable first; the end."""
    begin = at
    for _ in range(min(size, LONGEST)):
        best = 0
        for k in range(1, size):
            if masses[k] > masses[best] or (masses[k] == masses[best] and tokens[k] < tokens[best]):
                best = k
        mean = masses[best] / places
        if mean < LEAST and at > begin:
            break
        likely[at], share[at] = tokens[best], round(mean)
        masses[best] = -1.0
        at += 1
    likely[at - 1] = ~likely[at - 1]
    return at


@kernel()
def _mix(
    link: TokenArray,
    counts: WeightArray,
    order: TokenArray,
    ends: TokenArray,
    offsets: IntArray,
    rows: Rows,
    row: TokenArray,
    likely: TokenArray,
    share: ShareArray,
) -> int:
    """Fill `row`, `likely` and `share`; how much of the latter is in use.

    A state that occurs once has the row of the place behind it. The others' are mixed, the longest strings first, from
    those of the states that link to them and of the places behind their own longest string.
    """
    number = np.full(link.size, -1, np.int32)  # of the states that are mixed
    mixed = 0
    for state in range(1, link.size):
        if counts[state] > 1:
            number[state] = mixed
            mixed += 1
    tokens, masses = np.empty((mixed, MIXED), np.int32), np.empty((mixed, MIXED))
    sizes, places = np.zeros(mixed, np.int64), np.zeros(mixed)
    at = 0
    row[:] = -1
    for text in range(offsets.size - 1):
        for i in range(offsets[text], offsets[text + 1] - 1):
            state = ends[i]
            into = number[state]
            if into < 0:  # once
                into = number[link[state]]
                row[state] = at
                for k in range(rows.first[i + 1], rows.first[i + 2]):
                    likely[at], share[at] = rows.token[k], rows.share[k]
                    at += 1
                likely[at - 1] = ~likely[at - 1]
            if into >= 0:
                places[into] += 1.0
                for k in range(rows.first[i + 1], rows.first[i + 2]):
                    sizes[into] = _mix_in(
                        tokens[into], masses[into], sizes[into], rows.token[k], float(rows.share[k])
                    )
    for i in range(order.size - 1, 0, -1):
        here = number[order[i]]
        if here < 0 or places[here] == 0.0:
            continue
        above = number[link[order[i]]]
        if above >= 0:
            places[above] += places[here]
            for k in range(sizes[here]):
                sizes[above] = _mix_in(
                    tokens[above], masses[above], sizes[above], tokens[here, k], masses[here, k]
                )
        row[order[i]] = at
        at = _store(tokens[here], masses[here], sizes[here], places[here], likely, share, at)
    return at


def mix(
    link: TokenArray,
    counts: WeightArray,
    order: TokenArray,
    ends: TokenArray,
    offsets: IntArray,
    rows: Rows,
) -> Mixtures:
    """The rows of all states of an automaton of the texts that `offsets` (K + 1,) part and `rows` are of.

    `order`: its states, the shortest strings first; `ends` (N,): the state of the text before and with each token.
    """
    row = np.empty(link.size, np.int32)
    room = rows.token.size + ANYWHERE + LONGEST * int((counts > 1).sum())
    likely, share = np.empty(room, np.int32), np.empty(room, np.uint16)
    used = _mix(link, counts, order, ends, offsets, rows, row, likely, share)
    tokens, shares = _anywhere(offsets, rows)
    if tokens.size:
        row[0] = used
        likely[used : used + tokens.size], share[used : used + tokens.size] = tokens, shares
        used += tokens.size
    return Mixtures(row, likely[:used].copy(), share[:used].copy())


def _anywhere(offsets: IntArray, rows: Rows) -> tuple[TokenArray, ShareArray]:
    """The root's row: the mean of those of all places behind any token."""
    sizes = np.diff(rows.first)
    sizes[offsets[:-1][np.diff(offsets) > 0]] = 0
    places = np.count_nonzero(sizes)
    if not places:
        return np.zeros(0, np.int32), np.zeros(0, np.uint16)
    behind = np.repeat(sizes > 0, np.diff(rows.first))
    tokens, inverse = np.unique(rows.token[behind], return_inverse=True)
    shares = np.bincount(inverse, rows.share[behind]) / places
    best = np.argsort(-shares, kind="stable")[:ANYWHERE]
    found = tokens[best]
    found[-1] = ~found[-1]
    return found, np.round(shares[best]).astype(np.uint16)
