"""A worker that is started in a lost one's place has another number, and is what that one was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.buffer import Ledger
from stretto.engine.simulated import StepCost
from stretto.fleet.simulated import SimulatedFleet
from stretto.records import Event, SamplingParams, Start, Stop, WorkerDown, WorkerUp
from stretto.schedule.histopipe import HistoPipe
from stretto.schedule.stream import Stream
from tests.schedule.runs import decisions, of
from tests.schedule.test_stream import by_row
from tests.world import World

STEP = StepCost(base=1.0, per_token=0.0, per_context=0.0, per_prefill=0.0)


def with_replacement(world: World, lost: int, when: float) -> World:
    """The world's last engine comes up soon after worker `lost` goes down, in its place."""
    last = len(world.engines) - 1
    world.controller.fleet = SimulatedFleet(
        world.runtime, world.engines, failures=[(when, lost)], arrivals=[(when + 2.0, last)]
    )
    apply = world.ledger.apply

    def placed(events: Sequence[Event]) -> Any:
        for event in events:
            if isinstance(event, WorkerUp) and event.worker == last:
                event.place = lost
        return apply(events)

    world.ledger.apply = placed  # type: ignore[method-assign, assignment]
    return world


def test_the_line_of_workers_is_one_of_places() -> None:
    ledger = Ledger(SamplingParams())
    ledger.apply([WorkerUp(1, 4, 0, 1), WorkerUp(0, 4, 0, 0), WorkerUp(2, 4, 0)])
    assert ledger.view.line() == [0, 1, 2]
    ledger.apply([WorkerDown(0), WorkerUp(3, 4, 0, 0)])
    assert ledger.view.line() == [3, 1, 2]


def test_elastic_knows_the_trainers_devices_again() -> None:
    config = of("elastic", prompts=8, samples=2, max_staleness=0, local_workers=1, window_floor=30.0)
    world = with_replacement(World(config, length=lambda r: 100, workers=3, slots=8, cost=STEP), 0, 5.0)
    made = decisions(world)
    world.run(3)
    on_last = {i for d in made if isinstance(d, Start) and d.worker == 2 for i in d.ids}
    stopped = [set(d.ids) for d in made if isinstance(d, Stop)]
    assert on_last
    assert any(ids & on_last for ids in stopped), "its window closes, as that of the one before it"
    remote = {i for d in made if isinstance(d, Start) and d.worker == 1 for i in d.ids}
    assert not any(ids & (remote - on_last) for ids in stopped)


def test_stream_gives_the_long_ones_to_who_is_in_the_first_place() -> None:
    config = of("stream", prompts=10, samples=4, long_workers=1)
    world = with_replacement(World(config, length=by_row, workers=4, slots=10, rows=10, cost=STEP), 0, 5.0)
    world.run(3)
    assert isinstance(world.controller.schedule, Stream)
    assert world.controller.schedule._long == {3}


def test_histopipe_keeps_its_line() -> None:
    config = of("histopipe", prompts=6, samples=2, bands=3)
    world = with_replacement(World(config, length=by_row, workers=4, slots=4, rows=6, cost=STEP), 0, 5.0)
    world.run(4)
    schedule = world.controller.schedule
    assert isinstance(schedule, HistoPipe)
    assert schedule.batches
    assert all([w for part in b.workers for w in part] in ([3, 1, 2], [2, 1, 3]) for b in schedule.batches)
