"""A simulated world around the real ledger, controller and schedules."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from stretto.buffer import Ledger
from stretto.config import ScheduleConfig
from stretto.controller import Controller
from stretto.engine.simulated import SimulatedEngine, StepCost
from stretto.fleet.in_process import InProcessFleet
from stretto.history.lengths import Ended, LengthHistory
from stretto.records import (
    Event,
    Prompt,
    Request,
    Rollout,
    SamplingParams,
    Scored,
    UpdateBatch,
    Updated,
)
from stretto.runtime import SimulatedRuntime
from stretto.schedule import ledger_options, make_schedule
from stretto.weights import WeightsRef
from tests.invariants import check


def prompt(row: int) -> Prompt:
    return Prompt(row, f"{row:08x}", 0, np.array([row % 7, 1, 2]), {})


class Rows:
    """Rows 0, 1, 2 ... of `count`, again and again."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        first, self.taken = self.taken, self.taken + count
        return [(prompt(i % self.count), i // self.count) for i in range(first, self.taken)]


class World:
    """Runs a schedule to `steps` updates; checks the ledger after every batch of events."""

    def __init__(
        self,
        config: ScheduleConfig,
        *,
        length: Callable[[Request], int],
        workers: int = 1,
        slots: int = 16,
        rows: int = 64,
        reward_seconds: float = 0.05,
        train_seconds: float = 1.0,
        max_new_tokens: int = 1000,
        cost: StepCost | None = None,
        checked: bool = True,
        reward: Callable[[Rollout], float] = lambda rollout: float(rollout.request_id % 2),
    ) -> None:
        self.runtime = SimulatedRuntime()
        self.ledger = Ledger(
            SamplingParams(max_new_tokens=max_new_tokens), now=self.runtime.now, **ledger_options(config)
        )
        self.lengths = LengthHistory()
        self.engines = [
            SimulatedEngine(self.runtime, length, worker=w, slots=slots, cost=cost) for w in range(workers)
        ]
        self.reward = reward
        self.reward_seconds, self.train_seconds, self.checked = reward_seconds, train_seconds, checked
        self.version = 0
        self.batches: list[UpdateBatch] = []
        self.events = 0
        self.controller = Controller(
            self.runtime,
            self.ledger,
            make_schedule(config, self.lengths),
            InProcessFleet(self.engines, self.runtime.post),
            rewards=self,
            prompts=Rows(rows),
            learner=self,
            observer=self,
        )
        apply = self.ledger.apply

        def apply_and_check(events: Sequence[Event]) -> list[Rollout]:
            self.events += len(events)
            ended = apply(events)
            if self.checked:
                check(self.ledger)
            return ended

        self.ledger.apply = apply_and_check  # type: ignore[method-assign, assignment]

    def run(self, steps: int) -> World:
        self.controller.run(lambda: self.ledger.version >= steps)
        return self

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            scored = Scored(rollout.request_id, rollout.attempt, self.reward(rollout))
            self.runtime.post(scored, self.reward_seconds)

    def begin(self, batch: UpdateBatch) -> None:
        self.version += 1
        self.runtime.post(Updated(self.version), self.train_seconds)

    def accumulate(self, batch: UpdateBatch) -> None: ...

    def publish(self) -> WeightsRef:
        return WeightsRef(self.version, "copy", {})

    def harvested(self, batch: UpdateBatch) -> None:
        self.batches.append(batch)

    def updated(self, event: Updated) -> None:
        finished = [r for r in self.ledger.take_finished() if r.finish_reason]
        length = self.ledger.view.length  # the simulated engine leaves the tokens out
        self.lengths.observe_lengths([Ended.of(r, length(r.request_id)) for r in finished])

    def publishing(self) -> None: ...

    def published(self) -> None: ...


def long_tailed(seed: int, cap: int = 1000) -> Callable[[Request], int]:
    """Lognormal lengths, a function of the request's key so that a restart has the same one."""

    def length(request: Request) -> int:
        return max(1, min(cap, int(random.Random(seed ^ request.key).lognormvariate(3.0, 1.2))))

    return length
