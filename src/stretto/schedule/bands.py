"""Bands of predicted length along a line of workers (HistoPipe, RhymeRL, 2508.18588): pure functions.

A batch is cut into bands 1..G of rising length. Odd steps lay them out ascending, even steps descending, so that a
worker with a long band now has a short one next. Its time over two steps is then T_k + T_{G+1-k}, the same for all if T
is affine in k ("linear", as published) or if each such pair is made to add up to the same ("mirrored"): mirror bands
get equally many workers, so that they lie on the same ones, and the pairs' sums are balanced by how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from stretto.records import FloatArray

Tier = Literal["mirrored", "linear", "equal"]


def cut(predicted: Sequence[float], bands: int) -> list[list[int]]:
    """Indexes into `predicted` in `bands` classes of rising values, as even as can be; at most one class per value."""
    order = np.argsort(np.asarray(predicted), kind="stable")
    return [part.tolist() for part in np.array_split(order, min(bands, max(1, order.size)))]


def makespans(lengths: FloatArray, slots: int, workers: int, token_cost: float) -> FloatArray:
    """Predicted time of responses of these `lengths` on 1..`workers` workers, longest first, (W,), never rising.

    In units of an engine step without tokens; each token adds `token_cost` to its step. Steps: the largest of the
    longest response, the mean per slot, and for every k the k+1 shortest of the first k m + 1 responses, of which one
    of m slots has to take so many (Graham's bounds, which longest first comes close to).
    """
    longest_first = np.sort(lengths)[::-1]
    if not longest_first.size:
        return np.zeros(workers)
    total = float(longest_first.sum())
    times = np.empty(workers)
    for count in range(1, workers + 1):
        places = count * slots
        steps = max(float(longest_first[0]), total / places)
        for k in range(1, (longest_first.size - 1) // places + 1):
            steps = max(steps, float(longest_first[k * places - k : k * places + 1].sum()))
        times[count - 1] = steps + token_cost * total / count
    return np.minimum.accumulate(times)


def mirrored_widths(table: FloatArray, workers: int) -> list[int]:
    """Workers of each band, w_g = w_{G+1-g}, at most `workers` in all, with the least largest table[g][w_g] +
    table[G+1-g][w_g]. `table` is (G, W): the band's time on 1..W workers, never rising; G <= `workers`.

    A worker more for the pair that has most, again and again, is optimal: that pair must have more in any better
    allocation. A middle band counts twice, since it lies on the same workers in both steps. What is left over
    when a pair would need two goes to the middle band, if there is one.
    """
    bands = len(table)
    pairs = [(g, bands - 1 - g) for g in range((bands + 1) // 2)]
    widths = [1] * len(pairs)
    cost = [1 if a == b else 2 for a, b in pairs]
    left = workers - bands

    def time(p: int) -> float:
        a, b = pairs[p]
        return float(table[a][widths[p] - 1] + table[b][widths[p] - 1])

    while left:
        most = max(range(len(pairs)), key=lambda p: (time(p), p))
        if cost[most] > left:
            if cost[-1] > left:
                break
            most = len(pairs) - 1
        widths[most] += 1
        left -= cost[most]
    return [widths[min(g, bands - 1 - g)] for g in range(bands)]


def linear_widths(table: FloatArray, workers: int) -> list[int]:
    """Workers of each band so that its time is at most tau + (g-1) D, with the least 2 tau + (G-1) D: a pair's time.

    `table` as for `mirrored_widths`. tau runs over the first band's times, D is bisected over what the other bands'
    times allow. What is left over goes to the longest band.
    """
    bands = len(table)
    best: tuple[float, list[int]] | None = None
    steps = np.arange(1, bands)
    for first in range(1, workers - bands + 2):
        tau = float(table[0][first - 1])
        slopes = np.unique(np.maximum((table[1:] - tau) / steps[:, None], 0.0)) if bands > 1 else np.zeros(1)
        low, high = 0, len(slopes)
        while low < high:
            middle = (low + high) // 2
            fits = sum(_fit(table, first, float(slopes[middle]))) <= workers
            low, high = (low, middle) if fits else (middle + 1, high)
        if low < len(slopes):
            slope = float(slopes[low])
            time = 2 * tau + (bands - 1) * slope
            if best is None or time < best[0]:
                best = (time, _fit(table, first, slope))
    found = best[1] if best is not None else [1] * bands
    found[-1] += workers - sum(found)
    return found


def equal_widths(bands: int, workers: int) -> list[int]:
    """As equal as can be, and mirror bands the same unless an odd number is left over for an even number of bands."""
    share, left = divmod(workers, bands)
    from_middle = sorted(range(bands), key=lambda g: abs(2 * g - bands + 1))
    skipped = bands % 2 and left % 2 == 0  # the middle one stands alone
    more = set(from_middle[skipped : skipped + left])
    return [share + (g in more) for g in range(bands)]


def _fit(table: FloatArray, first: int, slope: float) -> list[int]:
    """The fewest workers for each band with which its time is on the line; W + 1 where W are not enough."""
    bands = [first]
    for g, row in enumerate(table[1:], 1):
        limit = float(table[0][first - 1]) + g * slope
        enough = int(np.searchsorted(-row, -limit * (1 + 1e-9)))
        bands.append(enough + 1)
    return bands


def line(widths: Sequence[int], workers: Sequence[int], step: int) -> list[list[int]]:
    """The workers of each band: at odd steps band after band along the line, at even ones from its other end."""
    bounds = np.cumsum([0, *widths])
    along = list(workers) if step % 2 else list(workers)[::-1]
    return [along[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]


def widths(
    lengths: Sequence[FloatArray], slots: int, workers: int, token_cost: float, tier: Tier
) -> list[int]:
    """Workers of each band, `lengths` being the predicted ones of each band's responses; sums to `workers`."""
    if tier == "equal":
        return equal_widths(len(lengths), workers)
    table = np.array([makespans(band, slots, workers, token_cost) for band in lengths])
    return mirrored_widths(table, workers) if tier == "mirrored" else linear_widths(table, workers)


def number(wanted: int, groups: int, workers: int) -> int:
    """How many bands: no more than groups or workers. Of an odd number of workers one needs a band in the middle."""
    bands = max(1, min(wanted, groups, workers))
    return bands - 1 if workers % 2 and bands % 2 == 0 else bands
