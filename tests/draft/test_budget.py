"""`goodput` is optimal, and every rule keeps whole branches, whatever the trees and wherever its state came from."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.draft import Drafts, no_drafts
from stretto.draft.budget import KINDS, Batch, Budget, Goodput, make_budget
from stretto.draft.cost import CostModel
from stretto.errors import StrettoError
from stretto.records import BoolArray
from tests.draft.trees import GRAIN, accept, drafts, forest, parent_closed, paths


def cost(*points: tuple[int, float], per_node: float = 0.0) -> CostModel:
    model = CostModel(per_node)
    model.fit(points)
    return model


LINEAR = cost((1, 1.0), (257, 17.0))  # 1 s and 1/16 s for each further token


def batch(trees: Drafts, tokens: int | None = None) -> Batch:
    requests = trees.counts.size
    return Batch(np.arange(requests), np.zeros(requests, np.int64), tokens or max(requests, 1))


def goodput(trees: Drafts, keep: BoolArray, model: CostModel, given: Batch) -> float:
    worth = trees.counts.size + trees.estimates[keep].sum()
    nodes = np.array([keep.sum()])
    return float(worth / model.seconds(given.tokens + nodes, nodes)[0])


class TestGoodput:
    COSTS = (
        cost((1, 1.0), (2, 1.25), (4, 1.25), (8, 2.0), (16, 8.0)),  # neither convex nor concave
        cost((1, 1.0), (2, 2.0)),  # a token costs what it may bring: nothing is worth it
        cost((1, 1.0), (257, 1.0)),  # tokens are free
        cost((1, 1.0), (257, 17.0), per_node=0.125),
    )

    @given(
        drafts(requests=3, largest=4),
        st.sampled_from(COSTS),
        st.integers(1, 12),
    )
    def test_equals_the_best_of_all_parent_closed_choices(
        self, trees: Drafts, model: CostModel, tokens: int
    ) -> None:
        """Exactly, ties to fewer nodes: all numbers are dyadic, so float64 makes no error before the division."""
        given = batch(trees, tokens)
        keep = make_budget("goodput", model).choose(trees, given)
        assert parent_closed(trees, keep)
        choices = [
            np.array(choice, np.bool_)
            for choice in itertools.product((False, True), repeat=trees.estimates.size)
        ]
        values = [
            (goodput(trees, c, model, given), -int(c.sum())) for c in choices if parent_closed(trees, c)
        ]
        assert (goodput(trees, keep, model, given), -int(keep.sum())) == max(values)

    def test_the_floor_follows_the_price(self) -> None:
        fair, cheap, dear = (
            cost((1, 1.0), (257, 33.0)),
            cost((1, 1.0), (257, 1.0)),
            cost((1, 1.0), (257, 257.0)),
        )
        trees = forest([[(-1, 60), (-1, 40), (-1, 8)], [(-1, 20), (0, 4)]])
        budget = Goodput(fair)
        assert budget.floor == 0.0
        kept = budget.choose(trees, batch(trees, 1))
        assert budget.floor == trees.estimates[kept].min() / 2 == 20 / GRAIN
        again = Goodput(cheap)
        again.load_state_dict(json.loads(json.dumps(budget.state_dict())))
        assert again.floor == budget.floor
        assert again.choose(trees, batch(trees, 1)).all()
        assert again.floor == trees.estimates.min() / 2
        again.cost = dear
        assert not again.choose(trees, batch(trees, 1)).any()
        assert again.floor == 0.8 * 2.0  # two requests make 2 tokens a second, and a node takes one second
        again.cost = fair
        again.choose(forest([[]]), batch(forest([[]]), 1))  # no trees: it was too high
        assert again.floor == 0.8
        again.choose(forest([[]]), batch(forest([[]]), 1))
        assert again.floor == 0.4

    @given(
        drafts(requests=3, largest=6),
        st.sampled_from(COSTS),
        st.integers(1, 12),
    )
    def test_nothing_below_the_floor_is_chosen_at_a_step_alike(
        self, trees: Drafts, model: CostModel, tokens: int
    ) -> None:
        given = batch(trees, tokens)
        budget = Goodput(model)
        kept = budget.choose(trees, given)
        assert (trees.estimates[kept] >= budget.floor).all()

    def test_fades_out_as_the_batch_fills(self) -> None:
        """A chain of halves; the step costs 1 s up to 8 tokens, 1/8 s for each further one."""
        model = cost((1, 1.0), (8, 1.0), (16, 2.0), (64, 8.0))
        kept = []
        for requests in (1, 2, 4, 8, 16, 32):
            trees = forest([[(i - 1, 32 >> i) for i in range(6)]] * requests)
            kept.append(make_budget("goodput", model).choose(trees, batch(trees)).sum() / requests)
        assert kept == sorted(kept, reverse=True)
        assert kept[0] == 6
        assert kept[-1] == 0

    def test_certain_nodes_are_kept_and_impossible_ones_are_not(self) -> None:
        trees = forest([[(-1, 64), (0, 64), (1, 0)], [(-1, 0)]])
        assert make_budget("goodput", LINEAR).choose(trees, batch(trees)).tolist() == [
            True,
            True,
            False,
            False,
        ]
        free = cost((1, 1.0), (2, 1.0))
        assert make_budget("goodput", free).choose(trees, batch(trees)).tolist() == [True, True, False, False]

    def test_parents_come_first_among_many_equal_estimates(self) -> None:
        """Four chains of three plateaus, 30 nodes taken from the second plateau's 80: the sort must not mix them."""
        chain = [(i - 1, 48 if i < 20 else 32 if i < 40 else 16) for i in range(64)]
        trees = forest([chain] * 4)
        until_110 = cost((1, 1.0), (111, 1.0), (112, 1e6))
        keep = make_budget("goodput", until_110).choose(trees, batch(trees, tokens=1))
        assert keep.reshape(4, 64).sum(axis=1).tolist() == [40, 30, 20, 20]
        assert parent_closed(trees, keep)

    def test_reports_what_it_expected_beside_what_came(self) -> None:
        trees = forest([[(-1, 64), (0, 48), (1, 0)]])
        rule = make_budget("goodput", LINEAR)
        kept = trees.select(rule.choose(trees, batch(trees)))
        rule.learn(kept, accept(kept, 1), np.array([0]))
        names = ("proposed", "kept", "expected", "accepted")
        expected = {f"spec/budget/{n}": x for n, x in zip(names, (3.0, 2.0, 1.75, 1.0), strict=True)}
        assert rule.metrics() == expected
        assert rule.metrics() == dict.fromkeys(expected, 0.0)


