"""The learner in a thread of its own."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from stretto.buffer import Ledger
from stretto.controller import Controller
from stretto.errors import StrettoError
from stretto.learn.background import BackgroundLearner
from stretto.learn.learner import Learner
from stretto.records import (
    Admit,
    Decision,
    Event,
    Finished,
    FinishReason,
    Harvest,
    Interrupted,
    Prompt,
    Request,
    SamplingParams,
    Scored,
    Start,
    UpdateBatch,
    Updated,
    WorkerUp,
)
from stretto.runtime import LiveRuntime
from stretto.weights import WeightsRef
from tests.learn.rollouts import exact_model, learner, random_batch

PATIENCE = 30.0  # seconds until a test gives up


class Slow:
    """A learner that makes an update when it is allowed to, and notes what it is given."""

    def __init__(self) -> None:
        self.version = 0
        self.given: list[tuple[str, int]] = []
        self.may = threading.Semaphore(0)
        self.at_work = threading.Event()
        self.fails: BaseException | None = None

    def accumulate(self, batch: UpdateBatch) -> None:
        self.given.append(("part", batch.version))

    def update(self, batch: UpdateBatch) -> Updated:
        self.at_work.set()
        assert self.may.acquire(timeout=PATIENCE)
        self.given.append(("whole", batch.version))
        if self.fails is not None:
            raise self.fails
        self.version += 1
        return Updated(self.version)

    def publish(self) -> WeightsRef:
        return WeightsRef(self.version, "copy")


@contextmanager
def beside(
    slow: Any, post: Callable[[Event], None], now: Callable[[], float] = lambda: 0.0
) -> Iterator[BackgroundLearner]:
    background = BackgroundLearner(slow, post, now)
    try:
        yield background
    finally:
        slow.may.release(9)
        background.close()
        assert not background._thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def whole(version: int = 0) -> UpdateBatch:
    return UpdateBatch(version, [])


def part(version: int = 0) -> UpdateBatch:
    return UpdateBatch(version, [], final=False)


def test_hands_over_in_order_and_publishes_what_is_finished() -> None:
    slow, posted = Slow(), list[Event]()
    ticks = itertools.count().__next__  # one second for each part and the update itself
    with beside(slow, posted.append, ticks) as background:
        assert not background.expecting()
        for batch in (part(), part(), whole()):
            background.accumulate(batch) if not batch.final else background.begin(batch)
        assert slow.at_work.wait(PATIENCE)
        assert background.expecting()
        assert (background.publish().version, posted) == (0, [])
        slow.may.release()
        wait_until(lambda: not background.expecting())
        assert (background.publish().version, posted) == (1, [Updated(1, {"time/trainer": 3.0})])
    assert slow.given == [("part", 0), ("part", 0), ("whole", 0)]


def test_new_weights_are_there_when_their_update_is_said_and_not_before() -> None:
    """Whoever asks in between finds the old ones, or both."""
    slow = Slow()
    found: list[Any] = []
    with beside(slow, found.append) as background:
        for version in range(50):
            background.begin(whole(version))
            slow.may.release()
            while (newest := background.publish().version) == version:
                assert len(found) <= version + 1
            assert newest == version + 1
            assert found[version].version == version + 1


def test_what_ends_the_thread_is_raised_where_it_is_waited_for() -> None:
    slow, posted = Slow(), list[Event]()
    with beside(slow, posted.append) as background:
        slow.fails = StrettoError("optimiser step 1: no such luck")
        background.begin(whole())
        slow.may.release()
        with pytest.raises(StrettoError, match="optimiser step 1: no such luck"):
            wait_until(lambda: not background.expecting())
        background.begin(whole())  # whoever goes on notices it at the next wait
        with pytest.raises(StrettoError, match="no such luck"):
            background.expecting()
    assert posted == []


def test_closed_it_gives_up_what_was_handed_over() -> None:
    slow, posted = Slow(), list[Event]()
    with beside(slow, posted.append) as background:
        background.begin(whole())
        background.begin(whole(1))
        assert slow.at_work.wait(PATIENCE)
    assert slow.given == [("whole", 0)]


def test_makes_the_same_steps_with_the_same_threads() -> None:
    """Bit for bit; and what is published is a copy, whichever kind the learner is."""
    batches = [random_batch(seed, version=seed) for seed in range(2)]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    here = learner(exact_model("llama"))
    updates = [here.update(batch) for batch in batches]
    there: Learner = learner(exact_model("llama"), weights="copy")
    posted: list[Event] = []
    threads: list[int] = []
    update = there.update

    def counted(batch: UpdateBatch) -> Updated:
        threads.append(torch.get_num_threads())
        return update(batch)

    there.update = counted  # type: ignore[method-assign]
    background = BackgroundLearner(there, posted.append)
    try:
        published = [background.publish()]
        for number, batch in enumerate(batches):
            background.begin(batch)
            wait_until(lambda number=number: len(posted) > number)  # type: ignore[misc]
            published.append(background.publish())
    finally:
        background.close()
        torch.set_num_threads(before)
    assert threads == [3, 3]
    for mine, theirs in zip(updates, posted, strict=True):
        assert isinstance(theirs, Updated)
        np.testing.assert_equal({**mine.metrics, "time/trainer": 0.0}, theirs.metrics)
    assert [ref.version for ref in published] == [0, 1, 2]
    last = published[-1].tensors
    for name, weight in here.model.named_parameters():
        assert weight.equal(last[name])
        assert not last[name].equal(published[0].tensors[name])


# ---- in the loop ------------------------------------------------------------------------------------------


class Overlapping:
    """Two groups: trains on the first, and starts the second in the same breath."""

    overlaps = True

    def decide(self, view: Any, events: Sequence[Event]) -> list[Decision]:
        if any(isinstance(event, WorkerUp) for event in events):
            return [Admit(2, 2)]
        if len(view.scored) >= 2 and not view.updating:
            return [Harvest(list(view.scored)), *self.start(view)]
        return [] if view.num_running(0) or view.scored or view.updating else self.start(view)

    def start(self, view: Any) -> list[Decision]:
        return [Start(list(view.waiting)[:2], 0)] if view.waiting else []


class Loop:
    """The real loop around a learner; a response is scored as soon as it is started."""

    def __init__(self) -> None:
        self.runtime, self.slow = LiveRuntime(), Slow()
        self.ledger = Ledger(SamplingParams(), now=self.runtime.now)
        self.log: list[str] = []

    def run(self, done: Callable[[], bool]) -> Controller:
        with beside(self.slow, self.runtime.post) as background:
            self.runtime.expecting = background.expecting
            us: Any = self  # fleet, rewards, prompts, observer
            schedule: Any = Overlapping()
            controller = Controller(self.runtime, self.ledger, schedule, us, us, us, background, us)
            controller.run(done)
        return controller

    def start(self) -> None:
        self.runtime.post(WorkerUp(0, 4, 0))

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        return [(Prompt(0, "0", 0, np.array([1]), {}), 0)] * count

    def submit(self, *what: Any) -> None:
        if len(what) == 1:
            return  # responses that have ended: scored below
        requests: Sequence[Request] = what[1]
        self.log.append(f"start {[request.id for request in requests]}")
        self.started(requests)

    def started(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.finish(request)

    def finish(self, request: Request) -> None:
        self.runtime.post(Finished(0, request.id, request.attempt, FinishReason.STOP))
        self.runtime.post(Scored(request.id, request.attempt, 1.0))

    def stop(self, *what: Any) -> None: ...

    def harvested(self, batch: UpdateBatch) -> None:
        self.log.append(f"update {batch.version}: {[r.request_id for r in batch.rollouts]}")

    def updated(self, event: Updated) -> None:
        self.log.append(f"updated {event.version}")


def test_work_is_given_out_before_the_learner_gets_its_batch() -> None:
    class During(Loop):
        def started(self, requests: Sequence[Request]) -> None:
            super().started(requests)
            if requests[0].id == 2:  # without it the update would never end
                self.slow.may.release()

    loop = During()
    loop.run(lambda: loop.ledger.version == 1)
    assert loop.log == ["start [0, 1]", "start [2, 3]", "update 0: [0, 1]", "updated 1"]


def test_an_interruption_waits_for_the_update_and_decides_nothing_more() -> None:
    class Stopped(Loop):
        def harvested(self, batch: UpdateBatch) -> None:
            super().harvested(batch)
            self.runtime.post(Interrupted(15))
            threading.Timer(0.3, self.slow.may.release).start()

    loop = Stopped()
    controller = loop.run(lambda: False)
    assert controller.interrupted
    assert loop.log == ["start [0, 1]", "start [2, 3]", "update 0: [0, 1]", "updated 1"]
    assert len(loop.ledger.scored) == 2  # taken in meanwhile, but not trained on


def test_a_failed_update_ends_the_loop() -> None:
    loop = Loop()
    loop.slow.fails = StrettoError("optimiser step 1: no such luck")
    loop.slow.may.release()
    with pytest.raises(StrettoError, match="optimiser step 1: no such luck"):
        loop.run(lambda: False)
