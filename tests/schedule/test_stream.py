from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.records import Harvest, Request, Start, WorkerDown
from stretto.schedule.stream import split
from tests.schedule.runs import any_world, by_order, check_consumed, decisions, of, resumed, tokens, updates
from tests.world import World, long_tailed


@settings(max_examples=20)
@given(seed=st.integers(0, 100_000))
def test_every_response_is_consumed_once_and_on_policy(seed: int) -> None:
    world = any_world("stream", seed)
    world.run(4)
    check_consumed(world)


def test_each_group_goes_to_the_learner_when_it_is_ready() -> None:
    config = of("stream", prompts=3, samples=2)
    world = World(config, length=by_order([5, 30, 8, 9, 70, 20]), slots=6, reward_seconds=0)
    made = decisions(world)
    given_at: list[float] = []
    harvested = world.harvested

    def note(batch: object) -> None:
        harvested(batch)  # type: ignore[arg-type]
        given_at.append(world.runtime.now())

    world.harvested = note  # type: ignore[method-assign]
    world.run(1)
    harvests = [Harvest([2, 3], final=False), Harvest([0, 1], final=False), Harvest([4, 5], final=True)]
    assert [d for d in made if isinstance(d, Harvest)] == harvests
    assert given_at == sorted(set(given_at))
    assert world.controller.schedule.metrics()["schedule/parts"] == 3


def test_an_update_is_synchronous_update() -> None:
    knobs = {"prompts": 5, "samples": 3}
    world = World(of("stream", **knobs), length=long_tailed(1), workers=3, slots=2, rows=10).run(8)
    same = World(of("synchronous", **knobs), length=long_tailed(1), rows=10).run(8)
    assert [tokens(u) for u in updates(world)] == [tokens(u) for u in updates(same)]
    assert all(s == 0 for b in world.batches for s in b.staleness)


def by_row(request: Request) -> int:
    """Prompts 0 .. 9: one in five is ten times as long."""
    return 200 if request.group % 5 == 4 else 20


def test_predicted_long_ones_have_workers_of_their_own() -> None:
    config = of("stream", prompts=10, samples=4, long_workers=2)
    world = World(config, length=by_row, workers=4, slots=10, rows=10)
    made = decisions(world)
    world.run(1)
    assert world.controller.schedule.metrics()["schedule/long_workers"] == 0  # nothing known yet
    del made[:]
    world.run(3)
    starts = [d for d in made if isinstance(d, Start)]
    length = {i: by_row_of(i) for d in starts for i in d.ids}
    where = {worker: {length[i] for d in starts if d.worker == worker for i in d.ids} for worker in range(4)}
    assert where == {0: {200}, 1: {200}, 2: {20}, 3: {20}}
    assert world.controller.schedule.metrics()["schedule/long_workers"] == 2


def by_row_of(request_id: int) -> int:
    return 200 if request_id // 4 % 5 == 4 else 20


def test_the_longest_start_first_on_their_worker() -> None:
    lengths = [10, 40, 20, 80, 30, 60]
    config = of("stream", prompts=6, samples=1, long_workers=1, long_share=0.3)
    world = World(config, length=lambda r: lengths[r.group % 6], workers=2, slots=1, rows=6)
    made = decisions(world)
    world.run(1)
    del made[:]
    world.run(2)
    order = {
        w: [lengths[i % 6] for d in made if isinstance(d, Start) and d.worker == w for i in d.ids]
        for w in (0, 1)
    }
    assert order[0][:2] == [80, 60]
    assert order[1][:2] == [40, 30]
    assert sorted(order[0] + order[1]) == sorted(lengths)


def test_a_pool_with_nothing_left_helps_the_other() -> None:
    """The second time round, the prompts that were long are short: their worker would have nothing to do."""
    first, second = [90, 10, 10, 10], [5, 50, 50, 50]
    config = of("stream", prompts=4, samples=1, long_workers=1, long_share=0.25)
    world = World(config, length=lambda r: (first + second)[r.group % 8], workers=2, slots=1, rows=4)
    made = decisions(world)
    world.run(1)
    del made[:]
    world.run(2)
    assert [i % 4 for d in made if isinstance(d, Start) and d.worker == 0 for i in d.ids][:2] == [0, 2]


class TestSplit:
    @pytest.mark.parametrize("seed", range(20))
    def test_no_other_split_ends_sooner(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        lengths = draw.lognormal(6, 1, draw.integers(20, 500))
        workers, slots, cost = (
            int(draw.integers(2, 20)),
            int(draw.integers(1, 30)),
            float(draw.uniform(0, 0.2)),
        )
        long = round(0.2 * lengths.size)
        tail, regular = np.quantile(lengths, 0.9), np.quantile(lengths, 0.5)

        def seconds(n: int, pool: int, length: float) -> float:
            batch = min(n / pool, slots)
            return (1 + cost * batch) * length * max(n / pool / slots, 1)

        times = [
            max(seconds(long, w, tail), seconds(lengths.size - long, workers - w, regular))
            for w in range(1, workers)
        ]
        assert times[split(lengths, long, workers, slots, cost) - 1] == min(times)

    def test_longer_tails_get_more_workers(self) -> None:
        found = []
        for sigma in (0.1, 0.5, 1.0, 1.5):
            lengths = np.exp(sigma * np.linspace(-2, 2, 1000))
            found.append(split(lengths, 200, 32, 16, 0.05))
        assert found == sorted(found)
        assert found[-1] > found[0]


def test_useless_groups_are_replaced() -> None:
    config = of("stream", prompts=4, samples=2, drop_zero_variance=True)
    world = World(
        config,
        length=long_tailed(2),
        workers=2,
        slots=4,
        reward=lambda r: float(r.sample_index) if r.prompt.row % 3 else 1.0,
    ).run(6)
    assert {r.prompt.row % 3 for b in world.batches for r in b.rollouts} == {1, 2}
    assert {len(u) for u in updates(world)} == {8}


def test_updates_by_token_budget_take_the_rest_over() -> None:
    config = of("stream", prompts=4, samples=2, tokens_per_update=250)
    world = World(config, length=long_tailed(3), workers=2, slots=3).run(12)
    for update in updates(world):
        sizes = [r.token_ids.size for r in update]
        assert sum(sizes) >= 250
    ids = [r.request_id for u in updates(world) for r in u]
    assert len(ids) == len(set(ids))
    assert world.ledger.alive < 4 * 4


def test_a_lost_worker_is_replaced_in_the_plan() -> None:
    config = of("stream", prompts=10, samples=4, long_workers=1)
    world = World(config, length=by_row, workers=3, slots=10, rows=10).run(1)
    world.runtime.post(WorkerDown(0), delay=1.5)
    world.run(4)
    assert {len(u) for u in updates(world)} == {40}
    assert world.controller.schedule.metrics()["schedule/long_workers"] == 1


def test_goes_on_after_a_resume() -> None:
    world: dict[str, Any] = {"length": long_tailed(7), "workers": 2, "slots": 5}
    _, after = resumed(of("stream", prompts=4, samples=2), 4, 6, **world)
    whole = World(of("stream", prompts=4, samples=2), **world).run(6)
    assert [tokens(u) for u in updates(whole)][4:] == [tokens(u) for u in regrouped(after)]


def regrouped(world: World) -> list[list]:  # type: ignore[type-arg]
    """Updates of a run that did not begin with the first."""
    versions = sorted({b.version for b in world.batches})
    return [[r for b in world.batches if b.version == v for r in b.rollouts] for v in versions]
