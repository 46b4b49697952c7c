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
from stretto.records import Finished, Progress, State, Stopped
from stretto.requests import Requests
from stretto.schedule import batches, placement
from stretto.schedule.batches import Closing, ZeroVariance
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

    def is_at(self: Ledger, request_id: int, state: int, attempt: int) -> bool:
        row = request_id - self.first_id
        return 0 <= row < self.columns.size and self.columns.state.item(row) == state

    patch.setattr(Ledger, "_is_at", is_at)


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
        return [i for group in groups for i in original(view, [group])[:-1]]

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


def newest_version_counts(patch: Patch) -> None:
    """A response is taken to be as old as its newest token."""
    original = Ledger._progress

    def progress(self: Ledger, event: Progress) -> None:
        original(self, event)
        rows = event.ids - self.first_id
        self.columns.first_version[rows[self.columns.state[rows] == State.RUNNING]] = event.version

    patch.setattr(Ledger, "_progress", progress)


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

    def room(self: Any, view: Any, newest: bool = False) -> dict[int, int]:
        return {worker: free + 1 for worker, free in original(self, view, newest).items()}

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


def gate_not_asked(patch: Patch) -> None:
    """Schedules harvest although the gate makes the update wait."""
    original = Closing.batch

    def batch(self: Closing, *args: Any, **kwargs: Any) -> list[int]:
        view = args[0]
        found = original(self, *args, **kwargs)
        return found or (list(view.scored) if self.gate.blocked and not view.updating else [])

    patch.setattr(Closing, "batch", batch)


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


BUGS: Mapping[str, Callable[[Patch], None]] = {
    bug.__name__: bug
    for bug in (
        attempt_not_counted,
        old_attempts_accepted,
        gate_off_by_one,
        gate_sees_half_of_the_room,
        gate_forgotten_by_the_update,
        refresh_keeps_the_reward,
        group_stays_ready,
        incomplete_groups,
        discarded_still_waiting,
        worker_down_loses_a_request,
        stop_loses_tokens,
        workers_not_told,
        draft_lost,
        newest_version_counts,
        resume_gives_rows_again,
        resume_forgets_unanswered,
        resume_forgets_scores,
        one_slot_too_many,
        engine_oversubscribed,
        finished_twice,
        freed_slots_missed,
        first_worker_only,
        gate_not_asked,
        useless_groups_kept,
        version_not_counted,
    )
}
