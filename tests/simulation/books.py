"""A second set of books: what every request must look like, from the messages alone.

Kept beside the ledger and compared with it after every event and decision (what was touched) and at every update (all).
What the gate chooses is taken from the ledger and judged: whether it had to, and whether what is left is feasible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stretto.buffer import Ledger
from stretto.records import (
    Event,
    Finished,
    FinishReason,
    Leapt,
    Loaded,
    Observed,
    Progress,
    Prompt,
    Request,
    Rollout,
    Scored,
    State,
    Stopped,
    UpdateBatch,
    Updated,
    WorkerDown,
    WorkerUp,
)
from tests.simulation.entry import Entry, check_rollout, infeasible


class Books:
    """Raises AssertionError where the ledger, or what is sent to workers and learner, is not as it must be."""

    def __init__(self, ledger: Ledger, *, tokens: bool, multi_turn: bool, queues: bool) -> None:
        self.ledger = ledger
        self.tokens = tokens  # whether engines report them
        self.multi_turn = multi_turn
        self.queues = queues  # whether the schedule hands out more than there are slots
        self.version = 0
        self.updating = False
        self.entries: dict[int, Entry] = {}
        self.groups: dict[int, list[int]] = {}  # alive members
        self.next_id = 0
        self.slots: dict[int, int] = {}
        self.loaded: dict[int, int] = {}
        self.asked: set[tuple[int, int, int]] = set()  # id, attempt, length: given to the task
        self.to_stop: dict[tuple[int, int], int] = {}  # id, attempt -> worker that has to hear of it
        self.stale = 0
        self.consumed = self.discarded = 0
        self.most = 0  # requests at once
        self.waits: list[int] = []  # updates between admission and consumption

    # ---- reading ------------------------------------------------------------------------------------

    def alive(self) -> list[Entry]:
        return list(self.entries.values())

    def compare(self, entry: Entry) -> None:
        """The ledger's row says the same."""
        c, row = self.ledger.columns, entry.id - self.ledger.first_id
        found = (
            c.state.item(row),
            c.attempt.item(row),
            c.worker.item(row)
            if entry.state in (State.RUNNING, State.PENDING, State.PARKED)
            else entry.worker,
            c.length.item(row),
            c.first_version.item(row),
            c.refreshes.item(row),
            "lost" if entry.state == State.RUNNING and c.refreshing.item(row) else "",
        )
        lost = "lost" if entry.leaving == "lost" else ""
        expected = (
            int(entry.state),
            entry.attempt,
            entry.worker,
            entry.length,
            entry.oldest,
            entry.refreshes,
            lost,
        )
        assert found == expected, f"request {entry.id}: the ledger has {found}, the messages say {expected}"

    def compare_all(self) -> None:
        assert self.ledger.alive == len(self.entries), "requests alive"
        assert (self.ledger.version, self.ledger.updating) == (self.version, self.updating), "version"
        assert (self.ledger.loaded, self.ledger.slots) == (self.loaded, self.slots), "workers"
        assert self.ledger.counters["stale_events"] == self.stale, "events of old attempts that were dropped"
        for entry in self.entries.values():
            self.compare(entry)

    # ---- decisions ----------------------------------------------------------------------------------

    def admit(self, first: int, prompts: Sequence[tuple[Prompt, int]], samples: int) -> None:
        assert first == self.next_id, f"ids begin at {first}, not at {self.next_id}"
        self.next_id += samples * len(prompts)
        for number, (prompt, visit) in enumerate(prompts):
            ids = range(first + number * samples, first + (number + 1) * samples)
            group = self.ledger.view.group_of(ids[0])
            assert group not in self.groups, f"group {group} was admitted before"
            self.groups[group] = list(ids)
            for sample, request_id in enumerate(ids):
                assert request_id not in self.entries
                entry = Entry(request_id, group, prompt.row, visit, sample, self.version)
                self.entries[request_id] = entry
                self.compare(entry)
        self.most = max(self.most, len(self.entries))

    def submit(self, worker: int, requests: Sequence[Request]) -> None:
        assert worker in self.slots, f"worker {worker} is not there"
        for request in requests:
            entry = self.entries[request.id]
            assert entry.state in (State.PENDING, State.PARKED), (
                f"request {entry.id} starts, but is {entry.state!r}"
            )
            assert request.attempt == entry.attempt + 1, f"request {entry.id}: attempt {request.attempt}"
            assert request.token_ids.tolist() == entry.tokens, (
                f"request {entry.id}: tokens that it goes on from"
            )
            assert request.draft_ids.tolist() == entry.draft, f"request {entry.id}: draft"
            entry.state, entry.attempt, entry.worker, entry.leaving = (
                State.RUNNING,
                request.attempt,
                worker,
                "",
            )
            self.compare(entry)
        running = self.ledger.view.num_running(worker)
        assert self.queues or running <= self.slots[worker], (
            f"{running} requests for {self.slots[worker]} slots"
        )

    def stop(self, ids: Iterable[int], keep: bool) -> None:
        for request_id in ids:
            entry = self.entries.get(request_id)
            if entry is not None and entry.state == State.RUNNING and entry.leaving != "lost":
                entry.leaving = "keep" if keep else "drop"
                self.to_stop[entry.id, entry.attempt] = entry.worker
                self.compare(entry)

    def discard(self, ids: Iterable[int]) -> None:
        for request_id in list(ids):
            entry = self.entries.pop(request_id)
            if entry.state == State.RUNNING:
                self.to_stop[entry.id, entry.attempt] = entry.worker
            entry.state, entry.leaving = State.DISCARDED, ""
            self.discarded += 1
            self._leave_group(entry)
            self.compare(entry)

    def _leave_group(self, entry: Entry) -> None:
        members = self.groups[entry.group]
        members.remove(entry.id)
        if not members:
            del self.groups[entry.group]

    def told_to_stop(self, worker: int, ids: Sequence[int], attempts: Sequence[int]) -> None:
        for key in zip(ids, attempts, strict=True):
            assert self.to_stop.pop(key, worker) == worker, f"request {key[0]} is stopped on the wrong worker"

    def all_told(self) -> None:
        """Before time goes on, workers have been told what to let go of."""
        assert not self.to_stop, f"workers were not told to let go of {list(self.to_stop)}"

    # ---- harvests -----------------------------------------------------------------------------------

    def harvest(self, batch: UpdateBatch, wanted: Sequence[int]) -> None:
        """What the learner gets, before the gate is looked at."""
        assert not self.updating, "a harvest during an update"
        ids = [rollout.request_id for rollout in batch.rollouts]
        assert ids == sorted(set(wanted)), "in canonical order"
        assert len(wanted) == len(ids), "each once"
        assert batch.version == self.version
        whole = {i for rollout in batch.rollouts for i in self.groups[rollout.group_id]}
        assert self.ledger.unit == "response" or whole == set(ids), "an update takes whole groups"
        for rollout in batch.rollouts:
            self._consume(rollout)
        if batch.final:
            self.updating = True
            self._judge_gate()

    def _consume(self, rollout: Rollout) -> None:
        entry = self.entries.pop(rollout.request_id)
        assert entry.state == State.SCORED, f"request {entry.id} is consumed, but is {entry.state!r}"
        bound = self.ledger.max_staleness
        assert bound is None or self.version - entry.oldest <= bound, (
            f"staleness {self.version - entry.oldest}"
        )
        check_rollout(entry, rollout, tokens=self.tokens)
        self.waits.append(self.version - entry.admitted)
        entry.state = State.CONSUMED
        self.consumed += 1
        self._leave_group(entry)
        self.compare(entry)

    def _infeasible(self) -> bool:
        return infeasible(self.ledger, self.entries.values(), self.version, self.loaded)

    def _judge_gate(self) -> None:
        ledger = self.ledger
        if ledger.max_staleness is None:
            self.compare_all()
            return
        c, first = ledger.columns, ledger.first_id
        for entry in self.entries.values():
            if entry.leaving == "drop":
                entry.leaving = "lost"  # it must not end under the old weights any more
        violated = self._infeasible()
        chosen: list[Entry] = []
        for entry in self.alive():
            row = entry.id - first
            dropped = c.state.item(row) == State.DISCARDED
            running = entry.state == State.RUNNING
            refreshed = running and c.refreshing.item(row) and entry.leaving != "lost"
            emptied = not running and entry.length > 0 and c.length.item(row) == 0 and not dropped
            if dropped:
                assert (ledger.strategy, c.discard_reason.item(row)) == ("drop", "stale")
                chosen.append(entry)
                self.discard([entry.id])
            elif refreshed or emptied:
                unfinished = entry.state != State.SCORED
                within = ledger.strategy != "refresh" or entry.refreshes < ledger.refresh_budget
                assert within or not unfinished, f"request {entry.id} is refreshed beyond the budget"
                chosen.append(entry)
                self._refresh(entry)
        assert violated or not chosen, f"the gate takes tokens without need, of {chosen[0].id}"
        assert not self._infeasible(), "the gate leaves behind what cannot be trained on in time"
        self.compare_all()

    def _refresh(self, entry: Entry) -> None:
        if entry.state == State.RUNNING:
            entry.leaving = "lost"
            self.to_stop[entry.id, entry.attempt] = entry.worker
        else:
            entry.lose()
            entry.state, entry.worker = State.PENDING, -1

    # ---- events -------------------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        """One event, just applied by the ledger."""
        touched: list[Entry] = []
        match event:
            case Progress():
                touched = self._progress(event)
            case Leapt():
                touched = self._grow(event.id, event.attempt, event.version, [0] * event.count)
            case Finished():
                touched = self._finished(event)
            case Stopped():
                touched = self._at(event.id, event.attempt, State.RUNNING)
                for entry in touched:
                    entry.release()
            case Observed():
                touched = self._observed(event)
            case Scored():
                touched = self._at(event.id, event.attempt, State.FINISHED)
                for entry in touched:
                    entry.state, entry.reward = State.SCORED, event.reward
            case Updated():
                assert event.version == self.version + 1
                self.version, self.updating = event.version, False
                self._overdue([e for e in self.entries.values() if self._too_old(e) and e.leaving != "lost"])
            case Loaded():
                self.loaded[event.worker] = event.version
            case WorkerUp():
                self.slots[event.worker], self.loaded[event.worker] = event.slots, event.version
            case WorkerDown():
                self.slots.pop(event.worker, None)
                self.loaded.pop(event.worker, None)
                touched = [
                    e for e in self.entries.values() if e.state == State.RUNNING and e.worker == event.worker
                ]
                for entry in touched:
                    self.to_stop.pop((entry.id, entry.attempt), None)
                    entry.release()
        for entry in touched:
            self.compare(entry)

    def _at(self, request_id: int, attempt: int, state: State) -> list[Entry]:
        entry = self.entries.get(request_id)
        if entry is not None and entry.attempt == attempt and entry.state == state:
            return [entry]
        self.stale += 1
        return []

    def _progress(self, event: Progress) -> list[Entry]:
        touched: list[Entry] = []
        end = 0
        for request_id, attempt, count in zip(
            event.ids.tolist(), event.attempts.tolist(), event.counts.tolist(), strict=True
        ):
            start, end = end, end + count
            ids = event.token_ids[start:end].tolist() if event.token_ids is not None else [0] * count
            touched += self._grow(request_id, attempt, event.version, ids)
        return touched

    def _grow(self, request_id: int, attempt: int, version: int, ids: list[int]) -> list[Entry]:
        found = self._at(request_id, attempt, State.RUNNING)
        for entry in found:
            entry.length += len(ids)
            entry.oldest = version if entry.oldest < 0 else min(entry.oldest, version)
            entry.tokens += ids
            entry.versions += [version] * len(ids)
        return found

    def _too_old(self, entry: Entry) -> bool:
        bound = self.ledger.max_staleness
        return bound is not None and 0 <= entry.oldest < self.version - bound

    def _overdue(self, entries: Sequence[Entry]) -> None:
        """Nobody can train any more on these: forced refreshes, or dropped."""
        if self.ledger.strategy == "drop":
            ids = [entry.id for entry in entries]
            if self.ledger.unit == "group":
                ids = [i for group in dict.fromkeys(e.group for e in entries) for i in self.groups[group]]
            self.discard(ids)
            return
        for entry in entries:
            self._refresh(entry)

    def _finished(self, event: Finished) -> list[Entry]:
        found = self._at(event.id, event.attempt, State.RUNNING)
        for entry in found:
            self.to_stop.pop((entry.id, entry.attempt), None)
            if self._too_old(entry) and entry.leaving != "lost":
                self._overdue([entry])
            if entry.leaving == "lost":
                self.to_stop.pop((entry.id, entry.attempt), None)
                entry.release()
            elif entry.state == State.RUNNING:
                turn = self.multi_turn and event.reason == FinishReason.STOP
                entry.state, entry.leaving = State.WAITING if turn else State.FINISHED, ""
        return [entry for entry in found if entry.state != State.DISCARDED]

    def _observed(self, event: Observed) -> list[Entry]:
        found = self._at(event.id, event.attempt, State.WAITING)
        for entry in found:
            new = event.token_ids.tolist()
            if event.done or len(new) >= self.ledger.sampling.max_new_tokens - entry.length:
                entry.state = State.FINISHED
                continue
            entry.tokens += new
            entry.versions += [entry.versions[-1]] * len(new)
            entry.length += len(new)
            entry.state, entry.worker = State.PENDING, -1
        return found

    def asks(self, rollouts: Sequence[Rollout]) -> None:
        """These were given to the task: what has just ended, each end once."""
        for rollout in rollouts:
            entry = self.entries[rollout.request_id]
            assert entry.state in (State.FINISHED, State.WAITING)
            assert entry.state == rollout.outcome
            key = (entry.id, entry.attempt, 2 * entry.length + (entry.state == State.FINISHED))
            assert key not in self.asked, f"request {entry.id} is given to the task twice"
            self.asked.add(key)

    # ---- crash and resume ---------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """What a checkpoint of this moment must bring back."""
        return {
            "version": self.version,
            "entries": [entry.copy() for entry in self.entries.values()],
            "consumed": self.consumed,
            "discarded": self.discarded,
            "waits": list(self.waits),
            "stale": self.stale,
            "most": self.most,
            "next_id": self.next_id,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """After a resume: what ran is back with its tokens, its worker gone."""
        self.version, self.next_id = saved["version"], saved["next_id"]
        self.consumed, self.discarded = saved["consumed"], saved["discarded"]
        self.waits, self.stale, self.most = list(saved["waits"]), saved["stale"], saved["most"]
        for entry in map(Entry.copy, saved["entries"]):
            if entry.state == State.RUNNING:
                entry.release()
            elif entry.state == State.PENDING and entry.length:
                entry.state = State.PARKED  # before another turn
            entry.worker = -1
            self.entries[entry.id] = entry
            self.groups.setdefault(entry.group, []).append(entry.id)
        self.compare_all()
