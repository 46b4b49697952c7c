"""Isotonic regression: noise must not turn around what is known to rise."""

from __future__ import annotations

import numpy as np

from stretto.records import FloatArray
from stretto.sampling import kernel


@kernel()
def isotonic(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-decreasing sequence nearest to `values` (K,) in squares weighted by `weights` (K,), all positive.

    Pool adjacent violators (Ayer et al. 1955): neighbours in the wrong order become one block, at its mean.
    """
    means = np.empty(values.size)
    masses = np.empty(values.size)
    ends = np.empty(values.size, np.int64)
    blocks = 0
    for i in range(values.size):
        mean, mass = values[i], weights[i]
        while blocks > 0 and means[blocks - 1] > mean:
            blocks -= 1
            mean = (means[blocks] * masses[blocks] + mean * mass) / (masses[blocks] + mass)
            mass += masses[blocks]
        means[blocks], masses[blocks], ends[blocks] = mean, mass, i + 1
        blocks += 1
    fitted = np.empty(values.size)
    start = 0
    for block in range(blocks):
        fitted[start : ends[block]] = means[block]
        start = ends[block]
    return fitted
