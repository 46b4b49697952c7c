from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config import ScheduleConfig
from stretto.history.lengths import Ended
from stretto.records import Admit, Event, Request, Start, State, WorkerDown, WorkerUp
from tests.world import World, long_tailed, prompt


def config(**knobs: Any) -> ScheduleConfig:
    return ScheduleConfig(kind="async", **{"prompts": 4, "samples": 3, **knobs})


def staleness(world: World) -> list[int]:
    return [s for batch in world.batches for s in batch.staleness]


def one_straggler(request: Request) -> int:
    return 900 if request.id == 2 else 10


@pytest.mark.parametrize("strategy", ["refresh", "wait", "drop"])
@pytest.mark.parametrize("eta", [0, 1, 3])
def test_nothing_is_trained_on_that_is_too_old(strategy: str, eta: int) -> None:
    knobs = config(off_policy_strategy=strategy, max_staleness=eta, prompts=2)
    world = World(knobs, length=long_tailed(7, cap=2000), slots=8, workers=2, max_new_tokens=2000).run(30)
    assert max(staleness(world)) <= eta
    assert {len(b.rollouts) for b in world.batches} == {6}


def test_pacing_alone_bounds_no_straggler_and_each_strategy_does() -> None:
    found = {}
    for strategy in ("paced", "refresh", "wait", "drop"):
        world = World(config(off_policy_strategy=strategy), length=one_straggler, slots=24).run(40)
        found[strategy] = (max(staleness(world), default=0), world)
    assert found["paced"][0] > 5
    assert all(found[strategy][0] <= 1 for strategy in ("refresh", "wait", "drop"))
    refreshed, waited, dropped = (found[s][1] for s in ("refresh", "wait", "drop"))
    assert refreshed.ledger.columns.refreshes[2] == 2  # and then it was waited for
    assert waited.ledger.counters["refreshes"] == 0
    assert dropped.ledger.counters["discarded/stale"] == 3  # the whole group
    consumed = [[r.request_id for b in w.batches for r in b.rollouts] for w in (refreshed, waited, dropped)]
    assert [2 in ids for ids in consumed] == [True, True, False]
    assert dropped.runtime.now() < waited.runtime.now()


def test_a_refreshed_response_has_its_key_and_its_tokens_as_a_draft() -> None:
    drafts: list[tuple[int, int, int]] = []

    def length(request: Request) -> int:
        if request.id == 2:
            drafts.append((request.attempt, request.draft_ids.size, request.key))
        return one_straggler(request)

    World(config(), length=length, slots=24).run(40)
    sizes = {attempt: size for attempt, size, _ in drafts}
    assert sizes[1] == 0
    assert sizes[2] > 0
    assert sizes[3] > 0
    assert len({key for _, _, key in drafts}) == 1


def test_single_responses_make_a_batch_too() -> None:
    knobs = config(unit="response", max_staleness=1)
    world = World(knobs, length=long_tailed(3), slots=16).run(20)
    assert {len(b.rollouts) for b in world.batches} == {12}
    assert max(staleness(world)) <= 1
    split = [b for b in world.batches if len({r.group_id for r in b.rollouts}) > 4]
    assert split  # groups were not waited for


def test_groups_with_equal_rewards_are_dropped_and_others_take_their_place() -> None:
    knobs = config(drop_zero_variance=True, max_staleness=2)
    world = World(
        knobs, length=long_tailed(5), slots=16, reward=lambda r: float(r.sample_index * (r.group_id % 3))
    ).run(15)
    consumed = {r.group_id for b in world.batches for r in b.rollouts}
    assert consumed
    assert all(group % 3 for group in consumed)
    assert {len(b.rollouts) for b in world.batches} == {12}
    assert world.ledger.counters["discarded/zero_variance"] >= 15


def test_batches_by_tokens() -> None:
    knobs = config(tokens_per_update=400, max_staleness=2)
    world = World(knobs, length=long_tailed(9), slots=16).run(15)
    for batch in world.batches:
        tokens: dict[int, int] = {}
        for one in batch.rollouts:
            tokens[one.group_id] = tokens.get(one.group_id, 0) + len(one.token_ids)
        assert sum(tokens.values()) >= 400
        assert len(tokens) == 1 or sum(tokens.values()) - max(tokens.values()) < 400


def test_longest_first_starts_the_predicted_longest_first() -> None:
    """Rows 0..7 have their own lengths, known from the second visit on."""

    def length(request: Request) -> int:
        return 10 + 40 * (int(request.prompt_ids[0]) % 7)

    started: list[int] = []
    world = World(config(longest_first=True, samples=2), length=length, slots=8, rows=7)
    start = world.ledger.start

    def spy(ids: Any, worker: int, max_new: int | None = None) -> list[Request]:
        requests = start(ids, worker, max_new)
        started.extend(request.id for request in requests)
        return requests

    world.ledger.start = spy  # type: ignore[method-assign]
    world.run(12)
    plain = World(config(samples=2), length=length, slots=8, rows=7).run(12)
    assert started != sorted(started)
    assert world.runtime.now() <= plain.runtime.now()


