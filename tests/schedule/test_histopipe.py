"""HistoPipe: bands in zig-zag, outliers, and what must hold whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.simulated import StepCost
from stretto.fleet.simulated import SimulatedFleet
from stretto.history.lengths import Ended
from stretto.records import (
    Admit,
    Admitted,
    Decision,
    Discard,
    Event,
    Finished,
    FinishReason,
    Harvest,
    Publish,
    Request,
    Scored,
    Start,
    Stop,
    WorkerDown,
    WorkerUp,
)
from tests.schedule.fleets import bounded, check_ended, come_and_go, idle
from tests.schedule.runs import Checked, decisions, of, resumed, updates
from tests.world import World, long_tailed, prompt

STEP = StepCost(base=1.0, per_token=0.0, per_context=0.0, per_prefill=0.0)


def lined_up(lengths: Sequence[int], responses: dict[int, int] | None = None, **knobs: Any) -> World:
    """One worker of one slot for each prompt, whose earlier lengths were `lengths`; `responses` differ by request."""
    n = len(lengths)
    config = of("histopipe", prompts=n, samples=1, bands=n, token_cost=0.0, **knobs)

    def length(request: Request) -> int:
        return (responses or {}).get(request.id, lengths[request.id % n])

    world = World(config, length=length, workers=n, slots=1, rows=n, cost=STEP, train_seconds=1.0)
    for row, past in enumerate(lengths):
        world.lengths.observe_lengths([Ended(prompt(row), -1, past, False)])
    return world


def placed(made: Sequence[Any]) -> dict[int, int]:
    return {i: d.worker for d in made if isinstance(d, Start) for i in d.ids}


class TestZigZag:
    def test_odd_steps_ascend_and_even_steps_descend(self) -> None:
        world = lined_up([30, 10, 40, 20])
        made = decisions(world)
        world.run(4)
        where = placed(made)
        assert [where[i] for i in range(4)] == [2, 0, 3, 1]
        assert [where[i] for i in range(4, 8)] == [1, 3, 0, 2]
        assert [where[i] for i in range(8, 12)] == [2, 0, 3, 1]

    def test_bubbles_cancel_over_two_steps(self) -> None:
        """Each worker has 10 + 40 or 20 + 30 tokens in two steps; synchronous, 40 + 40."""
        world = lined_up([10, 20, 30, 40]).run(8)
        assert world.runtime.now() == pytest.approx(8 * 25, abs=25)
        config = of("synchronous", prompts=4, samples=1)
        slow = World(config, length=lambda r: 10 * (r.id % 4 + 1), workers=4, slots=1, cost=STEP).run(8)
        assert slow.runtime.now() >= 8 * 40

    def test_a_worker_starts_its_next_band_with_the_newest_weights(self) -> None:
        world = lined_up([10, 20, 30, 40])
        made = decisions(world)
        world.run(6)
        published = [w for d in made if isinstance(d, Publish) for w in d.workers]
        assert sorted(published)[:: len(published) // 4] == [0, 1, 2, 3]
        assert {s for b in world.batches[2:] for s in b.staleness} <= {0, 1}
        assert world.ledger.counters["refreshes"] == 0

    @pytest.mark.parametrize("eta", [0, 1, 2])
    def test_a_worker_waits_for_weights_that_are_new_enough(self, eta: int) -> None:
        """Updates take longer than any band, and still nothing has to be generated twice."""
        world = lined_up([10, 20, 30, 40], max_staleness=eta, outlier="none")
        world.train_seconds = 100.0
        world.run(6)
        assert max(s for b in world.batches for s in b.staleness) == min(eta, 2)
        assert world.ledger.counters["refreshes"] == 0


class TestOutliers:
    def reported(self, world: World) -> World:
        world.controller.fleet = SimulatedFleet(world.runtime, world.engines, report_seconds=1.0)
        return world

    def test_an_outlier_moves_to_the_worker_with_least_to_do(self) -> None:
        """Request 0 is much longer than its prompt's earlier ones; two of the next batch run beside it."""
        config = of("histopipe", prompts=2, samples=2, bands=2, outlier_share=0.5, max_staleness=1)
        lengths = [400, 8, 5, 5, 5, 5, 200, 200]
        world = World(
            config,
            length=lambda r: lengths[r.id % 8],
            workers=2,
            slots=4,
            rows=2,
            cost=STEP,
            train_seconds=500.0,
        )
        for row, past in ((0, 10), (1, 60)):
            world.lengths.observe_lengths([Ended(prompt(row), -1, past, False)] * 2)
        made = decisions(self.reported(world))
        world.run(2)
        stops = [d for d in made if isinstance(d, Stop)]
        assert [list(d.ids) for d in stops] == [[0]]
        assert all(d.keep for d in stops)
        assert len({d.worker for d in made if isinstance(d, Start) and 0 in d.ids}) == 2
        assert world.ledger.counters["refreshes"] == 0
        assert 0 in {r.request_id for r in world.batches[0].rollouts}

    def test_a_deferred_group_comes_with_the_next_update(self) -> None:
        world = lined_up([10, 20, 30, 40], {0: 70}, outlier="defer", outlier_share=1.0, max_staleness=2)
        self.reported(world).run(3)
        assert [len(b.rollouts) for b in world.batches] == [3, 5, 4]
        assert {0, 4, 5, 6, 7} == {r.request_id for r in world.batches[1].rollouts}
        assert world.ledger.counters["refreshes"] == 0

    def test_a_deferred_group_is_refreshed_where_it_would_get_too_old(self) -> None:
        world = lined_up([10, 20, 30, 40], {4: 70}, outlier="defer", outlier_share=1.0, max_staleness=1)
        self.reported(world).run(6)
        assert [len(b.rollouts) for b in world.batches][:2] == [4, 3]
        assert world.ledger.counters["refreshes"] >= 1
        assert max(s for b in world.batches for s in b.staleness) <= 1
        assert 4 in {r.request_id for b in world.batches for r in b.rollouts}


