"""A simulated engine's slots: when they are there, and when they are busy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.simulated import StepCost
from stretto.records import Running
from stretto.weights import WeightsRef
from tests.engine.simulated_log import build, lengths, request


def test_slots_are_busy_while_they_decode_and_away_while_the_device_trains() -> None:
    log = build(lengths(10, 20), slots=4, cost=StepCost(base=1.0, per_token=0.0))
    log.engine.start()
    log.engine.submit([request(0), request(1)])
    log.at(5.0, lambda: log.engine.pause(100.0))
    log.run()
    log.at(130.0, lambda: None)
    counted = log.run().engine.metrics()
    assert log.ends()[1][0] == pytest.approx(120.0)
    assert counted["busy_slot_seconds"] == pytest.approx(30.0)
    assert counted["available_slot_seconds"] == pytest.approx(4 * 30.0)
    assert log.engine.metrics()["available_slot_seconds"] == 0.0


def test_metrics_count_the_step_in_hand_up_to_now() -> None:
    log = build(lengths(10), slots=1, cost=StepCost(base=1.0, per_token=0.0))
    log.engine.start()
    log.engine.submit([request(0)])
    busy: list[float] = []
    for when in (2.25, 4.5, 20.0):
        log.at(when, lambda: busy.append(log.engine.metrics()["busy_slot_seconds"]))
    log.run()
    assert busy == pytest.approx([2.25, 2.25, 5.5])


@settings(max_examples=300)
@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(["submit", "pause", "load", "fail", "start", "stop", "metrics"]),
            st.floats(0.001, 0.5),
        ),
        min_size=1,
        max_size=30,
    ),
    running=st.sampled_from(["continue", "recompute", "stop"]),
    late=st.booleans(),
)
def test_slots_are_busy_only_while_they_are_there(
    script: list[tuple[str, float]], running: Running, late: bool
) -> None:
    """Whenever somebody looks, whoever failed in a step or in the trainer's time."""
    log = build(lambda r: 1 + r.id * 7 % 50, slots=3, load_seconds=0.02)
    engine, seen = log.engine, []
    if late:
        engine.absent()
    else:
        engine.start()

    def start() -> None:
        if not engine.alive:
            engine.start()

    commands: dict[str, Callable[[int, float], None]] = {
        "submit": lambda i, _: engine.submit([request(i), request(1000 + i)]),
        "pause": lambda _, seconds: engine.pause(4.0 * seconds),
        "load": lambda i, _: engine.load(WeightsRef(i, "copy", {}), running),
        "fail": lambda *_: engine.fail(),
        "start": lambda *_: start(),
        "stop": lambda i, _: engine.stop([i - 1], [1]),
        "metrics": lambda *_: seen.append(engine.metrics()),
    }
    when = 0.0
    for number, (name, seconds) in enumerate([*script, ("metrics", 9.0)]):
        when += seconds
        log.at(when, partial(commands[name], number, seconds))
    log.run()
    for counted in seen:
        assert -1e-9 <= counted["busy_slot_seconds"] <= counted["available_slot_seconds"] + 1e-9
        assert counted["step_seconds"] <= counted["up_seconds"] + 1e-9
        assert counted["available_slot_seconds"] == pytest.approx(3 * counted["up_seconds"])
    assert sum(counted["up_seconds"] for counted in seen) <= when + 1e-9


def test_a_failure_in_the_trainers_time_gives_back_what_is_left_of_it() -> None:
    log = build(lengths(), slots=4)
    log.engine.start()
    log.at(10.0, lambda: log.engine.pause(20.0))
    log.at(15.0, log.engine.fail)
    log.at(40.0, log.engine.start)
    log.at(41.0, lambda: log.engine.pause(1.0))
    counted: list[float] = []
    for when in (12.0, 20.0, 50.0):
        log.at(when, lambda: counted.append(log.engine.metrics()["up_seconds"]))
    log.run()
    assert counted == [10.0, 0.0, 9.0]
