"""Planted bugs: what the simulation has to find. Each is a small change to ledger, gate, schedules or engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from stretto import buffer, gate
from stretto.buffer import Ledger
from stretto.columns import Columns
from stretto.controller import Controller
from stretto.engine.simulated import SimulatedEngine
from stretto.groups import Groups
from stretto.records import Finished, Leapt, Progress, State, Stopped
from stretto.requests import Requests
from stretto.schedule import batches, placement
from stretto.schedule.batches import ZeroVariance
from stretto.staleness import BoundedRequests

Patch = pytest.MonkeyPatch


def attempt_not_counted(patch: Patch) -> None:
    """A restart keeps the attempt's number."""
    original = Ledger.start

    def start(self: Ledger, ids: Sequence[int], worker: int, max_new: int | None = None) -> Any:
        requests = original(self, ids, worker, max_new)
        for request in requests:
            if request.attempt > 1:
                request.attempt -= 1
                self.columns.attempt[request.id - self.first_id] -= 1
        return requests

    patch.setattr(Ledger, "start", start)


def old_attempts_accepted(patch: Patch) -> None:
    """Events of earlier attempts count."""

    def row_at(self: Ledger, request_id: int, state: int, attempt: int) -> int:
        row = request_id - self.first_id
        return row if 0 <= row < self.columns.size and self.columns.state.item(row) == state else -1

    patch.setattr(Ledger, "_row_at", row_at)


def gate_off_by_one(patch: Patch) -> None:
    """The gate lets everything get a version older."""
    original = gate.in_the_way

    def in_the_way(deadline: Any, *args: Any, **kwargs: Any) -> Any:
        return original(deadline + 1, *args, **kwargs)

    patch.setattr("stretto.staleness.in_the_way", in_the_way)