@pytest.mark.parametrize("tier", ["mirrored", "linear", "equal"])
def test_slots_are_less_idle_than_under_synchronous(tier: str) -> None:
    """Lengths of a prompt's visits are alike, and vary over two orders of magnitude between prompts."""

    def length(request: Request) -> int:
        usual = random.Random(7 * (request.group % 64)).lognormvariate(4.5, 1.0)
        return max(1, min(2000, int(usual * random.Random(request.key).lognormvariate(0.0, 0.2))))

    found = {}
    for kind, knobs in (("synchronous", {}), ("histopipe", {"bands": 4, "tier": tier})):
        config = of(kind, prompts=32, samples=4, **knobs)  # type: ignore[arg-type]
        world = World(
            config, length=length, workers=8, slots=8, rows=64, max_new_tokens=2000, cost=STEP, checked=False
        ).run(10)
        found[kind] = (idle(world), world.runtime.now())
    assert found["histopipe"][0] < found["synchronous"][0] - 0.1
    assert found["histopipe"][1] < 0.8 * found["synchronous"][1]


def test_first_visits_have_no_history_and_run_all_the_same() -> None:
    world = World(of("histopipe", prompts=4, samples=2), length=long_tailed(3), workers=3, slots=4).run(5)
    assert [len(b.rollouts) for b in world.batches] == [8] * 5


class Heard:
    """A schedule beside a ledger; decisions are carried out on the ledger, and what was admitted is told later."""

    def __init__(self, **knobs: Any) -> None:
        config = of("histopipe", prompts=2, samples=2, **knobs)
        self.world = World(config, length=long_tailed(3), slots=8)
        self.ledger, self.schedule = self.world.ledger, self.world.controller.schedule
        self.admitted: list[Admitted] = []

    def __call__(self, *events: Event) -> list[Decision]:
        self.ledger.apply(events)
        decisions = self.schedule.decide(self.ledger.view, events)
        for decision in decisions:
            if isinstance(decision, Admit):
                rows = self.world.controller.prompts.next(decision.prompts)
                self.admitted.append(self.ledger.admit(rows, decision.samples_each))
            elif isinstance(decision, Start):
                self.ledger.start(decision.ids, decision.worker)
            elif isinstance(decision, Discard):
                self.ledger.discard(decision.ids, decision.reason)
        return decisions


