"""Bands, and how many workers each has."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.records import FloatArray
from stretto.schedule.bands import (
    Tier,
    cut,
    equal_widths,
    line,
    linear_widths,
    makespans,
    mirrored_widths,
    number,
    widths,
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[FloatArray, int]:
    """Times of 2-5 bands on 1..W workers, never rising in the number of workers; mostly rising in the band."""
    bands = draw(st.integers(2, 5))
    workers = draw(st.integers(bands, 9))
    if workers % 2 and bands % 2 == 0:
        workers += 1
    values = draw(st.lists(st.integers(1, 60), min_size=bands * workers, max_size=bands * workers))
    table = np.minimum.accumulate(np.array(values, np.float64).reshape(bands, workers), axis=1)
    return table, workers


def allocations(bands: int, workers: int) -> list[tuple[int, ...]]:
    return [w for w in itertools.product(range(1, workers + 1), repeat=bands) if sum(w) <= workers]


def longest_pair(table: FloatArray, chosen: tuple[int, ...] | list[int]) -> float:
    times = [row[w - 1] for row, w in zip(table, chosen, strict=True)]
    return max(float(a + b) for a, b in zip(times, times[::-1], strict=True))


class TestMirrored:
    @given(tables())
    def test_no_mirrored_allocation_is_better(self, case: tuple[FloatArray, int]) -> None:
        table, workers = case
        found = mirrored_widths(table, workers)
        assert found == found[::-1]
        assert sum(found) == workers
        mirrored = [w for w in allocations(len(table), workers) if w == w[::-1]]
        assert longest_pair(table, found) == min(longest_pair(table, w) for w in mirrored)

    def test_a_long_pair_gets_more(self) -> None:
        times = [1.0, 2.0, 3.0, 20.0]
        table = np.array([[t / w for w in range(1, 9)] for t in times])
        assert mirrored_widths(table, 8) == [3, 1, 1, 3]

    def test_mirror_bands_lie_on_the_same_workers(self) -> None:
        chosen = [3, 1, 1, 3]
        odd, even = line(chosen, range(8), 1), line(chosen, range(8), 2)
        assert [sorted(part) for part in even] == [sorted(part) for part in odd[::-1]]


@given(st.integers(1, 9), st.integers(0, 30))
def test_equal_widths_use_all_workers_and_differ_by_one_at_most(bands: int, more: int) -> None:
    found = equal_widths(bands, bands + more)
    assert (len(found), sum(found)) == (bands, bands + more)
    assert max(found) - min(found) <= 1
    if bands % 2 or more % bands % 2 == 0:
        assert found == found[::-1]


class TestLinear:
    @given(tables())
    def test_no_line_is_lower(self, case: tuple[FloatArray, int]) -> None:
        table, workers = case
        bands = len(table)
        found = linear_widths(table, workers)
        assert sum(found) == workers
        assert min(found) >= 1

        def pair(chosen: tuple[int, ...] | list[int]) -> float:
            times = [row[w - 1] for row, w in zip(table, chosen, strict=True)]
            slope = max((t - times[0]) / g for g, t in enumerate(times[1:], 1))
            return float(2 * times[0] + (bands - 1) * max(slope, 0.0))

        assert pair(found) <= min(pair(w) for w in allocations(bands, workers)) * (1 + 1e-6)

    def test_an_affine_curve_is_kept(self) -> None:
        """Two workers bring each band down to the line 4, 6, 8, 10."""
        table = np.array([[4.0, 4.0, 4, 4, 4], [6.0, 5, 5, 5, 5], [20.0, 8, 8, 8, 8], [30.0, 10, 10, 10, 10]])
        assert linear_widths(table, 6) == [1, 1, 2, 2]


class TestLine:
    def test_odd_steps_ascend_and_even_steps_descend(self) -> None:
        assert line([1, 2, 3], range(6), 1) == [[0], [1, 2], [3, 4, 5]]
        assert line([1, 2, 3], range(6), 2) == [[5], [4, 3], [2, 1, 0]]

    def test_two_steps_add_up_to_the_same_on_every_worker(self) -> None:
        time = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}  # affine in the band
        total = dict.fromkeys(range(4), 0.0)
        for step in (1, 2):
            for band, workers in enumerate(line([1, 1, 1, 1], range(4), step)):
                for worker in workers:
                    total[worker] += time[band]
        assert set(total.values()) == {5.0}


class TestCut:
    @given(st.lists(st.floats(1, 1e4), min_size=1, max_size=50), st.integers(1, 12))
    def test_bands_rise_and_hold_everything_once(self, predicted: list[float], bands: int) -> None:
        found = cut(predicted, bands)
        assert sorted(i for band in found for i in band) == list(range(len(predicted)))
        values = [predicted[i] for band in found for i in band]
        assert values == sorted(values)
        sizes = [len(band) for band in found]
        assert max(sizes) - min(sizes) <= 1
        assert len(found) == min(bands, len(predicted))


class TestMakespans:
    @given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 5))
    def test_are_near_longest_first(self, lengths: list[int], slots: int, workers: int) -> None:
        """A lower bound of any order, within Graham's 4/3 of longest first."""
        times = makespans(np.array(lengths, np.float64), slots, workers, 0.0)
        assert (np.diff(times) <= 0).all()
        for count, time in enumerate(times, 1):
            ends = [0] * (count * slots)
            for length in sorted(lengths, reverse=True):
                heapq.heappush(ends, heapq.heappop(ends) + length)
            assert time <= max(ends) * (1 + 1e-9)
            assert max(ends) <= 4 / 3 * time * (1 + 1e-9)

    def test_equal_lengths_come_in_waves(self) -> None:
        assert makespans(np.full(9, 10.0), 2, 3, 0.0).tolist() == [50.0, 30.0, 20.0]

    def test_tokens_cost_time_too(self) -> None:
        assert makespans(np.full(4, 10.0), 4, 2, 0.1).tolist() == [14.0, 12.0]

    def test_of_nothing_is_nothing(self) -> None:
        assert makespans(np.zeros(0), 2, 2, 0.1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("wanted", "groups", "workers", "bands"),
    [
        (8, 100, 32, 8),
        (8, 100, 33, 7),
        (8, 3, 32, 3),
        (8, 100, 1, 1),
        (8, 100, 2, 2),
        (8, 2, 3, 1),
        (5, 9, 4, 4),
    ],
)
def test_number_of_bands(wanted: int, groups: int, workers: int, bands: int) -> None:
    assert number(wanted, groups, workers) == bands


@pytest.mark.parametrize(("sigma", "bands"), [(0.8, 8), (1.2, 8), (0.8, 16)])
def test_the_published_line_leaves_a_bubble_that_mirrored_widths_do_not(sigma: float, bands: int) -> None:
    """4,096 lognormal lengths, known beforehand, on 32 workers of 64 slots: two steps against two whole ones."""
    rng = np.random.default_rng(3)
    lengths = np.sort(np.minimum(rng.lognormal(6, sigma, 4096), 16_000))
    parts = [np.array(part) for part in np.array_split(lengths, bands)]
    table = np.array([makespans(part, 64, 32, 0.01) for part in parts])
    synchronous = 2 * makespans(lengths, 64, 32, 0.01)[-1]
    speedup = {}
    tiers: tuple[Tier, ...] = ("mirrored", "linear")
    for tier in tiers:
        chosen = widths(parts, 64, 32, 0.01, tier)
        times = np.zeros(32)
        for step in (1, 2):
            for row, width, workers in zip(table, chosen, line(chosen, range(32), step), strict=True):
                times[workers] += row[width - 1]
        speedup[tier] = synchronous / times.max()
    assert speedup["mirrored"] > 1.7
    assert speedup["mirrored"] > 1.1 * speedup["linear"]