def begin(rule: Budget, slots: int) -> None:
    for slot in range(slots):
        rule.begin(slot, float(10 * slot) if slot % 2 else None)
    for length in (1, 5, 5, 7, 9, 20, 30, 30, 60):
        rule.begin(slots, float(length))
        rule.end(slots, length)


class TestEveryRule:
    @given(st.sampled_from(KINDS), drafts(requests=4, largest=12), st.integers(0, 4))
    def test_keeps_whole_branches_and_restores_its_state(self, kind: str, trees: Drafts, levels: int) -> None:
        rule = make_budget(kind, LINEAR)
        begin(rule, 4)
        given = batch(trees)
        kept = trees.select(rule.choose(trees, given))
        rule.learn(kept, accept(kept, *[levels] * trees.counts.size), given.slots)
        copy = make_budget(kind, LINEAR)
        copy.load_state_dict(json.loads(json.dumps(rule.state_dict(), allow_nan=False)))
        keep = rule.choose(trees, given)
        assert parent_closed(trees, keep)
        assert copy.choose(trees, given).tolist() == keep.tolist()
        copy.end(0, 12)
        rule.end(0, 12)
        assert copy.state_dict() == rule.state_dict()
        assert copy.metrics() == rule.metrics()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("requests", [0, 3])
    def test_no_nodes(self, kind: str, requests: int) -> None:
        rule, trees = make_budget(kind, LINEAR), no_drafts(requests)
        begin(rule, requests)
        assert rule.choose(trees, batch(trees)).shape == (0,)
        rule.learn(trees, accept(trees, *[0] * requests), np.arange(requests))
        assert rule.choose(trees, batch(trees)).dtype == np.bool_


def test_none_keeps_nothing() -> None:
    trees = paths(3, 2)
    assert not make_budget("none").choose(trees, batch(trees)).any()


def test_fixed_keeps_the_best_of_every_request() -> None:
    trees = paths(3, 0, 1)
    keep = make_budget("fixed", nodes=2).choose(trees, batch(trees))
    assert keep.tolist() == [True, True, False, True]


@pytest.mark.parametrize("kind", ["goodput", "marginal"])
@pytest.mark.parametrize(("per_node", "drafted"), [(0.0, True), (1.0, False)])
def test_drafting_itself_has_its_price(kind: str, per_node: float, drafted: bool) -> None:
    trees = forest([[(-1, 32)]])
    rule = make_budget(kind, cost((1, 1.0), (257, 17.0), per_node=per_node))
    assert rule.choose(trees, batch(trees)).tolist() == [drafted]


class TestMakeBudget:
    def test_unknown_names(self) -> None:
        with pytest.raises(StrettoError, match='no budget "godput"; did you mean "goodput"'):
            make_budget("godput")
        with pytest.raises(StrettoError, match='no variant "multiplicativ"; did you mean "multiplicative"'):
            make_budget("aimd", aimd="multiplicativ")

    @pytest.mark.parametrize("kind", ["goodput", "marginal"])
    def test_cost_is_needed(self, kind: str) -> None:
        with pytest.raises(StrettoError, match=f'"{kind}" needs a cost model'):
            make_budget(kind)

    def test_a_budget_of_nothing_has_a_name_of_its_own(self) -> None:
        with pytest.raises(StrettoError, match='"none" is the rule for 0'):
            make_budget("fixed", nodes=0)
