"""The real controller, ledger and schedule in a random world that may crash; invariants after every event."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from traceback import extract_tb
from typing import Any

from stretto.buffer import Ledger
from stretto.controller import Controller
from stretto.history.lengths import LengthHistory
from stretto.records import (
    Decision,
    Event,
    Finished,
    Leapt,
    Observed,
    Progress,
    Rollout,
    SamplingParams,
    Scored,
    State,
    Stopped,
    UpdateBatch,
    Updated,
    WorkerDown,
)
from stretto.schedule import ledger_options, make_schedule
from stretto.weights import WeightsRef
from tests import invariants
from tests.simulation import promises
from tests.simulation.books import Books
from tests.simulation.parts import BusyRuntime, Engine, Fleet, Rows, Task
from tests.simulation.scenario import Scenario, draw

TRACE = 60
EVENTS = 40
"""Of an update, besides tokens, for each slot and each chunk of a response that it saw: more is going in circles."""
DISCARDS = 200
"""Of an update, for each response that it consumes: more is letting in without an end."""


class Violation(AssertionError):
    """An invariant does not hold; the text says of which seed, and what happened before."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How much was tried."""

    updates: int
    events: int
    consumed: int
    discarded: int
    crashes: int
    longest_wait: int  # updates between a row's admission and its use
    busiest: float  # events of an update, as `EVENTS` counts them


@dataclass(frozen=True, slots=True)
class Saved:
    """What is on disk: the boundary of an update."""

    state: str
    in_flight: list[Rollout]
    finished: list[list[Rollout]]  # of each update
    books: dict[str, Any]


