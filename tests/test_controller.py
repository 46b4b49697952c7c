from __future__ import annotations

import random
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config import ScheduleConfig
from stretto.config.checks import USED_BY
from stretto.config.schedules import Kind
from stretto.records import State, WorkerDown, WorkerUp
from tests.world import World, long_tailed


def schedule(kind: Kind, **knobs: Any) -> ScheduleConfig:
    """Without the knobs that the kind has not."""
    return ScheduleConfig(
        kind=kind, **{key: value for key, value in knobs.items() if kind in USED_BY.get(key, (kind,))}
    )


def synchronous(prompts: int, samples: int) -> ScheduleConfig:
    return ScheduleConfig(kind="synchronous", prompts=prompts, samples=samples)


def test_synchronous_consumes_every_admitted_group_once_and_on_policy() -> None:
    world = World(synchronous(prompts=4, samples=3), length=long_tailed(1), workers=2, slots=4).run(5)
    assert [len(b.rollouts) for b in world.batches] == [12] * 5
    seen = [r.request_id for b in world.batches for r in b.rollouts]
    assert seen == list(range(60))
    assert all(r.outcome == State.CONSUMED for b in world.batches for r in b.rollouts)
    admitted_at = [{r.admitted_step for r in b.rollouts} for b in world.batches]
    assert admitted_at == [{0}, {1}, {2}, {3}, {4}]


def test_synchronous_visits_count_epochs() -> None:
    world = World(synchronous(prompts=4, samples=2), length=long_tailed(2), rows=8).run(6)
    assert [sorted({r.visit for r in b.rollouts}) for b in world.batches] == [[0], [0], [1], [1], [2], [2]]


def test_async_overlaps_generation_with_updates_and_is_faster() -> None:
    slow = World(synchronous(4, 3), length=long_tailed(3)).run(20)
    config = ScheduleConfig(kind="async", max_staleness=2, prompts=4, samples=3)
    fast = World(config, length=long_tailed(3)).run(20)
    assert fast.runtime.now() < 0.8 * slow.runtime.now()
    assert {len(b.rollouts) for b in fast.batches} == {12}


def test_async_pacing_bounds_how_many_groups_are_admitted() -> None:
    config = ScheduleConfig(kind="async", prompts=4, samples=2, max_staleness=1)
    world = World(config, length=long_tailed(4))
    admitted: list[tuple[int, int]] = []
    admit = world.ledger.admit

    def spy(prompts, samples_each):  # type: ignore[no-untyped-def]
        result = admit(prompts, samples_each)
        admitted.append((world.ledger.version, world.ledger.next_group))
        return result

    world.ledger.admit = spy  # type: ignore[method-assign]
    world.run(10)
    assert all(groups <= (1 + version + 1) * 4 for version, groups in admitted)
    assert max(groups - 4 * version for version, groups in admitted) == 8  # and pacing is made use of


def test_async_at_staleness_0_has_the_batches_of_synchronous() -> None:
    a = World(synchronous(4, 3), length=long_tailed(5)).run(6)
    config = ScheduleConfig(kind="async", max_staleness=0, prompts=4, samples=3)
    b = World(config, length=long_tailed(5)).run(6)
    keys = [[[r.key for r in batch.rollouts] for batch in w.batches] for w in (a, b)]
    assert keys[0] == keys[1]


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["synchronous", "async"]),
    prompts=st.integers(1, 6),
    samples=st.integers(1, 5),
    workers=st.integers(1, 3),
    slots=st.integers(1, 8),
    staleness=st.integers(0, 3),
    running=st.sampled_from(["continue", "recompute"]),
    seed=st.integers(0, 1000),
    reward_seconds=st.sampled_from([0.0, 0.3, 5.0]),
)
def test_any_schedule_ends_with_every_response_consumed_once(
    kind: Literal["synchronous", "async"],
    prompts: int,
    samples: int,
    workers: int,
    slots: int,
    staleness: int,
    running: Literal["continue", "recompute"],
    seed: int,
    reward_seconds: float,
) -> None:
    config = schedule(kind, prompts=prompts, samples=samples, max_staleness=staleness, running=running)
    world = World(
        config, length=long_tailed(seed), workers=workers, slots=slots, reward_seconds=reward_seconds
    ).run(4)
    seen = [r.request_id for b in world.batches for r in b.rollouts]
    assert len(seen) == len(set(seen)) == 4 * prompts * samples
    assert all(b.version == i for i, b in enumerate(world.batches))


@settings(max_examples=30)
@given(kind=st.sampled_from(["synchronous", "async"]), seed=st.integers(0, 10_000))
def test_workers_that_die_cost_no_response(kind: Literal["synchronous", "async"], seed: int) -> None:
    """Two of three are taken for dead while they still report; one comes back, with old weights and old work."""
    draw = random.Random(seed)
    config = schedule(
        kind, prompts=draw.randint(1, 4), samples=draw.randint(1, 4), max_staleness=draw.randint(0, 2)
    )
    slots = draw.randint(1, 6)
    world = World(config, length=long_tailed(seed), workers=3, slots=slots, max_new_tokens=300)
    died = draw.uniform(0.1, 5.0)
    world.runtime.post(WorkerDown(1), delay=draw.uniform(0.1, 5.0))
    world.runtime.post(WorkerDown(2), delay=died)
    world.runtime.post(WorkerUp(2, slots, 0), delay=died + draw.uniform(0.1, 5.0))
    world.run(5)
    seen = [r.request_id for b in world.batches for r in b.rollouts]
    assert len(seen) == len(set(seen)) == 5 * config.prompts * config.samples
