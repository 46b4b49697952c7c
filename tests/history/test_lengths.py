"""Length prediction: by history, by prompt, by siblings; survival; and how good it was."""

from __future__ import annotations

from math import inf, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stretto.history.lengths import RECENT, Ended, LengthHistory, rank_correlation, tail_recall
from stretto.records import FinishReason, Prompt, Rollout


def prompt(name: str, tokens: int = 10) -> Prompt:
    return Prompt(0, name, 0, np.zeros(tokens, np.int64), {})


def ended(
    name: str, lengths: list[int], visit: int = 0, tokens: int = 10, capped: bool = False
) -> list[Ended]:
    return [Ended(prompt(name, tokens), visit, length, capped) for length in lengths]


def history(*observations: list[Ended], window: int = 2) -> LengthHistory:
    known = LengthHistory(window)
    for observation in observations:
        known.observe_lengths(observation)
    return known


def predicted(known: LengthHistory, name: str, tokens: int = 10, siblings: tuple[int, ...] = ()) -> float:
    value = known.predict(prompt(name, tokens), siblings)
    assert value is not None
    return value


lengths = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


class TestPrediction:
    def test_nothing_is_known_at_first(self) -> None:
        assert LengthHistory().predict(prompt("a")) is None
        assert LengthHistory().quantile(prompt("a"), 0.5) is None
        assert LengthHistory().p_long(prompt("a"), 10, 20) == 0.5

    def test_siblings_alone_are_better_than_nothing(self) -> None:
        assert LengthHistory().predict(prompt("a"), [100, 100]) == pytest.approx(100)

    @given(lengths)
    def test_prompts_that_were_longer_are_predicted_longer(self, base: list[int]) -> None:
        known = history(ended("short", base), ended("long", [2 * x + 10 for x in base]))
        assert predicted(known, "short") < predicted(known, "new") < predicted(known, "long")

    @given(lengths, st.integers(1, 5000))
    def test_siblings_move_it_towards_them(self, base: list[int], sibling: int) -> None:
        known = history(ended("a", base), ended("b", [100, 1000]))
        plain = known.predict(prompt("a"))
        assert plain is not None
        # Where the prediction's median lies between prior and sibling, another equal sibling moves it on.
        once, often = (predicted(known, "a", siblings=(sibling,) * n) for n in (1, 5))
        assert abs(log(often) - log(once)) <= abs(log(often) - log(plain)) + 1e-9

    def test_with_much_history_it_is_near_its_mean(self) -> None:
        rng = np.random.default_rng(0)
        parts = [ended(str(i), rng.lognormal(5 + i / 5, 0.3, 400).astype(int).tolist()) for i in range(10)]
        known = history(*parts)
        for i, part in enumerate(parts):
            assert predicted(known, str(i)) == pytest.approx(np.mean([p.length for p in part]), rel=0.1)

    def test_a_new_prompt_is_predicted_by_its_length(self) -> None:
        rng = np.random.default_rng(1)
        known = LengthHistory()
        for i in range(300):
            tokens = int(rng.integers(5, 500))
            known.observe_lengths(ended(str(i), [int(3 * tokens * rng.lognormal(0, 0.2))], tokens=tokens))
        assert predicted(known, "new", 20) < 0.3 * predicted(known, "other", 400)
        assert predicted(known, "new", 200) == pytest.approx(600, rel=0.2)

    def test_responses_to_a_prompt_spread_around_it(self) -> None:
        rng = np.random.default_rng(5)
        known = LengthHistory()
        assert known.spread(3).tolist() == [1.0, 1.0, 1.0]
        for i in range(200):
            lengths = rng.lognormal(rng.normal(6, 1), 0.5, 8).astype(int).tolist()
            known.observe_lengths(ended(str(i), lengths))
        factors = known.spread(200)
        assert factors.mean() == pytest.approx(1, rel=0.02)
        assert np.log(factors).std() == pytest.approx(0.5, rel=0.1)
        assert (np.diff(factors) > 0).all()

    def test_only_the_newest_visits_count(self) -> None:
        known = history(*[ended("a", [10 * 10**visit], visit) for visit in range(4)], window=1)
        assert known.quantile(prompt("a"), 0.0) == 10_000
        known.observe_lengths(ended("a", [1], visit=0))  # a straggler of long ago
        assert known.quantile(prompt("a"), 1.0) == 10_000

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 300), st.booleans())))
    def test_anything_can_be_observed_in_any_order(self, seen: list[tuple[str, int, int, bool]]) -> None:
        known = LengthHistory()
        every = [Ended(prompt(name), visit, length, capped) for name, visit, length, capped in seen]
        known.observe_lengths(every[: len(every) // 2])
        for one in every[len(every) // 2 :]:
            known.observe_lengths([one])
        for name in "abc":
            assert (known.predict(prompt(name)) is None) == (not seen)
            assert (known.quantile(prompt(name), 0.5) is None) == (name not in {s[0] for s in seen})
        for value in known.metrics().values():
            assert -1 <= value <= 1


class TestQuantilesAndSurvival:
    @given(lengths, st.floats(0.01, 1.0))
    def test_a_share_q_is_not_beyond_the_quantile(self, seen: list[int], q: float) -> None:
        value = history(ended("a", seen)).quantile(prompt("a"), q)
        assert value in seen
        below = sum(x <= value for x in seen) / len(seen)
        assert below >= q - 1e-9
        assert sum(x < value for x in seen) / len(seen) < q

    def test_what_was_cut_off_has_no_quantile(self) -> None:
        known = history(ended("a", [10]), ended("a", [100], capped=True))
        assert known.quantile(prompt("a"), 0.95) == inf
        assert known.p_long(prompt("a"), 50, 10_000) == 1.0, "the only survivor went on for ever"

    def test_is_the_share_of_survivors(self) -> None:
        known = history(ended("a", [10, 20, 30, 40]))
        assert known.p_long(prompt("new"), 15, 30) == pytest.approx(2 / 3)
        assert known.p_long(prompt("a"), 15, 30) == pytest.approx((2 + 2 / 3) / 4)
        assert known.p_long(prompt("a"), 40, 50) == 0.5
        assert known.p_long(prompt("a"), 30, 30) == 1.0

    @given(lengths, st.integers(0, 5000), st.integers(1, 5000))
    def test_grows_with_what_has_been_generated(self, seen: list[int], so_far: int, threshold: int) -> None:
        known = history(ended("b", seen))
        chances = [known.p_long(prompt("a"), n, threshold) for n in range(0, so_far, 500) if n < max(seen)]
        assert chances == sorted(chances)
        assert all(0 <= chance <= 1 for chance in chances)

    def test_forgets_all_but_the_recent(self) -> None:
        known = history(ended("a", [1] * 10), ended("b", [9] * RECENT))
        assert known.p_long(prompt("new"), 0, 5) == 1.0


class TestMetrics:
    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=3, max_size=30))
    def test_rank_correlation_is_spearmans(self, pairs: list[tuple[int, int]]) -> None:
        a, b = (np.array(side, np.float64) for side in zip(*pairs, strict=True))
        if np.ptp(a) and np.ptp(b):
            assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
        else:
            assert rank_correlation(a, b) == 0.0

    def test_tail_recall_counts_the_longest_fifth(self) -> None:
        actual = np.arange(20.0)
        assert tail_recall(actual, actual) == 1.0
        assert tail_recall(-actual, actual) == 0.0
        assert tail_recall(np.where(actual == 19, -1, actual), actual) == 0.75

    def test_predictions_are_judged_by_what_was_known_before(self) -> None:
        known = history(ended("a", [10, 12]) + ended("b", [100, 90]) + ended("c", [50, 52]))
        assert known.metrics() == {}, "nothing was predicted at the first visit"
        known.observe_lengths([*ended("a", [1000], 1), *ended("b", [10], 1), *ended("c", [100], 1)])
        assert known.metrics()["lengths/rank_correlation"] == pytest.approx(-1.0)
        assert known.metrics() == {}, "each is judged once"


def test_is_rebuilt_from_the_log() -> None:
    rng = np.random.default_rng(2)
    rollouts = []
    for i in range(40):
        n = int(rng.integers(1, 60))
        columns = np.zeros(n, np.int64), np.zeros(n), np.zeros(n), np.zeros(n, np.int64), np.ones(n, np.bool_)
        rollout = Rollout(i, i, prompt(f"{i % 5}", 5 + i % 5), 0, i // 20, 0, *columns)
        rollout.finish_reason = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.NONE)[i % 3]
        rollouts.append(rollout)
    one, other = LengthHistory(), LengthHistory()
    for rollout in rollouts:
        one.observe([rollout])
    other.observe(rollouts)
    for i in range(6):
        assert one.predict(prompt(f"{i}", 7)) == other.predict(prompt(f"{i}", 7))
        assert one.quantile(prompt(f"{i}"), 0.7) == other.quantile(prompt(f"{i}"), 0.7)
