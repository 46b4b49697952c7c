"""Which distribution the rule of prefix reuse makes: enumerated on a few tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from stretto.alternatives import Alternatives
from stretto.history.prefix import keeps, residual
from stretto.records import FloatArray

GRPO = math.exp(0.5)


def distribution(data: st.DataObject, size: int) -> FloatArray:
    weights = np.array(data.draw(st.lists(st.floats(0.01, 1.0), min_size=size, max_size=size)))
    return np.asarray(weights / weights.sum())


def emitted(p: FloatArray, q: FloatArray, lenience: float, alternatives: int | None) -> FloatArray:
    """The distribution of a token that q drew, p kept or rejected, and the residual (or p) then replaced.

    `alternatives`: how many of q's most probable tokens are known; None: as published.
    """
    found = np.zeros(p.size)
    for y in range(p.size):
        accept = min(1.0, lenience * p[y] / q[y])
        found[y] += q[y] * accept
        if accept < 1.0:
            rest = p
            if alternatives is not None:
                ids = np.argsort(-q, kind="stable")[:alternatives].astype(np.int32)
                top = Alternatives(ids[None], np.log(q[ids]).astype(np.float32)[None])
                rest = residual(p, y, math.log(q[y]), top if alternatives else None, lenience)
            found += q[y] * (1.0 - accept) * rest / rest.sum()
    return found


class TestDistribution:
    def test_as_published_it_is_not_the_policys(self) -> None:
        p, q = np.array([0.8, 0.2]), np.array([0.5, 0.5])
        assert emitted(p, q, 1.0, None)[0] == pytest.approx(0.74)
        assert emitted(p, q, 1.0, 8)[0] == pytest.approx(0.8)

    def test_lenience_leans_to_what_was_said(self) -> None:
        p, q = np.array([0.8, 0.2]), np.array([0.5, 0.5])
        assert emitted(p, q, GRPO, None)[0] == pytest.approx(0.5 + 0.5 * (1 - GRPO * 0.4) * 0.8)
        assert emitted(p, q, 2.5, 8)[0] == pytest.approx(0.5)

    @given(st.data(), st.integers(2, 6), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    def test_with_all_of_q_known_the_residual_makes_it_exact(
        self, data: st.DataObject, size: int, lenience: float
    ) -> None:
        p, q = distribution(data, size), distribution(data, size)
        assert np.allclose(emitted(p, q, lenience, size), p, rtol=0, atol=1e-6)  # alternatives are float32

    @given(st.data())
    def test_with_one_token_missing_too(self, data: st.DataObject) -> None:
        p, q = distribution(data, 5), distribution(data, 5)
        assert np.allclose(emitted(p, q, 1.0, 4), p, rtol=0, atol=1e-6)

    @given(st.data(), st.integers(2, 6))
    def test_without_alternatives_it_is_the_policy_without_the_rejected_token(
        self, data: st.DataObject, size: int
    ) -> None:
        p, q = distribution(data, size), distribution(data, size)
        lost = np.maximum(q - p, 0.0)
        others = [sum(lost[y] * p[v] / (1 - p[y]) for y in range(size) if y != v) for v in range(size)]
        assert np.allclose(emitted(p, q, 1.0, 0), np.minimum(p, q) + others, rtol=0, atol=1e-9)

    @given(st.data(), st.integers(3, 8), st.integers(0, 8))
    def test_it_is_off_by_what_the_alternatives_leave_out_at_most(
        self, data: st.DataObject, size: int, alternatives: int
    ) -> None:
        p, q = distribution(data, size), distribution(data, size)
        left = float(np.sort(q)[: max(0, size - alternatives)].sum())
        off = 0.5 * np.abs(emitted(p, q, 1.0, alternatives) - p).sum()
        assert off <= left + 1e-6


class TestRule:
    def test_is_the_ratio_of_probabilities(self) -> None:
        """Shares of 20,000 within 5 standard errors: fails once in a million."""
        positions = np.arange(20_000)
        for now, then, lenience in ((0.2, 0.5, 1.0), (0.2, 0.5, GRPO), (0.4, 0.1, 0.2), (0.4, 0.1, 1.0)):
            logs = [np.full(positions.size, math.log(value)) for value in (now, then)]
            share = keeps(5, positions, logs[0], logs[1], lenience).mean()
            expected = min(1.0, lenience * now / then)
            assert abs(share - expected) <= 5 * math.sqrt(expected * (1 - expected) / positions.size)

    def test_its_uniforms_are_uniform(self) -> None:
        """Found back by bisection; Kolmogorov-Smirnov at 1e-6."""
        positions = np.arange(3_000)
        low, high = np.zeros(positions.size), np.ones(positions.size)
        for _ in range(20):
            middle = (low + high) / 2
            kept = keeps(9, positions, np.log(middle), np.zeros(positions.size), 1.0)
            low, high = np.where(kept, low, middle), np.where(kept, middle, high)
        assert kstest(high, "uniform").pvalue > 1e-6

    def test_nothing_is_kept_with_lenience_0_or_what_has_become_impossible(self) -> None:
        logs = np.zeros(4)
        assert not keeps(1, np.arange(4), logs, logs, 0.0).any()
        assert not keeps(1, np.arange(4), logs - np.inf, logs, 1e9).any()
        assert keeps(1, np.arange(4), logs, logs, 1.0).all()

    def test_the_logs_precision_decides_alike(self) -> None:
        draw = np.random.default_rng(0)
        now, then = -draw.exponential(size=(2, 5_000))
        stored = then.astype(np.float32).astype(np.float64)
        positions = np.arange(now.size)
        assert (keeps(3, positions, now, then, 1.0) == keeps(3, positions, now, stored, 1.0)).all()
