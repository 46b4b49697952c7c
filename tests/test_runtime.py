from __future__ import annotations

import os
import signal
import threading

import pytest

from stretto.records import Event, Interrupted, Loaded, Timer, WorkerDown
from stretto.runtime import LiveRuntime, SimulatedRuntime


class Engine:
    """Has `work` steps to make, each of which loads the next version."""

    def __init__(self, work: int) -> None:
        self.work = work

    def busy(self) -> bool:
        return self.work > 0

    def step(self) -> list[Event]:
        self.work -= 1
        return [Loaded(0, self.work)]


def test_what_has_arrived_comes_before_the_next_step() -> None:
    runtime = LiveRuntime()
    runtime.local = Engine(2)
    runtime.post(WorkerDown(1))
    runtime.post(WorkerDown(2))
    assert runtime.wait() == [WorkerDown(1), WorkerDown(2)]
    assert runtime.wait() == [Loaded(0, 1)]


def test_an_event_of_another_thread_ends_the_wait() -> None:
    runtime = LiveRuntime()
    runtime.expecting = lambda: True
    threading.Timer(0.05, runtime.post, [WorkerDown(3)]).start()
    assert runtime.wait() == [WorkerDown(3)]


def test_a_timer_comes_at_its_time() -> None:
    runtime = LiveRuntime()
    until = runtime.now() + 0.02
    assert runtime.wait(until) == [Timer()]
    assert runtime.now() >= until


def test_a_stand_still_is_an_error_and_not_an_endless_wait() -> None:
    with pytest.raises(RuntimeError, match="stand"):
        LiveRuntime().wait()
    with pytest.raises(RuntimeError, match="stand"):
        SimulatedRuntime().wait()


def test_a_resumed_clock_goes_on_where_it_was_saved() -> None:
    runtime = LiveRuntime()
    runtime.continue_from(1000.0)
    assert 1000.0 <= runtime.now() < 1010.0


def test_the_first_signal_is_an_event_the_second_ends_at_once() -> None:
    runtime = LiveRuntime()
    before = signal.getsignal(signal.SIGTERM)
    with runtime.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert runtime.wait() == [Interrupted(signal.SIGTERM)]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_counts_as_one_though_the_first_came_in_an_evaluation() -> None:
    run, evaluation = LiveRuntime(), LiveRuntime()
    with run.signals():
        with evaluation.signals():
            os.kill(os.getpid(), signal.SIGINT)
            assert evaluation.wait() == [Interrupted(signal.SIGINT)]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    seen: list[object] = []

    def enter() -> None:
        with LiveRuntime().signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_simulated_time_leaps_and_keeps_the_order_of_posting() -> None:
    runtime = SimulatedRuntime()
    runtime.post(WorkerDown(1), delay=5.0)
    runtime.post(WorkerDown(2), delay=5.0)
    runtime.call_at(2.0, list)
    assert runtime.wait(until=4.0) == [Timer()]
    assert runtime.now() == 4.0
    assert runtime.wait() == [WorkerDown(1), WorkerDown(2)]
    assert runtime.now() == 5.0


def test_a_call_can_tell_which_one_it_is() -> None:
    runtime, called = SimulatedRuntime(), list[int]()

    def tick() -> list[Event]:
        called.append(runtime.called)
        return []

    late = runtime.call_at(2.0, tick)
    early = runtime.call_at(1.0, tick)
    assert runtime.wait(until=3.0) == [Timer()]
    assert called == [early, late]
    assert early != late
