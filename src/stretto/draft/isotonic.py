"""Isotonic regression: noise must not turn around what is known to rise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stretto.records import FloatArray, IntArray
from stretto.sampling import kernel


class Blocks(NamedTuple):
    """Room for as many blocks as there are values."""

    means: FloatArray
    masses: FloatArray
    ends: IntArray


@kernel(inline=True)
def room_for_blocks(size: int) -> Blocks:
    """For so many values."""
    return Blocks(np.empty(size), np.empty(size), np.empty(size, np.int64))


@kernel(inline=True)
def pool_adjacent(values: FloatArray, weights: FloatArray, room: Blocks) -> None:
    """`isotonic`, in place."""
    means, masses, ends = room
    blocks = 0
    for i in range(values.size):
        mean, mass = values[i], weights[i]
        while blocks > 0 and means[blocks - 1] > mean:
            blocks -= 1
            mean = (means[blocks] * masses[blocks] + mean * mass) / (masses[blocks] + mass)
            mass += masses[blocks]
        means[blocks], masses[blocks], ends[blocks] = mean, mass, i + 1
        blocks += 1
    start = 0
    for block in range(blocks):
        for i in range(start, ends[block]):
            values[i] = means[block]
        start = ends[block]


@kernel()
def isotonic(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-decreasing sequence nearest to `values` (K,) in squares weighted by `weights` (K,), all positive.

    Pool adjacent violators (Ayer et al. 1955): neighbours in the wrong order become one block, at its mean.
    """
    fitted = values.copy()
    pool_adjacent(fitted, weights, room_for_blocks(values.size))
    return fitted