@pytest.mark.parametrize("limit", [None, 7])
def test_without_a_bound_what_fits_the_slots_is_let_in(limit: int | None) -> None:
    knobs = config(max_staleness=None, max_concurrent=limit)
    world = World(knobs, length=long_tailed(2), slots=16)
    alive: list[int] = []
    apply = world.ledger.apply

    def spy(events: Any) -> Any:
        ended = apply(events)
        alive.append(world.ledger.alive - len(world.ledger.scored))
        return ended

    world.ledger.apply = spy  # type: ignore[method-assign]
    world.run(10)
    assert max(alive) <= (limit or 2 * 16)
    assert world.ledger.max_staleness is None


@settings(max_examples=60)
@given(
    strategy=st.sampled_from(["refresh", "wait", "drop", "paced"]),
    unit=st.sampled_from(["group", "response"]),
    eta=st.integers(0, 3),
    budget=st.integers(0, 3),
    prompts=st.integers(1, 5),
    samples=st.integers(1, 4),
    workers=st.integers(1, 3),
    slots=st.integers(1, 12),
    longest=st.booleans(),
    zero=st.booleans(),
    tokens=st.sampled_from([None, 50, 500]),
    seed=st.integers(0, 1000),
    train_seconds=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_any_knobs_keep_the_bound_and_come_to_no_stand(
    strategy: str,
    unit: str,
    eta: int,
    budget: int,
    prompts: int,
    samples: int,
    workers: int,
    slots: int,
    longest: bool,
    zero: bool,
    tokens: int | None,
    seed: int,
    train_seconds: float,
) -> None:
    knobs = ScheduleConfig(
        kind="async",
        off_policy_strategy=strategy,  # type: ignore[arg-type]
        unit=unit,  # type: ignore[arg-type]
        max_staleness=eta,
        refresh_budget=budget,
        prompts=prompts,
        samples=samples,
        longest_first=longest,
        drop_zero_variance=zero and samples > 1 and unit == "group",
        tokens_per_update=tokens,
    )
    world = World(
        knobs, length=long_tailed(seed), workers=workers, slots=slots, train_seconds=train_seconds
    ).run(5)
    if strategy != "paced":
        assert max(staleness(world), default=0) <= eta
    seen = [r.request_id for b in world.batches for r in b.rollouts]
    assert len(seen) == len(set(seen))
    state = world.ledger.columns.state[: world.ledger.columns.size]
    assert len(seen) == int((state == State.CONSUMED).sum())


@pytest.mark.parametrize("unit", ["group", "response"])
@pytest.mark.parametrize(("reward_seconds", "train_seconds"), [(60.0, 1.0), (0.05, 60.0)])
def test_without_pacing_late_rewards_or_a_slow_learner_do_not_let_in_ever_more(
    unit: Literal["group", "response"], reward_seconds: float, train_seconds: float
) -> None:
    """A response takes 2 s and there are 16 slots: hundreds would end before anybody is answered or trained on."""
    knobs = config(max_staleness=None, unit=unit)
    world = World(
        knobs, length=long_tailed(5), slots=16, reward_seconds=reward_seconds, train_seconds=train_seconds
    )
    alive = []
    for steps in range(1, 12):
        world.run(steps)
        alive.append(world.ledger.alive)
    most = 16 + 3 * 12  # the slots, and one update's responses more than those that may wait
    assert max(alive) <= 2 * most
    assert max(alive[6:]) <= max(alive[:6]) + 12


def test_what_was_admitted_while_no_worker_was_up_is_started_longest_first() -> None:
    world = World(config(longest_first=True, prompts=4, samples=1), length=long_tailed(5), slots=8)
    for row, length in enumerate([10, 40, 20, 30]):
        world.lengths.observe_lengths([Ended(prompt(row), -1, length, False)])
    ledger, schedule = world.ledger, world.controller.schedule
    up: list[Event] = [WorkerUp(0, 2, 0)]
    ledger.apply(up)
    (admit,) = schedule.decide(ledger.view, up)
    assert isinstance(admit, Admit)
    admitted = ledger.admit(world.controller.prompts.next(admit.prompts), 1)
    both: list[Event] = [admitted, WorkerDown(0)]
    ledger.apply(both)
    assert schedule.decide(ledger.view, both) == []
    up = [WorkerUp(1, 2, 0)]
    ledger.apply(up)
    assert schedule.decide(ledger.view, up) == [Start([1, 3], 1)]
