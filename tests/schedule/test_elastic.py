"""Workers that come and go, and a trainer whose devices help for a while."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.simulated import StepCost
from stretto.fleet.simulated import SimulatedFleet
from stretto.records import Harvest, Publish, Start, Stop
from stretto.schedule.elastic import Window
from tests.schedule.fleets import bounded, check_ended, come_and_go
from tests.schedule.runs import Checked, decisions, of, resumed, updates
from tests.world import World, long_tailed

STEP = StepCost(base=1.0, per_token=0.0, per_context=0.0, per_prefill=0.0)


def on_policy(**knobs: Any) -> Any:
    return of("elastic", **{"prompts": 8, "samples": 2, "max_staleness": 0, **knobs})


class TestComingAndGoing:
    def test_what_ran_on_a_lost_worker_goes_on_elsewhere_from_its_tokens(self) -> None:
        world = World(on_policy(local_workers=0), length=lambda r: 100, workers=2, slots=8, cost=STEP)
        world.controller.fleet = SimulatedFleet(world.runtime, world.engines, failures=[(50.5, 1)])
        world.run(1)
        assert world.runtime.now() < 160, "8 go on from 50 of their 100 tokens when the others have ended"
        assert world.ledger.counters["discarded_tokens"] == 0
        generated = sum(engine.metrics()["decode_tokens"] for engine in world.engines)
        assert generated == pytest.approx(16 * 100, abs=16)

    def test_who_comes_pulls_weights_and_begins_while_others_go_on(self) -> None:
        world = World(on_policy(local_workers=0), length=lambda r: 100, workers=2, slots=4, cost=STEP)
        world.controller.fleet = SimulatedFleet(world.runtime, world.engines, arrivals=[(450.0, 1)])
        made = decisions(world)
        world.run(3)
        assert any(isinstance(d, Publish) and list(d.workers) == [1] for d in made)
        assert any(isinstance(d, Start) and d.worker == 1 for d in made)
        assert not any(isinstance(d, Stop) for d in made)
        assert {s for b in world.batches for s in b.staleness} == {0}


class TestLocalWorkers:
    def test_generate_in_the_window_only_and_their_work_is_kept(self) -> None:
        world = World(
            on_policy(window_floor=30.0),
            length=lambda r: 100,
            workers=2,
            slots=8,
            cost=STEP,
            train_seconds=5.0,
        )
        made = decisions(world)
        world.run(1)
        stops = [d for d in made if isinstance(d, Stop)]
        assert len(stops) == 1
        assert stops[0].keep
        first = next(d for d in made if isinstance(d, Start) and d.worker == 0)
        assert set(stops[0].ids) == set(first.ids)
        again = {i for d in made if isinstance(d, Start) and d.worker == 1 for i in d.ids}
        assert set(first.ids) <= again
        assert world.ledger.counters["discarded_tokens"] == 0
        assert world.runtime.now() == pytest.approx(100 + 70 + 5, abs=3)

    def test_the_learner_gets_groups_as_they_are_ready_after_the_window(self) -> None:
        config = on_policy(prompts=8, samples=1, window_floor=5.0)
        world = World(config, length=lambda r: 20 + 10 * r.id, workers=2, slots=8, cost=STEP)
        made = decisions(world)
        world.run(1)
        parts = [d for d in made if isinstance(d, Harvest)]
        assert len(parts) > 4
        assert [d.final for d in parts] == [False] * (len(parts) - 1) + [True]
        assert sorted(i for d in parts for i in d.ids) == list(range(8))

    def test_without_remote_workers_there_is_no_window(self) -> None:
        world = World(on_policy(window_floor=1.0), length=lambda r: 100, workers=1, slots=16, cost=STEP)
        made = decisions(world)
        world.run(2)
        assert not any(isinstance(d, Stop) for d in made)
        assert all(d.final for d in made if isinstance(d, Harvest))

    def test_open_again_when_the_last_remote_worker_is_lost(self) -> None:
        world = World(on_policy(window_floor=10.0), length=lambda r: 100, workers=2, slots=16, cost=STEP)
        world.controller.fleet = SimulatedFleet(world.runtime, world.engines, failures=[(40.5, 1)])
        world.run(1)
        assert world.runtime.now() < 200


class TestWindow:
    def step(
        self, window: Window, start: float, *, generated: float, seconds: float, trained: float
    ) -> float:
        window.open(start)
        window.generated = start + generated
        window.harvested(start + generated, 1000)
        window.adapt(start + seconds, 2, trained)
        return start + seconds

    def test_grows_while_the_trainer_waits_and_shrinks_while_the_others_do(self) -> None:
        window = Window(5.0)
        self.step(window, 0.0, generated=100.0, seconds=110.0, trained=15.0)
        assert window.trainer_bubble == 90.0
        assert window.remote_bubble == 10.0
        assert window.seconds == pytest.approx(5 + 80 / 3)
        before = window.seconds
        self.step(window, 200.0, generated=20.0, seconds=110.0, trained=85.0)
        assert window.seconds == max(5.0, before + (window.trainer_bubble - 90.0) / 3) < before

    def test_is_never_below_its_floor(self) -> None:
        window = Window(5.0)
        self.step(window, 0.0, generated=1.0, seconds=500.0, trained=495.0)
        assert window.seconds == 5.0

    def test_returns_to_the_best_known_when_throughput_falls(self) -> None:
        window = Window(5.0)
        window.seconds = 40.0
        now = self.step(window, 0.0, generated=90.0, seconds=100.0, trained=50.0)  # both wait for 10 s
        assert window.seconds == 40.0
        self.step(
            window, now, generated=150.0, seconds=200.0, trained=60.0
        )  # 100 s against 50 s, half as fast
        assert window.seconds == pytest.approx(0.8 * (40 + 50 / 3) + 0.2 * 40)

    def test_goes_to_the_best_of_a_number_of_workers_when_it_changes(self) -> None:
        window = Window(5.0)
        window.load_state_dict({"seconds": 10.0, "remote": 3, "best": [[2, 50.0, 60.0]]})
        self.step(window, 0.0, generated=90.0, seconds=100.0, trained=80.0)
        assert window.seconds == pytest.approx(0.2 * 10 + 0.8 * 60)

    def test_settles(self) -> None:
        """The step is as long as generation, which local workers speed up, and at least window + training."""
        window, now = Window(5.0), 0.0
        for _ in range(60):
            work = 100.0 - 0.5 * window.seconds
            seconds = max(work, window.seconds + 40.0) + 2.0
            now = self.step(window, now, generated=work, seconds=seconds, trained=40.0)
        assert window.seconds == pytest.approx(40.0, abs=4.0)


@given(st.integers(0, 10**6))
@settings(max_examples=25)
def test_whatever_comes_and_goes(seed: int) -> None:
    draw = random.Random(seed)
    bound = draw.choice([0, 0, 1, 2, None])
    config = of(
        "elastic",
        prompts=draw.randint(1, 10),
        samples=draw.randint(2, 4),
        local_workers=draw.choice([0, 1, 2]),
        window_floor=draw.choice([0.0, 5.0]),
        max_staleness=bound,
        off_policy_strategy=draw.choice(["refresh", "wait", "drop"]),
        refresh_budget=draw.choice([None, 0, 1]),
        running=draw.choice(["continue", "recompute"]),
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
    bounded(come_and_go(world, seed)).run(5)
    check_ended(world, bound)
    if config.tokens_per_update is None and config.off_policy_strategy != "drop":
        assert {len(update) for update in updates(world)} == {config.prompts * config.samples}


@pytest.mark.parametrize("bound", [0, 1])
def test_goes_on_from_a_checkpoint(bound: int) -> None:
    before, after = resumed(
        on_policy(max_staleness=bound, prompts=4), 2, 5, length=long_tailed(5), workers=3, slots=2
    )
    consumed = [r.request_id for b in before.batches + after.batches for r in b.rollouts]
    assert len(consumed) == len(set(consumed)) == 5 * 8
    assert before.controller.schedule.state_dict() is not None
    assert after.controller.schedule.metrics()["schedule/window_seconds"] >= 5.0
