"""Calibration: a line until it knows better, the truth when it does, and rising throughout."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.draft import SOURCES
from stretto.draft.calibration import (
    DEPTHS,
    IDLE,
    ROWS,
    TRUST,
    WORTH,
    Calibration,
    calibrated,
    depth_bucket,
)
from stretto.errors import StrettoError
from stretto.records import FloatArray

Outcome = tuple[float, int, int, bool, bool]  # raw, source, depth, reached, accepted
TESTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0.0, 1.0),
        st.integers(0, len(SOURCES) - 1),
        st.integers(1, 12),
        st.booleans(),
        st.booleans(),
    ),
    max_size=40,
)
GRID = np.linspace(0.0, 1.0, 501)


def learn(calibration: Calibration, tests: list[Outcome]) -> None:
    raw, sources, depth, reached, accepted = zip(*tests, strict=True) if tests else ((),) * 5
    calibration.learn(
        np.array(raw, np.float64),
        np.array(sources, np.int8),
        np.array(depth, np.int64),
        np.array(reached, np.bool_),
        np.array(accepted, np.bool_),
    )


def curve(calibration: Calibration, raw: FloatArray, source: int = 0, depth: int = 1) -> FloatArray:
    bucket = depth_bucket(depth)
    return np.array([calibrated(calibration.table, value, source, bucket) for value in raw.tolist()])


def draw(truth: Callable[[FloatArray], FloatArray], count: int, seed: int) -> list[Outcome]:
    """`count` tests of nodes whose raw estimates fill the bins evenly, accepted with probability truth(raw)."""
    random = np.random.default_rng(seed)
    raw = 1.0 / (1.0 + np.exp(-random.uniform(-6.0, 6.0, count)))
    accepted = random.random(count) < truth(raw)
    return [(r, 0, 1, True, a) for r, a in zip(raw.tolist(), accepted.tolist(), strict=True)]


class TestMap:
    def test_trusts_history_more_than_what_is_in_flight_before_anything_is_known(self) -> None:
        for row, name in enumerate(ROWS):
            worth = {"history": 0.8, "dropped": 1.0}.get(name, 0.6)
            for depth in (1, 2, 4, 8, 100):
                values = curve(Calibration(), GRID, row, depth)
                np.testing.assert_allclose(values, worth * GRID, rtol=0, atol=1e-15)

    @given(TESTS)
    def test_rises_and_stays_within_0_and_1_whatever_was_learnt(self, tests: list[Outcome]) -> None:
        calibration = Calibration(half_life=5.0)
        learn(calibration, tests)
        for source in range(len(SOURCES)):
            for depth in (1, 2, 3, 5, 9):
                values = curve(calibration, GRID, source, depth)
                assert (np.diff(values) >= 0).all()
                assert values[0] >= 0.0
                assert values[-1] <= 1.0

    @pytest.mark.parametrize(
        "truth",
        [lambda raw: raw**2, np.sqrt, lambda raw: 0.1 + 0.6 * raw, lambda raw: np.full_like(raw, 0.3)],
        ids=["optimist", "pessimist", "linear", "constant"],
    )
    def test_converges_to_the_truth(self, truth: Callable[[FloatArray], FloatArray]) -> None:
        """Each of the 12 bins has over 9,000 tests: Hoeffding's bound on an error over 0.03 of its share is 1.9e-7 a
        bin, so chance fails this test less than once in 100,000 runs over all bins and truths. Beside it 0.02 for
        linear interpolation between knots, and for the prior.
        """
        calibration = Calibration(half_life=1e12)
        learn(calibration, draw(truth, 120_000, seed=1))
        raw = np.linspace(0.01, 0.99, 99)
        assert np.abs(curve(calibration, raw) - truth(raw)).max() < 0.05

    def test_certainty_that_is_wrong_is_found_out(self) -> None:
        """Up to the priors of the bins between, which say otherwise and are pooled with the tests."""
        calibration = Calibration()
        learn(calibration, [(1.0, 0, 1, True, i % 2 == 0) for i in range(2_000)])
        learn(calibration, [(0.0, 1, 1, True, i % 2 == 0) for i in range(2_000)])
        assert curve(calibration, np.ones(1), source=0)[0] == pytest.approx(0.5, abs=0.02)
        assert curve(calibration, np.zeros(1), source=1)[0] == pytest.approx(0.5, abs=0.02)

    def test_prior_weighs_ten_tests(self) -> None:
        """The bin from 0.5 to 0.73: its knot is the mean of ten tests and of ten at its centre, in both directions."""
        calibration = Calibration(half_life=1e15)
        learn(calibration, [(0.5, 0, 1, True, i < 6) for i in range(10)])
        centre = (0.5 + 1 / (1 + np.exp(-1.0))) / 2
        knot = np.array([(0.5 + centre) / 2])
        assert curve(calibration, knot)[0] == pytest.approx((0.6 + centre) / 2)
        assert curve(calibration, np.array([0.1]))[0] == pytest.approx(0.1)

    def test_sources_are_separate_and_their_depths_inform_each_other(self) -> None:
        """A source that is wrong at one depth is trusted less at all, by the same share: a line through 0."""
        calibration = Calibration()
        learn(calibration, [(0.9, 1, 3, True, False)] * 500)
        assert curve(calibration, np.array([0.9]), source=1, depth=4)[0] < 0.1
        for source, depth in ((0, 3), (2, 3)):
            assert curve(calibration, np.array([0.9]), source, depth)[0] == pytest.approx(0.9 * WORTH[source])
        left = TRUST * WORTH[1] / (500 * 0.9 + TRUST)
        for depth in (1, 2, 5, 9):
            np.testing.assert_allclose(curve(calibration, GRID, 1, depth), left * GRID, rtol=0, atol=1e-12)

    def test_a_useless_source_is_found_out_in_ten_tests_at_all_depths_and_estimates(self) -> None:
        calibration = Calibration()
        learn(calibration, [(1.0, 0, 1, True, False)] * 10)
        for depth in (2, 4, 8, 100):
            assert (curve(calibration, GRID, 0, depth) <= 0.19 * GRID).all()

    def test_what_was_right_beyond_its_estimates_is_not_trusted_beyond_them_elsewhere(self) -> None:
        calibration = Calibration()
        learn(calibration, [(0.2, 0, 1, True, True)] * 100)
        np.testing.assert_allclose(curve(calibration, GRID, 0, depth=2), GRID, rtol=0, atol=1e-12)

    def test_depth_buckets(self) -> None:
        names = [DEPTHS[depth_bucket(depth)] for depth in (1, 2, 3, 4, 5, 8, 9, 1000)]
        assert names == ["1", "2", "3-4", "3-4", "5-8", "5-8", "9+", "9+"]

    @given(TESTS, st.floats(-0.5, 0.0) | st.floats(1.0, 1.5))
    def test_what_is_outside_0_and_1_counts_as_the_nearer_end(self, tests: list[Outcome], raw: float) -> None:
        calibration = Calibration()
        learn(calibration, tests)
        for source in range(len(SOURCES)):
            expected = curve(calibration, np.array([min(max(raw, 0.0), 1.0)]), source, 7)[0]
            assert calibrated(calibration.table, raw, source, depth_bucket(7)) == expected


class TestLearning:
    def test_only_reached_nodes_count(self) -> None:
        calibration, untouched = Calibration(), Calibration()
        learn(calibration, [(0.7, 0, 1, False, False)] * 50)
        assert calibration.state_dict() == untouched.state_dict()
        assert calibration.metrics() == {}

    def test_a_test_counts_half_after_half_life_further_steps(self) -> None:
        """All accepted for long, then as many rejected as the half-life: half of the weight is old."""
        calibration = Calibration(half_life=50.0)
        for step in range(1_050):
            learn(calibration, [(0.5, 0, 1, True, step < 1_000)])
        tested, estimated, accepted = np.array(calibration.state_dict()["counts"])[0, 0].sum(axis=0)
        assert tested == pytest.approx(1.0 / (1.0 - 0.5**0.02), rel=1e-5)  # of a bin that was tested for ever
        assert estimated == pytest.approx(0.5 * tested)
        assert accepted == pytest.approx(0.5 * tested, rel=1e-5)

    @given(TESTS, st.integers(0, 3 * IDLE), TESTS.filter(bool))
    def test_steps_without_tests_age_what_was_learnt_too(
        self, before: list[Outcome], idle: int, after: list[Outcome]
    ) -> None:
        alone, both = Calibration(half_life=20.0), Calibration(half_life=20.0)
        learn(both, before)
        first = np.array(both.state_dict()["counts"])
        table = both.table
        for _ in range(idle):
            learn(both, [])
        learn(both, after)
        learn(alone, after)
        expected = first * 0.5 ** ((idle + 1 + (not before)) / 20.0) + np.array(alone.state_dict()["counts"])
        np.testing.assert_allclose(np.array(both.state_dict()["counts"]), expected, rtol=0, atol=1e-12)
        assert table is both.table

    def test_what_was_given_up_is_trusted_again_after_a_while_without_tests(self) -> None:
        calibration = Calibration()
        learn(calibration, [(0.9, 0, 1, True, False)] * 1_000)
        values = []
        for _ in range(15):
            values.append(curve(calibration, np.array([0.9]))[0])
            for _ in range(256):
                learn(calibration, [])
        assert (np.diff(values) > 0).all()
        assert values[0] < 0.01
        assert values[-1] > 0.9 * 0.9 * WORTH[0]

    @given(TESTS, TESTS)
    def test_state_is_exact(self, before: list[Outcome], after: list[Outcome]) -> None:
        calibration, copy = Calibration(), Calibration()
        learn(calibration, before)
        copy.load_state_dict(json.loads(json.dumps(calibration.state_dict())))
        assert copy.table.tolist() == calibration.table.tolist()
        learn(calibration, after)
        learn(copy, after)
        assert copy.state_dict() == calibration.state_dict()
        assert copy.metrics() == calibration.metrics()

    def test_state_of_other_bins_is_refused_and_changes_nothing(self) -> None:
        calibration = Calibration()
        learn(calibration, [(0.7, 0, 1, True, True)])
        before = calibration.state_dict()
        with pytest.raises(StrettoError, match=r"stored tally have shape \(3, 11, 3\)"):
            calibration.load_state_dict({"counts": before["counts"], "tally": np.zeros((3, 11, 3)).tolist()})
        assert calibration.state_dict() == before


class TestMetrics:
    def test_error_is_the_distance_of_predicted_from_observed(self) -> None:
        """Without learning in between: 0.24 predicted of a source, 0.5 observed; 0.48 of another, 0.8 observed."""
        calibration = Calibration()
        tests = [(0.3, 0, 1, True, i < 5) for i in range(10)] + [(0.8, 1, 1, True, i < 8) for i in range(10)]
        learn(calibration, tests)
        found = calibration.metrics()
        assert found == pytest.approx(
            {
                "spec/calibration/error": 0.29,
                "spec/calibration/predicted": 0.36,
                "spec/calibration/observed": 0.65,
                "spec/calibration/error/history": 0.26,
                "spec/calibration/predicted/history": 0.24,
                "spec/calibration/observed/history": 0.5,
                "spec/calibration/error/siblings": 0.32,
                "spec/calibration/predicted/siblings": 0.48,
                "spec/calibration/observed/siblings": 0.8,
            },
            abs=1e-12,
        )
        assert calibration.metrics() == {}

    def test_opposite_errors_of_different_bins_do_not_cancel(self) -> None:
        calibration = Calibration()
        learn(calibration, [(0.2, 0, 1, True, True)] * 10 + [(0.8, 0, 1, True, False)] * 10)
        assert calibration.metrics()["spec/calibration/error"] == pytest.approx(0.74)

    def test_error_vanishes_once_learnt(self) -> None:
        """Over 40 other seeds it was 0.0068 afterwards, standard deviation 0.0014: 0.03 is 16 of them away."""
        calibration = Calibration(half_life=1e12)
        outcomes = draw(lambda raw: raw**3, 80_000, seed=2)
        learn(calibration, outcomes[:60_000])
        assert calibration.metrics()["spec/calibration/error"] > 0.1
        learn(calibration, outcomes[60_000:])
        assert calibration.metrics()["spec/calibration/error"] < 0.03


def test_no_nodes() -> None:
    calibration = Calibration()
    learn(calibration, [])
    assert curve(calibration, np.empty(0)).size == 0


@pytest.mark.parametrize("short", range(5))
def test_arrays_of_other_lengths_are_refused(short: int) -> None:
    """The kernel, which checks no bounds, would read what lies behind the shorter ones."""
    calibration = Calibration()
    before = json.dumps(calibration.state_dict())
    kinds = (np.float64, np.int8, np.int64, np.bool_, np.bool_)
    arrays: list[Any] = [np.ones(2 if i == short else 3, kind) for i, kind in enumerate(kinds)]
    with pytest.raises(ValueError, match="calibration: arrays of .*2.* nodes are not of one step"):
        calibration.learn(*arrays)
    assert json.dumps(calibration.state_dict()) == before
