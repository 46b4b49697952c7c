"""Pool adjacent violators gives the nearest non-decreasing sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.draft.isotonic import isotonic

POINTS = st.lists(st.tuples(st.integers(-20, 20), st.integers(1, 5)), min_size=1, max_size=8)


@given(POINTS)
def test_is_non_decreasing_and_equals_the_minimax_formula(points: list[tuple[int, int]]) -> None:
    """fitted[i] = max over a <= i of min over b >= i of the weighted mean of a..b (Robertson et al. 1988)."""
    values, weights = np.array(points, np.float64).T.copy()
    fitted = isotonic(values, weights)
    assert (np.diff(fitted) >= 0).all()
    size = values.size
    for i in range(size):
        best = max(
            min(np.average(values[a : b + 1], weights=weights[a : b + 1]) for b in range(i, size))
            for a in range(i + 1)
        )
        assert fitted[i] == pytest.approx(best, abs=1e-12)


def test_leaves_what_rises_as_it_is() -> None:
    values = np.array([0.1, 0.1, 0.3])
    assert isotonic(values, np.ones(3)).tolist() == values.tolist()


def test_of_nothing_is_nothing() -> None:
    assert isotonic(np.empty(0), np.empty(0)).size == 0