def test_what_is_admitted_while_the_last_worker_goes_down_is_started_by_the_next() -> None:
    """Both are heard of at once, so the schedule has no worker when it hears what it was given."""
    heard = Heard()
    heard(WorkerUp(0, 8, 0))
    assert heard(*heard.admitted, WorkerDown(0)) == []
    assert placed(heard(WorkerUp(1, 8, 0))) == dict.fromkeys(range(8), 1)


def test_a_group_that_was_given_up_is_no_outlier() -> None:
    """It may be forgotten before its place is taken, when the rest of its band is looked at."""
    heard = Heard(drop_zero_variance=True, outlier_share=0.3)
    heard(WorkerUp(0, 8, 0))
    heard(*heard.admitted)
    heard(*(Finished(0, i, 1, FinishReason.STOP) for i in range(4)))
    decisions = heard(Scored(0, 1, 1.0), Scored(1, 1, 1.0))
    assert decisions[0] == Discard([0, 1], "zero_variance")
    assert len(heard.ledger.take_finished()) == 2
    assert placed(heard(Scored(2, 1, 1.0), heard.admitted[-1])) == {8: 0, 9: 0}


def test_batches_by_tokens_have_about_so_many() -> None:
    config = of("histopipe", prompts=4, samples=2, tokens_per_update=600, outlier="none")
    world = World(config, length=lambda r: 20, workers=2, slots=8).run(8)
    sizes = [20 * len(b.rollouts) for b in world.batches]
    assert sizes[:2] == [160, 160], "before anything is known, `prompts`"
    assert sizes[3:] == [600] * 5


def test_useless_groups_are_replaced_in_their_batch() -> None:
    config = of("histopipe", prompts=3, samples=2, drop_zero_variance=True)
    world = World(
        config,
        length=long_tailed(4),
        workers=2,
        slots=4,
        reward=lambda r: float(r.sample_index and r.group_id % 3),
    ).run(6)
    assert [len(b.rollouts) for b in world.batches] == [6] * 6
    assert all(r.group_id % 3 for b in world.batches for r in b.rollouts)
    assert world.ledger.counters["discarded/zero_variance"] > 0


@given(st.integers(0, 10**6))
@settings(max_examples=25)
def test_whatever_comes_and_goes(seed: int) -> None:
    draw = random.Random(seed)
    bound = draw.choice([0, 1, 1, 2, None])
    config = of(
        "histopipe",
        prompts=draw.randint(1, 6),
        samples=draw.randint(2, 4),
        bands=draw.choice([2, 3, 8]),
        tier=draw.choice(["mirrored", "linear", "equal"]),
        outlier=draw.choice(["migrate", "defer", "none"]),
        outlier_share=draw.choice([0.1, 0.5, 1.0]),
        outlier_quantile=0.5,
        outlier_factor=1.0,
        max_staleness=bound,
        off_policy_strategy=draw.choice(["refresh", "wait", "drop"]),
        refresh_budget=draw.choice([None, 0, 1]),
        drop_zero_variance=draw.random() < 0.3,
        running=draw.choice(["continue", "recompute"]),
        tokens_per_update=draw.choice([None, None, 300]),
    )
    world = Checked(
        config,
        length=long_tailed(seed, cap=400),
        workers=draw.randint(1, 5),
        slots=draw.randint(1, 6),
        rows=draw.choice([3, 16]),
        train_seconds=draw.choice([0.0, 1.0, 30.0]),
        reward_seconds=draw.choice([0.0, 5.0]),
    )
    check_ended(bounded(come_and_go(world, seed)).run(6), bound)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [1, 3])
def test_goes_on_from_a_checkpoint(at: int) -> None:
    config = of("histopipe", prompts=4, samples=2, bands=2, drop_zero_variance=True)
    before, after = resumed(config, at, 7, length=long_tailed(5), workers=3, slots=3)
    consumed = [r.request_id for b in before.batches + after.batches for r in b.rollouts]
    assert len(consumed) == len(set(consumed)) == 7 * 8
    assert max(s for b in after.batches for s in b.staleness) <= 1
    assert len(updates(before)) == at
    assert isinstance(after.controller.schedule.metrics(), dict)
    assert [d for d in decisions(after) if isinstance(d, Harvest)] == []
