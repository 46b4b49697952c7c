"""The published rules do what their papers say, transcript by transcript."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.draft import Drafts, Verified
from stretto.draft.budget import Batch
from stretto.draft.cost import CostModel
from stretto.draft.published import Aimd, LengthClass, Marginal
from stretto.errors import StrettoError
from stretto.records import BoolArray
from tests.draft.trees import accept, forest, paths


def batch(generated: list[int], tokens: int = 1) -> Batch:
    return Batch(np.arange(len(generated)), np.array(generated, np.int64), tokens)


def kept(trees: Drafts, keep: BoolArray) -> list[int]:
    owners = np.repeat(np.arange(trees.counts.size), trees.counts)
    return [int(count) for count in np.bincount(owners[keep], minlength=trees.counts.size)]


class TestAimd:
    def windows(self, variant: str, steps: Iterable[tuple[int, int]]) -> list[int]:
        """The window before each step of (nodes available, levels that would be accepted), and after the last."""
        rule, found = Aimd(variant), []
        rule.begin(0)
        for available, accepted in steps:
            trees, wide = paths(available), paths(40)
            found += kept(wide, rule.choose(wide, batch([0])))
            chosen = trees.select(rule.choose(trees, batch([0])))
            rule.learn(chosen, accept(chosen, min(accepted, int(chosen.counts[0]))), np.array([0]))
        return [*found, *kept(paths(40), rule.choose(paths(40), batch([0])))]

    def test_adds_two_on_full_acceptance_and_starts_again_on_any_rejection(self) -> None:
        steps = [(40, 40), (40, 40), (40, 40), (40, 7), (40, 40), (40, 0)]
        assert self.windows("additive", steps) == [2, 4, 6, 8, 2, 4, 2]

    def test_stops_at_32(self) -> None:
        assert self.windows("additive", [(40, 40)] * 20)[-6:] == [32] * 6

    def test_released_variant_doubles_and_halves_between_2_and_16(self) -> None:
        steps = [(40, 40), (40, 40), (40, 40), (40, 40), (40, 15), (40, 0), (40, 0), (40, 0)]
        assert self.windows("multiplicative", steps) == [2, 4, 8, 16, 16, 8, 4, 2, 2]

    @pytest.mark.parametrize(("variant", "after"), [("additive", 6), ("multiplicative", 8)])
    def test_a_short_draft_that_was_accepted_is_no_rejection(self, variant: str, after: int) -> None:
        assert self.windows(variant, [(40, 40), (1, 1)]) == [2, 4, after]

    @pytest.mark.parametrize("variant", ["additive", "multiplicative"])
    def test_no_draft_changes_nothing(self, variant: str) -> None:
        assert self.windows(variant, [(40, 40), (0, 0), (0, 0)]) == [2, 4, 4, 4]

    @given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30))
    def test_follows_the_rule_on_any_transcript(self, steps: list[tuple[int, int]]) -> None:
        expected = [2]
        for available, accepted in steps:
            window = expected[-1]
            proposed = min(available, window)
            if proposed == 0:
                expected.append(window)
            else:
                expected.append(min(window + 2, 32) if accepted >= proposed else 2)
        assert self.windows("additive", steps) == expected

    def test_in_a_tree_everything_is_a_path_to_the_deepest_level(self) -> None:
        rule = Aimd()
        rule.begin(0)
        rule.begin(1)
        trees = forest([[(-1, 40), (-1, 24)]] * 2)
        accepted = np.array([False, True, False, False])
        rule.learn(trees, Verified(np.ones(4, np.bool_), accepted, np.array([2, 1])), np.arange(2))
        assert kept(paths(40, 40), rule.choose(paths(40, 40), batch([0, 0]))) == [4, 2]

    def test_windows_belong_to_slots_and_start_anew_with_a_request(self) -> None:
        rule = Aimd()
        for slot in (3, 0):
            rule.begin(slot)
        trees = paths(2, 2)
        rule.learn(trees, accept(trees, 2, 1), np.array([3, 0]))
        both = Batch(np.array([0, 3]), np.zeros(2, np.int64), 2)
        assert kept(paths(9, 9), rule.choose(paths(9, 9), both)) == [2, 4]
        rule.begin(3)
        assert kept(paths(9, 9), rule.choose(paths(9, 9), both)) == [2, 2]
        assert rule.metrics() == {"spec/budget/window": 2.0}


class TestLengthClass:
    def rule(self, ended: Iterable[tuple[float | None, int]]) -> LengthClass:
        rule = LengthClass(nodes=10)
        for predicted, length in ended:
            rule.begin(0, predicted)
            rule.end(0, length)
        return rule

    def classes(self, rule: LengthClass, *requests: tuple[float | None, int]) -> list[int]:
        for slot, (predicted, _) in enumerate(requests):
            rule.begin(slot, predicted)
        return [int(c) for c in rule.classes(batch([generated for _, generated in requests]))]

    # Lengths 10, 20 ... 100: medium from 60 on (the median), long from 90 on (the quantile 0.8). Predictions came true.
    TRUE = tuple((float(length), length) for length in range(10, 101, 10))

    def test_budgets_are_none_a_quarter_and_all(self) -> None:
        rule, trees = self.rule(self.TRUE), paths(20, 20, 20)
        assert self.classes(rule, (10.0, 0), (70.0, 0), (100.0, 0)) == [0, 1, 2]
        assert kept(trees, rule.choose(trees, batch([0, 0, 0]))) == [0, 3, 10]

    def test_class_follows_the_tokens_generated(self) -> None:
        rule = self.rule(self.TRUE)
        found = self.classes(rule, (10.0, 58), (10.0, 59), (10.0, 88), (10.0, 89), (10.0, 5_000))
        assert found == [0, 1, 1, 2, 2]

    def test_class_is_the_most_frequent_end_of_such_requests(self) -> None:
        """Of those predicted short, 3 ended short and 12 long; of those predicted long, all short."""
        ended = [(10.0, 10)] * 3 + [(10.0, 100)] * 12 + [(100.0, 10)] * 8 + [(50.0, 50)] * 7
        assert self.classes(self.rule(ended), (10.0, 0), (100.0, 0)) == [2, 0]

    def test_without_prediction_all_are_compared(self) -> None:
        rule = self.rule(self.TRUE)
        assert self.classes(rule, (None, 0), (None, 55), (None, 85)) == [0, 1, 2]

    def test_equal_lengths_are_all_long(self) -> None:
        assert self.classes(self.rule([(10.0, 10)] * 8), (10.0, 0), (None, 3)) == [2, 2]

    def test_until_enough_has_ended_everything_is_medium(self) -> None:
        assert self.classes(self.rule([(10.0, 10)] * 7), (10.0, 0), (None, 99)) == [1, 1]

    def test_old_lengths_are_forgotten(self) -> None:
        rule = self.rule([*self.TRUE, *[(float(n), n) for n in range(1_000, 1_000 + LengthClass.WINDOW)]])
        assert self.classes(rule, (100.0, 0)) == [0]

    def test_what_ends_counts_from_the_next_step_on(self) -> None:
        rule = self.rule(self.TRUE)
        assert self.classes(rule, (100.0, 0)) == [2]
        for _ in range(100):
            rule.begin(1, 300.0)
            rule.end(1, 300)
        assert self.classes(rule, (100.0, 0)) == [0]

    def test_reports_the_shares_of_the_classes_since_the_last_call(self) -> None:
        rule = self.rule(self.TRUE)
        self.classes(rule, (10.0, 0), (10.0, 0), (100.0, 0), (70.0, 0))
        rule.choose(paths(1, 1, 1, 1), batch([0, 0, 0, 0]))
        names = ("spec/budget/short", "spec/budget/medium", "spec/budget/long")
        assert rule.metrics() == dict(zip(names, (0.5, 0.25, 0.25), strict=True))
        assert all(math.isnan(share) for share in rule.metrics().values())


class TestMarginal:
    def rule(self, base: float, per_token: float) -> Marginal:
        cost = CostModel()
        cost.fit([(1, base + per_token), (257, base + 257 * per_token)])
        return Marginal(cost)

    def teach(self, rule: Marginal, levels: list[int], steps: int = 200) -> None:
        trees = paths(*[8] * len(levels))
        for _ in range(steps):
            rule.learn(trees, accept(trees, *levels), np.arange(len(levels)))

    def test_length_is_that_of_the_least_time_per_token(self) -> None:
        """Half of the tested nodes are accepted, by the prior: (base + (1 + γ)B) / (2 - 2^-γ) is least at γ*."""
        for base, requests in ((1.0, 1), (10.0, 1), (10.0, 4), (100.0, 4), (0.0, 8)):
            times = [(base + (1 + g) * requests) / (2.0 - 0.5**g) for g in range(9)]
            best = int(np.argmin(times))
            assert self.rule(base, 1.0).best_length(requests, requests) == best

    def test_nothing_is_drafted_where_it_does_not_pay(self) -> None:
        assert self.rule(0.0, 1.0).best_length(8, 8) == 0

    def test_all_is_accepted_and_tokens_are_free(self) -> None:
        rule = self.rule(1.0, 0.0)
        self.teach(rule, [8, 8])
        trees = paths(20, 20)
        assert kept(trees, rule.choose(trees, batch([0, 0], 2))) == [8, 8]

    def test_a_rejecting_model_switches_it_off_and_time_on_again(self) -> None:
        rule = self.rule(4.0, 1.0)
        assert rule.best_length(1, 1) > 0
        self.teach(rule, [0])
        assert rule.best_length(1, 1) == 0
        self.teach(rule, [], steps=5_000)
        assert rule.best_length(1, 1) > 0

    def test_acceptance_is_that_of_tested_levels(self) -> None:
        rule = self.rule(4.0, 1.0)
        self.teach(rule, [1], steps=2_000)  # of two levels tested, one accepted
        assert rule.metrics()["spec/budget/acceptance"] == pytest.approx(0.5)
        self.teach(rule, [3], steps=4_000)  # three of four
        assert rule.metrics()["spec/budget/acceptance"] == pytest.approx(0.75, abs=0.01)

    def test_needs_a_measured_cost(self) -> None:
        with pytest.raises(StrettoError, match="nothing was measured"):
            Marginal(CostModel()).choose(paths(1), batch([0]))
