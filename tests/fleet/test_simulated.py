from __future__ import annotations

import numpy as np
import pytest

from stretto.engine.simulated import SimulatedEngine, StepCost
from stretto.fleet.simulated import SimulatedFleet
from stretto.records import Event, Leapt, Request, SamplingParams, WorkerDown, WorkerUp
from stretto.runtime import SimulatedRuntime

NONE = np.zeros(0, np.int64)


def request(number: int) -> Request:
    return Request(number, 1, number, NONE, NONE, 0, number, SamplingParams(max_new_tokens=1000))


class Fleet:
    def __init__(self, workers: int, **values: object) -> None:
        self.runtime = SimulatedRuntime()
        cost = StepCost(base=1.0, per_token=0.0)
        engines = [
            SimulatedEngine(self.runtime, lambda _: 20, worker=w, slots=2, cost=cost) for w in range(workers)
        ]
        self.fleet = SimulatedFleet(self.runtime, engines, **values)  # type: ignore[arg-type]

    def run(self) -> list[tuple[float, Event]]:
        """All that happens until nothing is left."""
        seen: list[tuple[float, Event]] = []
        while True:
            try:
                events = self.runtime.wait()
            except RuntimeError:
                return seen
            seen += [(self.runtime.now(), event) for event in events]


def changes(seen: list[tuple[float, Event]]) -> list[tuple[float, str, int]]:
    return [
        (when, type(event).__name__, event.worker)
        for when, event in seen
        if isinstance(event, (WorkerUp, WorkerDown))
    ]


def test_workers_come_and_go_at_their_times() -> None:
    world = Fleet(3, arrivals=[(5.0, 2), (9.0, 0)], failures=[(7.0, 0)])
    world.fleet.start()
    assert changes(world.run()) == [
        (0.0, "WorkerUp", 0),
        (0.0, "WorkerUp", 1),
        (5.0, "WorkerUp", 2),
        (7.0, "WorkerDown", 0),
        (9.0, "WorkerUp", 0),
    ]


def test_an_arrival_of_one_that_is_there_and_a_failure_of_one_that_is_not_change_nothing() -> None:
    world = Fleet(1, arrivals=[(2.0, 0), (3.0, 0)], failures=[(1.0, 0), (1.5, 0)])
    world.fleet.start()
    assert changes(world.run()) == [(0.0, "WorkerUp", 0), (1.0, "WorkerDown", 0), (2.0, "WorkerUp", 0)]


def test_reports_come_while_something_runs_and_then_stop() -> None:
    world = Fleet(2, report_seconds=6.0)
    world.fleet.start()
    world.fleet.submit(1, [request(0)])
    told = [(when, e.count) for when, e in world.run() if isinstance(e, Leapt)]
    assert told == [(6.0, 6), (12.0, 6), (18.0, 6), (20.0, 2)]


def test_slots_are_there_from_arrival_to_failure_but_for_the_trainers_time() -> None:
    world = Fleet(2, arrivals=[(4.0, 1)], failures=[(10.0, 0)])
    world.fleet.start()

    def pause() -> list[Event]:
        world.fleet.pause(1.0, [0])
        return []

    world.runtime.call_at(6.0, pause)
    world.runtime.call_at(20.0, list)
    world.run()
    counted = world.fleet.metrics()
    assert counted["available_slot_seconds"] == pytest.approx(2 * (9.0 + 16.0))
