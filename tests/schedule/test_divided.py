"""Divided rollout: chunks, probes, and what siblings tell about a group's length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.simulated import StepCost
from stretto.records import Request, Start
from tests.schedule.fleets import bounded, check_ended, come_and_go
from tests.schedule.runs import Checked, decisions, of, resumed
from tests.world import World, long_tailed

STEP = StepCost(base=1.0, per_token=0.0, per_context=0.0, per_prefill=0.0)


def started(made: Sequence[Any]) -> list[int]:
    return [i for d in made if isinstance(d, Start) for i in d.ids]


def one_slot(lengths: Sequence[int], samples: int, **knobs: Any) -> World:
    """One response at a time, so that the order of starts is the schedule's."""
    config = of("divided", prompts=len(lengths) // samples, samples=samples, **knobs)
    return World(config, length=lambda r: lengths[r.id % len(lengths)], slots=1, cost=STEP)


class TestOrder:
    def test_probes_first_then_the_group_with_the_longest_that_ended(self) -> None:
        world = one_slot([10, 11, 12, 30, 31, 32, 20, 21, 22], samples=3)
        made = decisions(world)
        world.run(1)
        assert started(made) == [0, 3, 6, 4, 5, 7, 8, 1, 2]

    def test_the_probe_with_the_fewest_tokens_goes_first(self) -> None:
        world = one_slot([15, 1, 25, 1, 5, 1], samples=2, chunk_size=10)
        made = decisions(world)
        world.run(1)
        assert started(made)[:6] == [0, 2, 4, 0, 2, 2]

    def test_a_group_of_which_none_has_ended_counts_as_the_longest(self) -> None:
        """Two slots: while one runs the endless probe of group 0, the other takes siblings of group 0 first."""
        lengths = [900, 5, 5, 20, 20, 20]
        config = of("divided", prompts=2, samples=3)
        world = World(config, length=lambda r: lengths[r.id % 6], slots=2, cost=STEP)
        made = decisions(world)
        world.run(1)
        assert started(made)[:4] == [0, 3, 1, 4], (
            "when 1 has ended with 5 tokens, the other group's 20 are more"
        )

    def test_a_group_that_was_not_served_for_long_is(self) -> None:
        samples = 40
        lengths = [50] * samples + [10] * samples
        world = one_slot(lengths, samples=samples)
        made = decisions(world)
        world.run(1)
        order = started(made)
        first = next(i for i in order[2:] if i >= samples)
        assert 2 < order.index(first) <= 2 + 2 * 16


class TestChunks:
    def test_no_start_is_for_more_than_a_chunk(self) -> None:
        config = of("divided", prompts=3, samples=2, chunk_size=7)
        world = World(config, length=long_tailed(1), workers=2, slots=2)
        made = decisions(world)
        world.run(2)
        assert {d.max_new for d in made if isinstance(d, Start)} == {7}
        length = world.ledger.view.length
        expected = sum(-(-length(r.request_id) // 7) for b in world.batches for r in b.rollouts)
        assert len(started(made)) == expected == world.controller.schedule.metrics()["schedule/chunks"]
        assert world.ledger.counters["discarded_tokens"] == 0

    def test_a_long_response_moves_to_where_there_is_room(self) -> None:
        """One group is long and begins on one worker; the other's is short, and chunks of the long one go on there."""
        lengths = [100, 100, 100, 100, 1, 1, 1, 1]
        config = of("divided", prompts=2, samples=4, chunk_size=10)
        world = World(config, length=lambda r: lengths[r.id % 8], workers=2, slots=4, cost=STEP)
        made = decisions(world)
        world.run(1)
        where = {i: [d.worker for d in made if isinstance(d, Start) and i in d.ids] for i in range(4)}
        moved = [workers for workers in where.values() if len(set(workers)) > 1]
        assert len(moved) >= 2


def test_is_synchronous() -> None:
    config = of("divided", prompts=4, samples=3, chunk_size=20)
    world = World(config, length=long_tailed(2), workers=2, slots=3, rows=8).run(5)
    assert [len(b.rollouts) for b in world.batches] == [12] * 5
    assert {s for b in world.batches for s in b.staleness} == {0}
    assert [r.request_id for b in world.batches for r in b.rollouts] == list(range(60))


def test_the_longest_group_ends_sooner_than_in_order_of_admission() -> None:
    """Siblings are alike, and the long group comes last."""

    def length(request: Request) -> int:
        group = request.group % 8
        return (400 if group == 7 else 40) + random.Random(request.key).randrange(10)

    times = {}
    for kind in ("synchronous", "divided"):
        config = of(kind, prompts=8, samples=8, chunk_size=1000)
        times[kind] = World(config, length=length, workers=2, slots=4, cost=STEP).run(4).runtime.now()
    assert times["divided"] < times["synchronous"]


@given(st.integers(0, 10**6))
@settings(max_examples=25)
def test_whatever_comes_and_goes(seed: int) -> None:
    draw = random.Random(seed)
    config = of(
        "divided",
        prompts=draw.randint(1, 6),
        samples=draw.randint(2, 5),
        chunk_size=draw.choice([5, 30, 1000]),
        drop_zero_variance=draw.random() < 0.3,
        tokens_per_update=draw.choice([None, None, 300]),
    )
    world = Checked(
        config,
        length=long_tailed(seed, cap=400),
        workers=draw.randint(1, 4),
        slots=draw.randint(1, 6),
        rows=16,
        reward_seconds=draw.choice([0.0, 5.0]),
    )
    check_ended(bounded(come_and_go(world, seed)).run(4), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [1, 3])
def test_goes_on_from_a_checkpoint(at: int) -> None:
    config = of("divided", prompts=3, samples=2, chunk_size=15)
    before, after = resumed(config, at, 5, length=long_tailed(5), workers=2, slots=3)
    consumed = [r.request_id for b in before.batches + after.batches for r in b.rollouts]
    assert sorted(consumed) == list(range(30))
