"""What is around the ledger in a simulated world: engines that report tokens, a task, a learner."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from stretto.engine.responses import uniform
from stretto.engine.simulated import SimulatedEngine
from stretto.fleet.simulated import SimulatedFleet
from stretto.records import (
    Event,
    Leapt,
    Observed,
    Progress,
    Prompt,
    Request,
    Rollout,
    Running,
    Scored,
    State,
    Timer,
)
from stretto.runtime import SimulatedRuntime
from stretto.weights import WeightsRef
from tests.simulation.books import Books
from tests.simulation.scenario import Cluster, Scenario


class BusyRuntime(SimulatedRuntime):
    """Hands over at once all that comes within a drawn time of an event, as a busy controller finds it."""

    def __init__(self, seconds: float, random: Random) -> None:
        super().__init__()
        self._seconds, self._random = seconds, random

    def wait(self, until: float | None = None) -> list[Event]:
        events = super().wait(until)
        if self._seconds:
            end = self.now() + self._seconds * self._random.random() ** 4
            while not isinstance((more := super().wait(end))[0], Timer):
                events += more
        return events


class Engine(SimulatedEngine):
    """Reports tokens that are a function of key, place and weights; their log-probs tell weights and place."""

    def __init__(self, runtime: SimulatedRuntime, scenario: Scenario, worker: int) -> None:
        cluster, self.workload = scenario.cluster, scenario.workload
        super().__init__(
            runtime,
            lambda request: self.workload.length(request.key, request.turn_start, self.version),
            worker=worker,
            slots=cluster.slots[worker],
            cost=cluster.cost,
            load_seconds=cluster.load_seconds[worker],
            kv_tokens=cluster.kv_tokens,
            speed=(lambda request: cluster.speed) if cluster.speed != 1.0 else None,
            agreement=cluster.agreement,
        )
        self.tells = scenario.tokens
        self._told: dict[tuple[int, int], tuple[int, int]] = {}  # of a request's attempt: key, tokens so far

    def submit(self, requests: Sequence[Request]) -> None:
        self._told |= {(r.id, r.attempt): (r.key, r.token_ids.size) for r in requests}
        super().submit(requests)

    def _gathered(self) -> list[Event]:
        events = super()._gathered()
        leaps = [event for event in events if isinstance(event, Leapt)]
        if self.tells and leaps:
            rows = np.array([(leapt.id, leapt.attempt, leapt.count) for leapt in leaps], np.int64)
            events[: len(leaps)] = [Progress(self.worker, rows[:, 0], rows[:, 1], rows[:, 2], self.version)]
        if self.tells and events and isinstance(events[0], Progress):
            progress = events[0]
            where = []
            columns = (progress.ids.tolist(), progress.attempts.tolist(), progress.counts.tolist())
            for id, attempt, count in zip(*columns, strict=True):
                key, first = self._told[id, attempt]
                self._told[id, attempt] = key, first + count
                where += [(key, first + i) for i in range(count)]
            token, version = self.workload.token, self.version
            progress.token_ids = np.array([token(key, place, version) for key, place in where], np.int64)
            progress.logprobs = np.full(len(where), -1.0 - version)
            progress.raw_logprobs = -1.0 - np.array([place for _, place in where], np.float64)
        return events

    def holds(self, request_id: int, attempt: int) -> bool:
        """Whether it runs or queues this attempt."""
        held = [response.request for response in (*self._running.values(), *self._queue)]
        return (request_id, attempt) in ((request.id, request.attempt) for request in held)

    def check_slots(self) -> None:
        running = [response.slot for response in self._running.values()]
        assert len(running) == len(set(running)) <= self.slots, f"worker {self.worker}: slots {running}"
        assert sorted(running + self._free) == list(range(self.slots)), f"worker {self.worker}: free slots"


class Fleet(SimulatedFleet):
    """Tells the books what workers are told."""

    def __init__(
        self, runtime: SimulatedRuntime, engines: Sequence[Engine], cluster: Cluster, random: Random
    ) -> None:
        self.books: Books | None = None
        arrivals, failures = changes(cluster, random, runtime.now())
        super().__init__(
            runtime, engines, arrivals=arrivals, failures=failures, report_seconds=cluster.report_seconds
        )

    def submit(self, worker: int, requests: Sequence[Request]) -> None:
        assert self.books is not None
        self.books.submit(worker, requests)
        super().submit(worker, requests)

    def stop(self, worker: int, ids: Sequence[int], attempts: Sequence[int]) -> None:
        assert self.books is not None
        self.books.told_to_stop(worker, ids, attempts)
        super().stop(worker, ids, attempts)

    def load(self, ref: WeightsRef, workers: Sequence[int], running: Running) -> None:
        assert self.books is not None
        assert self.books.version <= ref.version <= self.books.version + self.books.updating, (
            "the newest weights"
        )
        super().load(ref, workers, running)


def changes(
    cluster: Cluster, random: Random, now: float
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """When workers come and go, from now on; the first one is there in the end."""
    arrivals: list[tuple[float, int]] = []
    failures: list[tuple[float, int]] = []
    for worker in range(len(cluster.slots)):
        if random.random() < cluster.absent:
            arrivals.append((now + 0.2 * cluster.horizon * random.random(), worker))
        if random.random() < cluster.absent:
            failed = now + cluster.horizon * random.random()
            failures.append((failed, worker))
            if worker == 0 or not cluster.mortal:
                arrivals.append((failed + cluster.horizon * random.random(), worker))
    return arrivals, failures


class Rows:
    """Rows 0, 1, 2 ... of `count`, again and again."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0
        self.given: list[tuple[Prompt, int]] = []  # by the last call

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        assert count > 0
        first, self.taken = self.taken, self.taken + count
        self.given = [(prompt(i % self.count), i // self.count) for i in range(first, self.taken)]
        return self.given


def prompt(row: int) -> Prompt:
    return Prompt(row, f"{row:08x}", 0, np.arange(1 + row % 5), {})


class Task:
    """Rewards, late or wrong or missing; an environment that answers, where responses have turns."""

    def __init__(self, runtime: SimulatedRuntime, scenario: Scenario) -> None:
        self.runtime, self.scenario = runtime, scenario
        self.books: Books | None = None
        self.asked: set[tuple[int, int]] = set()  # that owe an answer

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        assert self.books is not None
        self.books.asks(rollouts)
        scenario = self.scenario
        for rollout in rollouts:
            late = uniform(rollout.key, 11 + rollout.turn) < 0.05 and scenario.reward_tail
            self.runtime.post(self._answer(rollout), scenario.reward_seconds * (20.0 if late else 1.0))

    def _answer(self, rollout: Rollout) -> Event:
        scenario, key = self.scenario, rollout.key
        if rollout.outcome == State.WAITING:
            done = rollout.turn + 1 >= scenario.workload.turns or uniform(key, 13 + rollout.turn) < 0.3
            said = np.full(0 if done else 1 + key % 4, 99_999)
            return Observed(rollout.request_id, rollout.attempt, said, done)
        if uniform(key, 12) < scenario.reward_errors:
            status = "error" if key % 2 else "timeout"
            return Scored(rollout.request_id, rollout.attempt, float("nan"), status, message="planned")  # type: ignore[arg-type]
        group = rollout.prompt.row * 1009 + rollout.visit
        equal = uniform(group ^ scenario.seed, 14) < scenario.equal_rewards
        return Scored(rollout.request_id, rollout.attempt, 1.0 if equal else float(key % 2))
