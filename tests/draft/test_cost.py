"""The cost model: what was measured, never cheaper for more tokens, and an error where nothing was."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.draft.cost import CostModel
from stretto.errors import StrettoError

POINTS = st.lists(
    st.tuples(st.integers(1, 300), st.floats(1e-6, 10.0)),
    min_size=2,
    max_size=12,
).filter(lambda points: len({tokens for tokens, _ in points}) > 1)


def fitted(*points: tuple[int, float], per_node: float = 0.0) -> CostModel:
    model = CostModel(per_node)
    model.fit(points)
    return model


def at(model: CostModel, *tokens: int) -> list[float]:
    return [float(seconds) for seconds in model.seconds(np.array(tokens, np.int64))]


class TestCurve:
    def test_goes_through_the_points_and_straight_between_and_beyond(self) -> None:
        model = fitted((2, 1.0), (4, 2.0), (8, 8.0))
        assert at(model, 2, 3, 4, 6, 8, 10) == [1.0, 1.5, 2.0, 5.0, 8.0, 11.0]

    def test_fewer_tokens_than_measured_cost_as_much_as_the_fewest(self) -> None:
        assert at(fitted((4, 1.0), (8, 9.0)), 0, 1, 4) == [1.0, 1.0, 1.0]

    def test_takes_the_median_of_repeated_measurements(self) -> None:
        points = [(1, 5.0), (1, 1.0), (1, 2.0), (9, 10.0), (9, 100.0), (9, 9.0)]
        assert at(fitted(*points), 1, 9) == [2.0, 10.0]

    def test_noise_at_the_end_does_not_make_further_tokens_free(self) -> None:
        """128 measured dearer than 256: pooled, they are a flat last segment."""
        model = fitted((1, 1.0), (128, 4.0), (256, 3.0))
        assert at(model, 256) == [3.5]
        assert at(model, 511) == [pytest.approx(3.5 + 2.5)]  # the whole curve's slope: 2.5 s in 255 tokens

    def test_order_of_tokens_does_not_matter(self) -> None:
        model = fitted((1, 1.0), (2, 4.0), (8, 5.0))
        tokens = [9, 1, 5, 2, 2, 8, 1, 20, 3]
        assert at(model, *tokens) == [at(model, n)[0] for n in tokens]

    @given(POINTS)
    def test_more_tokens_never_cost_less(self, points: list[tuple[int, float]]) -> None:
        seconds = fitted(*points).seconds(np.arange(700))
        assert (np.diff(seconds) >= 0).all()
        assert (seconds > 0).all()
        assert np.isfinite(seconds).all()

    def test_drafted_nodes_cost_their_drafting_too(self) -> None:
        model = fitted((1, 1.0), (3, 3.0), per_node=0.5)
        assert model.seconds(np.array([2, 3]), np.array([0, 1])).tolist() == [2.0, 3.5]
        assert model.seconds(np.array([2, 3]), 2).tolist() == [3.0, 4.0]

    def test_of_no_steps_is_nothing(self) -> None:
        assert at(fitted((1, 1.0), (2, 2.0))) == []


class TestErrors:
    def test_nothing_measured(self) -> None:
        with pytest.raises(StrettoError, match="nothing was measured"):
            CostModel().seconds(np.array([1]))

    @pytest.mark.parametrize("points", [[], [(4, 1.0)], [(4, 1.0), (4, 2.0)]])
    def test_too_little_measured(self, points: list[tuple[int, float]]) -> None:
        with pytest.raises(StrettoError, match="two or more"):
            fitted(*points)

    @pytest.mark.parametrize("bad", [(0, 1.0), (-1, 1.0), (2, 0.0), (2, -1.0), (2, math.nan), (2, math.inf)])
    def test_what_cannot_be(self, bad: tuple[int, float]) -> None:
        model = fitted((1, 1.0), (2, 2.0))
        with pytest.raises(StrettoError, match="cannot be"):
            model.fit([(1, 7.0), bad])
        assert at(model, 1, 2) == [1.0, 2.0]  # as before

    @pytest.mark.parametrize("per_node", [-1e-9, math.nan, math.inf])
    def test_drafting_costs_that_cannot_be(self, per_node: float) -> None:
        with pytest.raises(StrettoError, match="per drafted node"):
            CostModel(per_node)
