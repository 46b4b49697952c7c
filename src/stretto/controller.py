"""The loop: commands out, events in. The same one for every schedule, live or simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stretto.buffer import Ledger
from stretto.fleet import Fleet
from stretto.records import (
    Admit,
    Decision,
    Discard,
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

OBSERVED = frozenset((Updated, Timer, Interrupted))
"""Events that concern the controller itself."""


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

    def accumulate(self, batch: UpdateBatch) -> None:
        """Take a part of the next update in; no optimiser step yet. May compute before it returns."""

    def publish(self) -> WeightsRef: ...


class Observer(Protocol):
    """Is told what happens; decides nothing."""

    def harvested(self, batch: UpdateBatch) -> None:
        """Before the learner gets a batch, or a part of one (`batch.final`)."""

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
        self._batches: list[UpdateBatch] = []  # for the learner, when all decisions have been carried out
        self._table: dict[type, Callable[[Any], None]] = {
            Admit: self._admit,
            Start: self._start,
            Stop: self._stop,
            Discard: self._discard,
            Harvest: self._harvest,
            Publish: self._publish,
            Wake: self._wake,
        }

    def run(self, done: Callable[[], bool]) -> None:
        """Until `done()`, or until SIGINT/SIGTERM asks for an end (`interrupted` is then True)."""
        self.fleet.start()
        ledger, wait, submit = self.ledger, self.runtime.wait, self.rewards.submit
        # An update that the learner is at is ended first: its work would be lost, and the weights may have changed.
        over = done()
        while not (over or (self.interrupted and not ledger.updating)):
            events = wait(self.wake)
            ended = ledger.apply(events)
            if ledger.stops:
                self._send_stops()
            submit(ended)
            for event in events:
                if type(event) in OBSERVED:
                    self._observe(event)
            over = done()
            if not (over or self.interrupted):
                decisions = self.schedule.decide(ledger.view, events)
                if decisions:
                    self._carry_out(decisions)
                    over = done()

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            self._table[type(decision)](decision)
        if not self._batches:
            return
        # Last, for in process the learner computes now: by then everybody has been given work.
        batches, self._batches = self._batches, []
        for batch in batches:
            self.observer.harvested(batch)
            if batch.final:
                self.learner.begin(batch)
            else:
                self.learner.accumulate(batch)

    def _observe(self, event: Event) -> None:
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
        requests = self.ledger.start(decision.ids, decision.worker, decision.max_new)
        self.fleet.submit(decision.worker, requests)

    def _stop(self, decision: Stop) -> None:
        self.ledger.stop(decision.ids, decision.keep)
        self._send_stops()

    def _discard(self, decision: Discard) -> None:
        self.ledger.discard(decision.ids, decision.reason)
        self._send_stops()

    def _harvest(self, decision: Harvest) -> None:
        self._batches.append(self.ledger.harvest(decision.ids, decision.final))
        self._send_stops()

    def _send_stops(self) -> None:
        stops = self.ledger.take_stops()
        if stops:
            for worker, (ids, attempts) in stops.items():
                self.fleet.stop(worker, ids, attempts)

    def _publish(self, decision: Publish) -> None:
        self.observer.publishing()
        self.fleet.load(self.learner.publish(), decision.workers, decision.running)
        self.observer.published()

    def _wake(self, decision: Wake) -> None:
        self.wake = decision.at