class Life:
    """From a start or a resume to the next crash, or the end."""

    def __init__(
        self, scenario: Scenario, saved: Saved | None, number: int, trace: deque[tuple[float, Any]]
    ) -> None:
        self.scenario, self.saved, self.trace = scenario, saved, trace
        config = scenario.config
        self.runtime = BusyRuntime(scenario.busy_seconds, Random(f"{scenario.seed} busy {number}"))
        state = json.loads(saved.state) if saved is not None else None
        if state is not None:
            self.runtime.time = state["elapsed"]
        turns = scenario.workload.turns
        self.ledger = Ledger(
            SamplingParams(max_new_tokens=scenario.workload.most),
            seed=scenario.seed,
            multi_turn=turns > 1,
            now=self.runtime.now,
            **ledger_options(config),
        )
        self.lengths = LengthHistory()
        self.schedule = make_schedule(config, self.lengths)
        self.engines = [
            Engine(self.runtime, scenario, worker) for worker in range(len(scenario.cluster.slots))
        ]
        self.fleet = Fleet(
            self.runtime, self.engines, scenario.cluster, Random(1000 * scenario.seed + number)
        )
        self.rows, self.task = Rows(scenario.workload.rows), Task(self.runtime, scenario)
        self.books = Books(
            self.ledger, tokens=scenario.tokens, multi_turn=turns > 1, queues=config.kind in promises.QUEUEING
        )
        self.fleet.books = self.task.books = self.books
        self.events = self._events_of_update = self._largest = self._discarded_before = 0
        self.busiest = 0.0
        self.version = 0
        self.finished: list[list[Rollout]] = []
        self._update: list[Rollout] = []
        self._watch()
        if state is not None and saved is not None:
            self._resume(state, saved)

    def run(self, crash_after: int | None) -> bool:
        """Returns whether it came to its end; False: it has crashed after so many events."""
        controller = Controller(
            self.runtime,
            self.ledger,
            self.schedule,
            self.fleet,
            rewards=self.task,
            prompts=self.rows,
            learner=self,
            observer=self,
        )
        over = self.scenario.updates

        def done() -> bool:
            self.books.all_told()
            return self.ledger.version >= over or (crash_after is not None and self.events >= crash_after)

        controller.run(done)
        return self.ledger.version >= over

    # ---- watching -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Put the checks between the parts."""
        ledger: Any = self.ledger
        for kind in (*ledger._enter,):
            ledger._enter[kind] = self._checked(ledger._enter[kind])
        decide = self.schedule.decide

        def decided(view: Any, events: Sequence[Event]) -> list[Decision]:
            decisions = [*decide(view, events)]
            for decision in decisions:
                self.trace.append((self.runtime.now(), decision))
            return decisions

        self.schedule.decide = decided  # type: ignore[method-assign]
        admit, stop, discard, harvest = ledger.admit, ledger.stop, ledger.discard, ledger.harvest

        def admitted(prompts: Any, samples: int) -> Any:
            assert samples == self._samples(), f"{samples} responses to a prompt"
            found = admit(prompts, samples)
            self.books.admit(found.first, prompts, samples)
            return found

        def stopped(ids: Sequence[int], keep: bool) -> None:
            stop(ids, keep)
            self.books.stop(ids, keep)

        def discarded(ids: Sequence[int], reason: str) -> None:
            assert reason in promises.reasons(self.scenario.config), f"discarded as {reason}"
            discard(ids, reason)
            if reason != "stale":  # those the books find out themselves
                self.books.discard(ids)

        def harvested(ids: Sequence[int], final: bool = True) -> UpdateBatch:
            batch: UpdateBatch = harvest(ids, final)
            self._check_batch(batch)
            self.books.harvest(batch, ids)
            return batch

        ledger.admit, ledger.stop, ledger.discard, ledger.harvest = admitted, stopped, discarded, harvested

    def _checked(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def entered(event: Any) -> Any:
            self.trace.append((self.runtime.now(), event))
            self.events += 1
            if isinstance(event, Progress):
                invariants.check_progress(event)
            ended = enter(event)
            self.books.event(event)
            if not isinstance(event, (Leapt, Progress)):
                self._count()
            return ended

        return entered

    def _count(self) -> None:
        """Events must lead somewhere."""
        books, scenario = self.books, self.scenario
        self._events_of_update += 1
        self._largest = max(self._largest, len(books.entries))
        discarded = books.discarded - self._discarded_before
        config = scenario.config
        chunks = 1 + (scenario.workload.most // config.chunk_size if config.kind == "divided" else 0)
        seen = (self._largest + discarded) * chunks + sum(scenario.cluster.slots)
        self.busiest = max(self.busiest, self._events_of_update / seen)
        assert self._events_of_update <= EVENTS * seen, "events without end, and no update"
        assert discarded <= DISCARDS * max(self.ledger.batch, config.tokens_per_update or 0), (
            "discards without end, and no update"
        )

    def _samples(self) -> int:
        config = self.scenario.config
        if config.kind != "tail_batching":
            return config.samples
        return config.max_num_return_sequences or -(-5 * config.samples // 4)

    def _check_batch(self, batch: UpdateBatch) -> None:
        config = self.scenario.config
        assert not promises.on_policy(config) or not any(batch.staleness), "stale responses, on-policy"
        self._update += batch.rollouts
        if batch.final:
            promises.check_size(config, self._update, self.ledger.alive)
            self._update = []

    # ---- boundaries ---------------------------------------------------------------------------------

    def harvested(self, batch: UpdateBatch) -> None: ...

    def publishing(self) -> None: ...

    def published(self) -> None: ...

    def updated(self, event: Updated) -> None:
        """Everything is looked at, and a checkpoint made."""
        self.version = event.version
        self._events_of_update = self._largest = 0
        self._discarded_before = self.books.discarded
        self.check()
        finished = self.ledger.take_finished()
        self.finished.append(finished)
        self.lengths.observe(finished)
        within = promises.updates_within(self.scenario.config, self.books.most)
        waits = [*self.books.waits, *(self.books.version - 1 - e.admitted for e in self.books.alive())]
        assert within is None or max(waits, default=0) <= within, f"a row waits for {max(waits)} updates"
        state = {
            "ledger": self.ledger.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rows": self.rows.taken,
            "elapsed": self.runtime.now(),
        }
        self.saved = Saved(
            json.dumps(state), self.ledger.in_flight(), list(self.finished), self.books.saved()
        )

    def _resume(self, state: dict[str, Any], saved: Saved) -> None:
        unanswered = self.ledger.load_state_dict(state["ledger"], saved.in_flight)
        self.rows.taken = state["rows"]
        self.schedule.load_state_dict(state["schedule"])
        self.finished = list(saved.finished)
        for finished in self.finished:
            self.lengths.observe(finished)
        self.version = self.ledger.version
        self.books.restore(saved.books)
        self._discarded_before = self.books.discarded
        self.check(messages=False)
        self.task.submit(unanswered)

    def check(self, *, messages: bool = True) -> None:
        """Ledger, indexes and view in full; with `messages` also that nobody waits for what will never come."""
        invariants.check(self.ledger)
        self.books.compare_all()
        check_view(self.ledger)
        for engine in self.engines:
            engine.check_slots()
        if not messages:
            return
        coming = self._coming()
        for entry in self.books.alive():
            if entry.state == State.RUNNING:
                engine = self.engines[entry.worker]
                there = engine.alive and engine.holds(entry.id, entry.attempt)
                on_its_way = (entry.id, entry.attempt) in coming or (-1, entry.worker) in coming
                assert there or on_its_way, f"request {entry.id} runs nowhere"
            elif entry.state in (State.FINISHED, State.WAITING):
                assert (entry.id, entry.attempt) in coming, f"request {entry.id} waits for no answer"

    def _coming(self) -> set[tuple[int, int]]:
        """Requests and attempts that messages on their way end or answer; (-1, worker): that it is down."""
        found = set[tuple[int, int]]()
        lists: list[Any] = [events for _, _, events in self.runtime._heap]
        lists += [engine._events for engine in self.engines]  # to be told when the step in hand ends
        for events in lists:
            for event in events if isinstance(events, list) else ():
                if isinstance(event, (Finished, Stopped, Scored, Observed)):
                    found.add((event.id, event.attempt))
                elif isinstance(event, WorkerDown):
                    found.add((-1, event.worker))
        return found

    # ---- learner ------------------------------------------------------------------------------------

    def begin(self, batch: UpdateBatch) -> None:
        cluster = self.scenario.cluster
        self.version += self.scenario.eager
        self.fleet.pause(cluster.train_seconds, range(cluster.colocated))
        updated = Updated(self.books.version + 1, {"time/trainer": cluster.train_seconds})
        self.runtime.post(updated, cluster.train_seconds)

    def accumulate(self, batch: UpdateBatch) -> None:
        self.fleet.pause(0.1 * self.scenario.cluster.train_seconds, range(self.scenario.cluster.colocated))

    def publish(self) -> WeightsRef:
        return WeightsRef(self.version, "copy", {})


def check_view(ledger: Ledger) -> None:
    """What schedules see equals what the table says."""
    view, c, first = ledger.view, ledger.columns, ledger.first_id
    ids = [first + row for row in range(c.size) if c.state[row] < State.CONSUMED]
    assert view.lengths_of(ids).tolist() == [view.length(i) for i in ids] if ids else view.alive == 0
    groups: dict[int, list[int]] = {}
    for request_id in ids:
        groups.setdefault(view.group_of(request_id), []).append(request_id)
        assert view.worker(request_id) == -1 or view.state(request_id) >= State.RUNNING
        assert (view.length(request_id) > 0) == (view.first_version(request_id) >= 0)
        assert (request_id in view.waiting) == (view.state(request_id) in (State.PENDING, State.PARKED))
        assert (request_id in view.scored) == (view.state(request_id) == State.SCORED)
    assert set(view.alive_groups) == set(groups)
    for group, members in groups.items():
        assert set(members) <= set(view.members(group))
        unscored = [i for i in members if view.state(i) != State.SCORED]
        assert view.unfinished(group) == len(unscored)
        assert (group in view.ready_groups) == (not unscored)
    for worker in view.slots:
        running = [i for i in ids if view.state(i) == State.RUNNING and view.worker(i) == worker]
        assert set(view.running(worker)) == set(running)
        assert view.num_running(worker) == len(running)


def simulate(seed: int) -> Outcome:
    """Run the world of this seed. Raises Violation."""
    scenario = draw(seed)
    trace: deque[tuple[float, Any]] = deque(maxlen=TRACE)
    saved: Saved | None = None
    events, lives, busiest = 0, 0, 0.0
    crashes = list(scenario.crashes)
    try:
        while True:
            life = Life(scenario, saved, lives, trace)
            lives += 1
            ended = life.run(crashes.pop(0) if crashes else None)
            events += life.events
            busiest = max(busiest, life.busiest)
            saved = life.saved
            if ended:
                break
            trace.append((life.runtime.now(), "---- crash, and resume from the last boundary"))
    except Exception as error:
        raise Violation(report(scenario, trace, error)) from error
    books = life.books
    longest = max(books.waits, default=0)
    return Outcome(scenario.updates, events, books.consumed, books.discarded, lives - 1, longest, busiest)


def report(scenario: Scenario, trace: Sequence[tuple[float, Any]], error: Exception) -> str:
    """What happened, the newest last."""
    said = str(error) or extract_tb(error.__traceback__)[-1].line  # of an assertion without a text
    lines = [f"seed {scenario.seed}: {type(error).__name__}: {said}", f"  {scenario.changes()}"]
    lines += [f"  {part}" for part in (scenario.workload, scenario.cluster)]
    lines.append(f"  {scenario.tokens=} {scenario.reward_seconds=} {scenario.crashes=} {scenario.updates=}")
    lines += [f"{when:10.3f}  {_shown(what)}" for when, what in trace]
    return "\n".join(lines)


def _shown(what: Any) -> str:
    """An event or decision without the tokens."""
    if isinstance(what, Progress):
        new = dict(zip(what.ids.tolist(), what.counts.tolist(), strict=True))
        return f"Progress(worker={what.worker}, version={what.version}, new tokens={new})"
    return str(what)
