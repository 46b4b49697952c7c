"""The embedded engine's attention kernels for CPUs: keys and values read where they lie.

Inner loops run from 0 over contiguous vectors: numba turns only such loops into vector instructions, since an index
that might be negative would count from the end. Maxima and sums are kept per position of a block first: the compiler
may not reorder a float sum, and one chain of additions would take longer than all the rest. Whole arrays are handed
over, since every slice that one function passes to another is counted as a reference.
"""

from __future__ import annotations

import numba
import numpy as np

from stretto.records import FloatArray, IntArray
from stretto.sampling import kernel

BLOCK = 64  # positions whose keys lie together
PIECES = 4  # into which the tokens are cut for each head, so that threads get the same amount of work


@kernel()
def store(
    keys: FloatArray,
    values: FloatArray,
    row: IntArray,
    shared_row: IntArray,
    shared: IntArray,
    place: IntArray,
    new_keys: FloatArray,
    new_values: FloatArray,
) -> None:
    """Write T new keys and values, (T, Hkv, D), to their places."""
    tokens, heads, size = new_keys.shape
    for t in range(tokens):
        to, at = row[t], place[t] - shared[t]
        if at < 0:
            to, at = shared_row[t], place[t]
        for h in range(heads):
            for d in range(size):
                keys[to, h, at // BLOCK, d, at % BLOCK] = new_keys[t, h, d]
                values[to, h, at, d] = new_values[t, h, d]


@kernel()
def score(
    keys: FloatArray,
    row: int,
    head: int,
    query: FloatArray,
    scores: FloatArray,
    count: int,
    largest: FloatArray,
) -> None:
    """Set the first `count` scores to `query` (D,) times the row's keys; `largest` (BLOCK,) keeps their maxima."""
    size = query.size
    for block in range((count + BLOCK - 1) // BLOCK):
        lines = keys[row, head, block]
        part = scores[block * BLOCK : min(count, (block + 1) * BLOCK)]
        for j in range(part.size):
            part[j] = query[0] * lines[0, j]
        for d in range(1, size - 3, 4):
            a, b, c, e = query[d], query[d + 1], query[d + 2], query[d + 3]
            for j in range(part.size):
                part[j] += a * lines[d, j] + b * lines[d + 1, j] + c * lines[d + 2, j] + e * lines[d + 3, j]
        for d in range(size - (size - 1) % 4, size):
            for j in range(part.size):
                part[j] += query[d] * lines[d, j]
        for j in range(part.size):
            largest[j] = max(largest[j], part[j])


@kernel()
def score_at(
    keys: FloatArray,
    row: int,
    head: int,
    query: FloatArray,
    scores: FloatArray,
    count: int,
    places: IntArray,
    largest: FloatArray,
) -> None:
    """`score` for keys at `places`, as positions `count` on: in the same order of operations, so to the same bits."""
    size = query.size
    for i in range(places.size):
        block, j = places[i] // BLOCK, places[i] % BLOCK
        total = query[0] * keys[row, head, block, 0, j]
        for d in range(1, size - 3, 4):
            total += (
                query[d] * keys[row, head, block, d, j]
                + query[d + 1] * keys[row, head, block, d + 1, j]
                + query[d + 2] * keys[row, head, block, d + 2, j]
                + query[d + 3] * keys[row, head, block, d + 3, j]
            )
        for d in range(size - (size - 1) % 4, size):
            total += query[d] * keys[row, head, block, d, j]
        scores[count + i] = total
        lane = (count + i) % BLOCK
        largest[lane] = max(largest[lane], total)


@kernel()
def exponentials(
    scores: FloatArray,
    count: int,
    largest: float,
    totals: FloatArray,
    bits: IntArray,
    coefficients: FloatArray,
    shift: int,
    bias: int,
) -> None:
    """Replace the first `count` scores by exp(score - largest) and add them to `totals` (BLOCK,).

    exp(x) = 2**m * 2**f with m whole and |f| <= 1/2; 2**f is a polynomial, 2**m is written as a float's bits (`bits`
    (BLOCK,) is room for integers of the same size). The library's exp would be called number by number, and take most
    of the attention's time.
    """
    kind, whole = scores.dtype.type, bits.dtype.type
    lowest = kind(2 - bias)  # of the exponents that a normal float has
    values, powers = np.empty_like(totals), bits.view(scores.dtype)
    for block in range((count + BLOCK - 1) // BLOCK):
        part = scores[block * BLOCK : min(count, (block + 1) * BLOCK)]
        for j in range(part.size):
            power = max((part[j] - largest) * coefficients[0], lowest)
            exponent = np.floor(power + kind(0.5))
            bits[j] = (whole(exponent) + whole(bias)) << whole(shift)
            part[j] = power - exponent
            values[j] = coefficients[1]
        for c in range(2, coefficients.size):
            coefficient = coefficients[c]
            for j in range(part.size):
                values[j] = values[j] * part[j] + coefficient
        for j in range(part.size):
            part[j] = values[j] * powers[j]
            totals[j] += part[j]


@kernel()
def gather(values: FloatArray, row: int, head: int, weights: FloatArray, count: int, out: FloatArray) -> None:
    """Add the row's first `count` values, weighted by `weights`, to `out` (D,)."""
    whole = count - count % 4
    for j in range(0, whole, 4):
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(out.size):
            out[d] += (
                a * values[row, head, j, d]
                + b * values[row, head, j + 1, d]
                + c * values[row, head, j + 2, d]
                + e * values[row, head, j + 3, d]
            )
    for j in range(whole, count):
        for d in range(out.size):
            out[d] += weights[j] * values[row, head, j, d]


@kernel()
def gather_at(
    values: FloatArray,
    row: int,
    head: int,
    weights: FloatArray,
    count: int,
    places: IntArray,
    out: FloatArray,
) -> None:
    """`gather` of the row's first `count` values and those at `places`, again to the same bits."""
    total = count + places.size
    whole = total - total % 4
    at = np.empty(4, np.int64)
    for j in range(0, whole, 4):
        for k in range(4):
            at[k] = j + k if j + k < count else places[j + k - count]
        for d in range(out.size):
            out[d] += (
                weights[j] * values[row, head, at[0], d]
                + weights[j + 1] * values[row, head, at[1], d]
                + weights[j + 2] * values[row, head, at[2], d]
                + weights[j + 3] * values[row, head, at[3], d]
            )
    for j in range(whole, total):
        where = j if j < count else places[j - count]
        for d in range(out.size):
            out[d] += weights[j] * values[row, head, where, d]


@kernel()
def move(keys: FloatArray, values: FloatArray, row: IntArray, source: IntArray, target: IntArray) -> None:
    """Copy keys and values from offset `source` to `target` of their `row`s, (M,), one after the other."""
    for m in range(row.size):
        for h in range(keys.shape[1]):
            for d in range(keys.shape[3]):
                keys[row[m], h, target[m] // BLOCK, d, target[m] % BLOCK] = keys[
                    row[m], h, source[m] // BLOCK, d, source[m] % BLOCK
                ]
                values[row[m], h, target[m], d] = values[row[m], h, source[m], d]


@kernel()
def write(mixed: FloatArray, totals: FloatArray, out: FloatArray, token: int, head: int) -> None:
    """Set `out` (T, H, D) of one token and head to `mixed` (D,) over the sum of `totals` (BLOCK,)."""
    total = totals[0]
    for j in range(1, BLOCK):
        total += totals[j]
    for d in range(mixed.size):
        out[token, head, d] = mixed[d] / total


@kernel(parallel=True)
def attend(
    keys: FloatArray,
    values: FloatArray,
    row: IntArray,
    shared_row: IntArray,
    shared: IntArray,
    visible: IntArray,
    first_ancestor: IntArray,
    ancestors: IntArray,
    single: IntArray,
    query: FloatArray,
    scale: float,
    exponential: tuple[IntArray, FloatArray, int, int],
    out: FloatArray,
) -> None:
    """Softmax attention of the `single` tokens: query and out (T, H, D), over what `attention.Packing` says."""
    heads, size = keys.shape[1], query.shape[2]
    group = query.shape[1] // heads
    room, coefficients, shift, bias = exponential
    longest = 1
    for i in range(single.size):
        t = single[i]
        longest = max(longest, visible[t] + first_ancestor[t + 1] - first_ancestor[t] + BLOCK)
    # Heads outside, tokens inside: siblings, which are packed together, read their prompt's keys while these
    # are in the cache, and so do the query heads of one key head.
    pieces = min(single.size, PIECES)
    for piece in numba.prange(heads * pieces):
        head = piece // pieces
        begin, end = (piece % pieces) * single.size // pieces, (piece % pieces + 1) * single.size // pieces
        ours, theirs = np.empty(longest, query.dtype), np.empty(longest, query.dtype)
        bits = np.empty(BLOCK, room.dtype)
        blockwise = np.empty(BLOCK, query.dtype)
        scaled, mixed = np.empty(size, query.dtype), np.empty(size, query.dtype)
        for i in range(begin, end):
            t = single[i]
            middle = min(shared[t], visible[t])
            own = visible[t] - middle
            nodes = ancestors[first_ancestor[t] : first_ancestor[t + 1]]
            for h in range(head * group, (head + 1) * group):
                for d in range(size):
                    scaled[d] = query[t, h, d] * scale
                    mixed[d] = 0
                for j in range(BLOCK):
                    blockwise[j] = -np.inf
                score(keys, shared_row[t], head, scaled, theirs, middle, blockwise)
                score(keys, row[t], head, scaled, ours, own, blockwise)
                if nodes.size:
                    score_at(keys, row[t], head, scaled, ours, own, nodes, blockwise)
                largest = blockwise[0]
                for j in range(BLOCK):
                    largest = max(largest, blockwise[j])
                    blockwise[j] = 0
                exponentials(theirs, middle, largest, blockwise, bits, coefficients, shift, bias)
                exponentials(ours, own + nodes.size, largest, blockwise, bits, coefficients, shift, bias)
                gather(values, shared_row[t], head, theirs, middle, mixed)
                if nodes.size:
                    gather_at(values, row[t], head, ours, own, nodes, mixed)
                else:
                    gather(values, row[t], head, ours, own, mixed)
                write(mixed, blockwise, out, t, h)
