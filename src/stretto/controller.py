"""The loop: commands out, events in. The same one for every schedule, live or simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stretto.buffer import Ledger
from stretto.fleet import Fleet
from stretto.records import (
    Admit,
    Event,
    Harvest,
    Interrupted,
    Prompt,
    Publish,
    Rollout,
    Start,
    Stop,
    Timer,
    UpdateBatch,
    Updated,
    Wake,
)
from stretto.runtime import Runtime
from stretto.schedule import Schedule
from stretto.weights import WeightsRef


class Prompts(Protocol):
    """The data: rows for as long as they are asked for."""

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        """The next rows, each with its visit number."""


class Rewards(Protocol):
    """Answers responses that ended a turn, each by one `Scored` or `Observed` in the inbox."""

    def submit(self, rollouts: Sequence[Rollout]) -> None: ...


class Learner(Protocol):
    """Makes optimiser steps; `begin` returns at once and ends in `Updated` (in process it may compute
    first).
    """

    def begin(self, batch: UpdateBatch) -> None: ...

    def publish(self) -> WeightsRef: ...


class Observer(Protocol):
    """Is told what happens; decides nothing."""

    def harvested(self, batch: UpdateBatch) -> None:
        """Before the learner begins with a batch."""

    def updated(self, event: Updated) -> None:
        """At the boundary between two optimiser steps: the ledger stands, the schedule has not yet gone on."""

    def publishing(self) -> None:
        """Before new weights go to workers."""

    def published(self) -> None:
        """After they have been sent; in process, taken."""


class Controller:
    """Knows the protocols and the decision table, and no component by name."""

    def __init__(
        self,
        runtime: Runtime,
        ledger: Ledger,
        schedule: Schedule,
        fleet: Fleet,
        rewards: Rewards,
        prompts: Prompts,
        learner: Learner,
        observer: Observer,
    ) -> None:
        self.runtime = runtime
        self.ledger = ledger
        self.schedule = schedule
        self.fleet = fleet
        self.rewards = rewards
        self.prompts = prompts
        self.learner = learner
        self.observer = observer
        self.wake: float | None = None
        self.interrupted = False
        self._table: dict[type, Callable[[Any], None]] = {
            Admit: self._admit,
            Start: self._start,
            Stop: self._stop,
            Harvest: self._harvest,
            Publish: self._publish,
            Wake: self._wake,
        }

    def run(self, done: Callable[[], bool]) -> None:
        """Until `done()`, or until SIGINT/SIGTERM asks for an end (`interrupted` is then True)."""
        self.fleet.start()
        while not (done() or self.interrupted):
            events = self.runtime.wait(self.wake)
            self.rewards.submit(self.ledger.apply(events))
            self._observe(events)
            if done() or self.interrupted:
                return
            for decision in self.schedule.decide(self.ledger.view, events):
                self._table[type(decision)](decision)

    def _observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Updated):
                self.observer.updated(event)
            elif isinstance(event, Timer):
                self.wake = None
            elif isinstance(event, Interrupted):
                self.interrupted = True

    def _admit(self, decision: Admit) -> None:
        admitted = self.ledger.admit(self.prompts.next(decision.prompts), decision.samples_each)
        self.runtime.post(admitted)

    def _start(self, decision: Start) -> None:
        self.fleet.submit(decision.worker, self.ledger.start(decision.ids, decision.worker))

    def _stop(self, decision: Stop) -> None:
        for worker, (ids, attempts) in self.ledger.stop(decision.ids, decision.keep).items():
            self.fleet.stop(worker, ids, attempts)

    def _harvest(self, decision: Harvest) -> None:
        batch = self.ledger.harvest(decision.ids)
        self.observer.harvested(batch)
        self.learner.begin(batch)

    def _publish(self, decision: Publish) -> None:
        self.observer.publishing()
        self.fleet.load(self.learner.publish(), decision.workers, decision.running)
        self.observer.published()

    def _wake(self, decision: Wake) -> None:
        self.wake = decision.at