def gate_sees_half_of_the_room(patch: Patch) -> None:
    """The gate takes tokens from what could have been trained on in time."""
    original = gate.in_the_way

    def in_the_way(*args: Any, batch: int, **kwargs: Any) -> Any:
        return original(*args, batch=max(1, batch // 2), **kwargs)

    patch.setattr("stretto.staleness.in_the_way", in_the_way)


def gate_forgotten_by_the_update(patch: Patch) -> None:
    """What the gate has found is not refreshed."""
    patch.setattr(BoundedRequests, "_apply_gate", lambda self, found: None)


def refresh_keeps_the_reward(patch: Patch) -> None:
    """A scored request that is refreshed stays among the scored ones."""
    original = Requests._refresh

    def refresh(self: Requests, request_id: int) -> None:
        scored = request_id in self.scored
        original(self, request_id)
        if scored:
            self.scored[request_id] = None

    patch.setattr(Requests, "_refresh", refresh)


def group_stays_ready(patch: Patch) -> None:
    """A group is still ready when one of its rewards has been taken back."""

    def unscore(self: Groups, group: int) -> None:
        self.unscored[group] += 1

    patch.setattr(Groups, "unscore", unscore)


def incomplete_groups(patch: Patch) -> None:
    """Updates are given groups without their last member, and the ledger does not mind."""
    original = batches.members_of

    def members_of(view: Any, groups: Any) -> list[int]:
        members = [original(view, [group]) for group in groups]
        return [i for ids in members for i in (ids[:-1] or ids)]

    patch.setattr(Ledger, "_check_harvest", lambda self, chosen: None)
    patch.setattr("stretto.schedule.histopipe.members_of", members_of)
    patch.setattr("stretto.schedule.elastic.members_of", members_of)


def discarded_still_waiting(patch: Patch) -> None:
    """What is given up can still be started."""
    original = Requests.discard

    def discard(self: Requests, ids: Sequence[int], reason: str) -> None:
        waiting = [i for i in ids if i in self.waiting]
        original(self, ids, reason)
        self.waiting.update(dict.fromkeys(waiting))

    patch.setattr(Requests, "discard", discard)


def worker_down_loses_a_request(patch: Patch) -> None:
    """The last request of a worker that goes down stays RUNNING on nothing."""

    def down(self: Ledger, event: Any) -> None:
        for request_id in list(self.running.get(event.worker, ()))[:-1]:
            self._release(request_id)
        for table in (self.running, self.slots, self.loaded):
            table.pop(event.worker, None)

    patch.setattr(Ledger, "_worker_down", down)


def stop_loses_tokens(patch: Patch) -> None:
    """What is stopped with its tokens kept loses them."""
    original = Ledger._stopped

    def stopped(self: Ledger, event: Stopped) -> None:
        row = event.id - self.first_id
        if 0 <= row < self.columns.size:
            self.columns.keep[row] = False
        original(self, event)

    patch.setattr(Ledger, "_stopped", stopped)


def workers_not_told(patch: Patch) -> None:
    """Refreshed and discarded requests are not stopped on their workers."""
    patch.setattr(Controller, "_send_stops", lambda self: self.ledger.take_stops())


def draft_lost(patch: Patch) -> None:
    """Dropped tokens do not come back as a draft."""
    original = Requests._drop

    def drop(self: Requests, request_id: int) -> None:
        original(self, request_id)
        self.drafts.pop(request_id, None)

    patch.setattr(Requests, "_drop", drop)


def logged_records_kept(patch: Patch) -> None:
    """What is over and logged stays among the records, and memory grows."""
    original = Requests._forget

    def forget(self: Requests, ids: Sequence[int]) -> None:
        records = {i: self._records[i] for i in ids if i in self._records}
        original(self, ids)
        self._records.update(records)

    patch.setattr(Requests, "_forget", forget)


def logged_drafts_kept(patch: Patch) -> None:
    """Likewise among the drafts."""
    original = Requests._forget

    def forget(self: Requests, ids: Sequence[int]) -> None:
        drafts = {i: self.drafts[i] for i in ids if i in self.drafts}
        original(self, ids)
        self.drafts.update(drafts)

    patch.setattr(Requests, "_forget", forget)


def newest_version_counts(patch: Patch) -> None:
    """A response is taken to be as old as its newest token."""
    original = Ledger._progress

    def progress(self: Ledger, event: Progress) -> None:
        original(self, event)
        rows = event.ids - self.first_id
        self.columns.first_version[rows[self.columns.state[rows] == State.RUNNING]] = event.version

    patch.setattr(Ledger, "_progress", progress)
    original_leapt = Ledger._leapt

    def leapt(self: Ledger, event: Leapt) -> None:
        original_leapt(self, event)
        row = event.id - self.first_id
        if self.columns.state[row] == State.RUNNING:
            self.columns.first_version[row] = event.version

    patch.setattr(Ledger, "_leapt", leapt)


def resume_gives_rows_again(patch: Patch) -> None:
    """Ids begin anew behind the last one in flight."""
    original = Ledger.load_state_dict

    def load(self: Ledger, state: dict[str, Any], in_flight: Any) -> Any:
        last = in_flight[-1].request_id + 1 if in_flight else 0
        return original(self, state | {"next_id": last, "next_group": 0}, in_flight)

    patch.setattr(Ledger, "load_state_dict", load)


def resume_forgets_unanswered(patch: Patch) -> None:
    """Responses that waited for their reward at the checkpoint are never graded."""
    original = Ledger.load_state_dict

    def load(self: Ledger, state: dict[str, Any], in_flight: Any) -> Any:
        original(self, state, in_flight)
        return []

    patch.setattr(Ledger, "load_state_dict", load)


def resume_forgets_scores(patch: Patch) -> None:
    """Rewards are not brought back."""
    original = Columns.restore

    def restore(self: Columns, row: int, rollout: Any, state: State) -> None:
        original(self, row, rollout, state)
        self.reward[row] = 0.0

    patch.setattr(Columns, "restore", restore)


def one_slot_too_many(patch: Patch) -> None:
    """Schedules see a free slot that is not there."""
    original = placement.FreeSlots.room

    def room(*args: Any, **kwargs: Any) -> dict[int, int]:
        return {worker: free + 1 for worker, free in original(*args, **kwargs).items()}

    patch.setattr(placement.FreeSlots, "room", room)


def engine_oversubscribed(patch: Patch) -> None:
    """An engine uses its last slot twice."""
    original = SimulatedEngine._clear

    def clear(self: SimulatedEngine) -> None:
        original(self)
        self._free.append(self._free[-1])

    patch.setattr(SimulatedEngine, "_clear", clear)


def finished_twice(patch: Patch) -> None:
    """The task is asked twice about what has ended."""
    original = Ledger._finished

    def finished(self: Ledger, event: Finished) -> Sequence[int]:
        return [*original(self, event)] * 2

    patch.setattr(Ledger, "_finished", finished)


def freed_slots_missed(patch: Patch) -> None:
    """Schedules do not see slots of which a request was stopped."""
    original = placement.FreeSlots.watch

    def watch(self: Any, events: Any) -> None:
        original(self, [event for event in events if not isinstance(event, Stopped)])

    patch.setattr(placement.FreeSlots, "watch", watch)


def first_worker_only(patch: Patch) -> None:
    """New weights go to one worker."""

    def behind(view: Any) -> list[int]:
        return [worker for worker, version in view.loaded.items() if version != view.version][:1]

    for module in ("concurrency", "sorted", "divided", "stream", "tail_batching", "elastic", "asynchronous"):
        patch.setattr(f"stretto.schedule.{module}.behind", behind)


def gate_lets_all_pass(patch: Patch) -> None:
    """The gate forgets whom an update has to wait for, before harvests and in them."""
    original = Ledger.gate

    def passing(self: Ledger, ids: Sequence[int]) -> gate.Gate:
        return gate.Gate(original(self, ids).in_the_way, [])

    patch.setattr(Ledger, "gate", passing)


def useless_groups_kept(patch: Patch) -> None:
    """Every second group without reward variance is overlooked."""
    original = ZeroVariance.useless

    def useless(self: ZeroVariance, view: Any, events: Any) -> list[int]:
        return [group for group in original(self, view, events) if group % 2]

    patch.setattr(ZeroVariance, "useless", useless)


def version_not_counted(patch: Patch) -> None:
    """The ledger's version stands still."""

    def updated(self: Ledger, event: Any) -> None:
        self.updating = False
        self._refresh_overdue()

    patch.setattr(buffer.Ledger, "_updated", updated)


BUGS: Mapping[Callable[[Patch], None], str] = {
    attempt_not_counted: r"attempt \d",
    old_attempts_accepted: "events of old attempts",
    gate_off_by_one: "cannot be trained on in time",
    gate_sees_half_of_the_room: "the gate takes tokens without need",
    gate_forgotten_by_the_update: "cannot be trained on in time",
    gate_lets_all_pass: "refreshed beyond the budget",
    refresh_keeps_the_reward: "what is scored",
    group_stays_ready: "whether it is ready",
    incomplete_groups: "an update takes whole groups|groups of other sizes",
    discarded_still_waiting: "what waits",
    worker_down_loses_a_request: r"the ledger has \(1, .* the messages say \([02], ",
    stop_loses_tokens: r"the ledger has \(0, .* the messages say \(2, ",
    workers_not_told: "workers were not told to let go",
    draft_lost: r"request \d+: draft",
    logged_records_kept: "a record of what is over",
    logged_drafts_kept: "tokens of what is over",
    newest_version_counts: "the ledger has .* the messages say",
    resume_gives_rows_again: "ids begin at",
    resume_forgets_unanswered: "waits for no answer|come to a stand",
    resume_forgets_scores: r"request \d+: reward",
    one_slot_too_many: r"\d+ requests for \d+ slots",
    engine_oversubscribed: r"worker \d+: (free )?slots",
    finished_twice: "given to the task twice",
    freed_slots_missed: "come to a stand|without end",
    first_worker_only: "come to a stand|without end",
    useless_groups_kept: "groups of equal rewards",
    version_not_counted: "version",
}
"""What each is found by: a check of its own, not an error that it happens to make elsewhere."""
