"""The table of requests: what the ledger knows of each, and the steps from one state to the next.

Here a request is taken from state to state, with the indexes over the states; when that happens is the ledger's
affair (`stretto.buffer`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stretto.columns import NO_IDS, Columns, Tokens, is_unknown, unknown_ids
from stretto.groups import Groups
from stretto.records import FinishReason, IntArray, Rollout, State

PENDING, RUNNING, PARKED, WAITING, FINISHED, SCORED, CONSUMED, DISCARDED = map(int, State)
"""Plain numbers, which numpy compares faster than members of an enumeration."""
COUNTERS = (
    "stale_events",
    "discarded_tokens",
    "reverified_tokens",
    "refreshes",
    "forced_refreshes",
    "reward_errors",
    "reward_timeouts",
)
Stops = dict[int, tuple[list[int], list[int]]]
"""Worker -> what it is to let go of: ids and their attempts."""


def next_draft(draft: IntArray, dropped: IntArray) -> IntArray:
    """What comes back as a request's draft when it had `draft` and now loses the tokens `dropped`.

    What had only begun to say the old draft again keeps the whole of it.
    """
    begun = draft.size > dropped.size and np.array_equal(draft[: dropped.size], dropped)
    return draft if begun else dropped


def without_tokens(rollout: Rollout) -> Rollout:
    """A rollout as it will be when its tokens have been dropped."""
    nothing = np.zeros(0)
    return replace(
        rollout,
        token_ids=NO_IDS,
        logprobs=nothing,
        raw_logprobs=nothing,
        versions=NO_IDS,
        loss_mask=np.zeros(0, np.bool_),
        top=None,
        turn=0,
        turn_start=0,
        outcome=State.PENDING,
        finish_reason=FinishReason.NONE,
        refreshes=rollout.refreshes + (rollout.token_ids.size > 0),
        draft_ids=next_draft(rollout.draft_ids, rollout.token_ids),
        drafted=0,
        accepted=0,
        decode_steps=0,
    )


def counted(groups: IntArray) -> Iterator[tuple[int, int]]:
    """Each number, and how often it comes."""
    numbers, counts = np.unique(groups, return_counts=True)
    return zip(numbers.tolist(), counts.tolist(), strict=True)


class Requests:
    """One row per request, and its tokens. `first_id` is the id of row 0: ids go on counting after a resume, rows of
    ended requests do not come back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.first_id = 0
        self.columns = Columns()
        self.cells = self.columns.cells
        self.tokens: dict[int, Tokens] = {}  # of requests that have any and have not been logged
        self.drafts: dict[int, IntArray] = {}  # tokens that were dropped last, until the request ends
        self.drafted: set[int] = set()  # those of which an engine has begun to say them again
        self.groups = Groups()
        self.waiting: OrderedDict[int, None] = OrderedDict()  # PENDING and PARKED, oldest first
        self.running: dict[int, dict[int, None]] = {}  # worker -> its requests
        self.scored: dict[int, None] = {}  # SCORED, in order of scoring
        self.slots: dict[int, int] = {}  # worker -> slots, of the workers that are up
        self.loaded: dict[int, int] = {}  # worker -> version of its weights
        self.places: dict[
            int, int
        ] = {}  # worker -> its place among them, kept by who is started instead of it
        self._slot_seconds = (0.0, 0.0)  # up to when, how many
        self.version = 0  # optimiser steps made
        self.updating = False  # between the final Harvest and Updated
        self.next_group = 0
        self.generated_tokens = 0  # ever, whatever became of them
        self.alive = 0  # admitted, neither CONSUMED nor DISCARDED
        self.counters = dict.fromkeys(COUNTERS, 0)
        # FINISHED responses as they were to be graded, and what has become of them until they have been logged.
        self._records: dict[int, Rollout] = {}
        self._ended_below = 0  # all rows before this one have ended
        self._to_log: dict[int, None] = {}  # scored or discarded since the last `take_finished`
        self.stops: Stops = {}  # not told yet: see `take_stops`

    def slot_seconds(self) -> float:
        """The slots of workers that were up, times seconds of `now`, until now."""
        now = self.now()
        until, seconds = self._slot_seconds
        self._slot_seconds = now, seconds + sum(self.slots.values()) * (now - until)
        return self._slot_seconds[1]

    # ---- from state to state ------------------------------------------------------------------------------

    def _tokens(self, request_id: int) -> Tokens:
        tokens = self.tokens.get(request_id)
        if tokens is None:
            tokens = self.tokens[request_id] = Tokens()
        return tokens

    def _release(self, request_id: int) -> None:
        """A running request has left its worker: PARKED with its tokens, or PENDING without them."""
        row = request_id - self.first_id
        cells = self.cells
        self.running[cells.worker[row]].pop(request_id)
        if not cells.keep[row]:
            self._drop(request_id)
        self._wait(request_id, PARKED if cells.length[row] else PENDING)

    def _drop(self, request_id: int) -> None:
        """Take a request's tokens away; they come back as its draft."""
        row = request_id - self.first_id
        c = self.columns
        length = c.length.item(row)
        tokens = self.tokens.pop(request_id, None)
        self._records.pop(request_id, None)
        if length:
            self.counters["discarded_tokens"] += length
            self.counters["refreshes"] += 1
            c.refreshes[row] += 1
            dropped = tokens.token_ids() if tokens else unknown_ids(length)
            self.drafts[request_id] = next_draft(self.drafts.get(request_id, NO_IDS), dropped)
            self.drafted.discard(request_id)
        c.clear(row)
        c.keep[row], c.refreshing[row] = True, False

    def _wait(self, request_id: int, state: int) -> None:
        row, cells = request_id - self.first_id, self.cells
        cells.state[row], cells.worker[row] = state, -1
        self.waiting[request_id] = None
        self.waiting.move_to_end(request_id, last=False)  # it was admitted before what has not begun

    def _refresh(self, request_id: int) -> None:
        """Back to PENDING without tokens, same key; what runs, once its worker has let go of it."""
        row = request_id - self.first_id
        cells = self.cells
        if cells.state[row] == RUNNING:
            cells.keep[row], cells.refreshing[row] = False, True
            self._tell_to_stop(row)
            return
        if cells.state[row] == SCORED:
            del self.scored[request_id]
            self._to_log.pop(request_id, None)
            self.groups.unscore(cells.group[row])
        self._drop(request_id)
        self._wait(request_id, PENDING)

    def _tell_to_stop(self, row: int) -> None:
        ids, attempts = self.stops.setdefault(self.cells.worker[row], ([], []))
        ids.append(row + self.first_id)
        attempts.append(self.cells.attempt[row])

    def discard(self, ids: Sequence[int], reason: str) -> None:
        """Give requests up, whatever their state. Raises ValueError if one has ended."""
        c = self.columns
        for request_id in ids:
            row = request_id - self.first_id
            state = c.state.item(row)
            if state >= CONSUMED:
                raise ValueError(f"request {request_id} is {State(state).name}: it cannot be discarded")
            if state == RUNNING:
                del self.running[c.worker.item(row)][request_id]
                self._tell_to_stop(row)
            self.waiting.pop(request_id, None)
            self.scored.pop(request_id, None)
            self._records.pop(request_id, None)
            c.state[row], c.discard_reason[row] = DISCARDED, reason
            self.alive -= 1
            self.counters["discarded_tokens"] += c.length.item(row)
            name = f"discarded/{reason}"
            self.counters[name] = self.counters.get(name, 0) + 1
            self.groups.discard(c.group.item(row), request_id, scored=state == SCORED)
            self._to_log[request_id] = None

    def take_stops(self) -> Stops:
        """What workers are to let go of since the last call: requests that were refreshed or discarded."""
        stops, self.stops = self.stops, {}
        return stops

    def _alive_rows(self) -> IntArray:
        below = self._ended_below
        rows = below + np.flatnonzero(self.columns.state[below : self.columns.size] < CONSUMED)
        self._ended_below = int(rows[0]) if rows.size else self.columns.size
        return rows

    # ---- reading and keeping --------------------------------------------------------------------------

    def rollouts(self, ids: Sequence[int]) -> list[Rollout]:
        """The responses of these requests as they stand now."""
        if not ids:
            return []
        books = self.groups.prompts, self.tokens, self.drafts
        return self.columns.rollouts(self.first_id, ids, *books)

    def rollout(self, request_id: int) -> Rollout:
        """The response of a request as it stands now."""
        return self.rollouts([request_id])[0]

    def take_finished(self) -> list[Rollout]:
        """The responses scored or discarded since the last call, by id; the ended ones are then forgotten. In the
        others the ledger goes on to note what becomes of them.
        """
        ids = sorted(self._to_log)
        missing = [i for i in ids if i not in self._records]
        made = dict(zip(missing, self.rollouts(missing), strict=True))
        finished = [made.get(i) or self._records[i] for i in ids]
        self.forget_finished()
        return finished

    def forget_finished(self) -> None:
        """As `take_finished`, for who keeps no log: the ended ones are forgotten."""
        rows = np.fromiter(self._to_log, np.int64, len(self._to_log)) - self.first_id
        over = rows[self.columns.state[rows] >= CONSUMED]
        self._forget((over + self.first_id).tolist())
        self._to_log.clear()

    def _forget(self, ids: Sequence[int]) -> None:
        """They are over, and have been logged."""
        books: tuple[dict[int, Any], ...] = (self.tokens, self.drafts, self._records)
        for book in filter(None, books):
            for request_id in ids:
                book.pop(request_id, None)
        self.drafted.difference_update(ids)
        rows = np.asarray(ids, np.int64) - self.first_id
        self.columns.reward_parts[rows] = None  # the one object of its own that a row holds
        for group, count in counted(self.columns.group[rows]):
            self.groups.forget(group, count)

    def in_flight(self) -> list[Rollout]:
        """Every request that has not ended, in order of its id; those about to drop their tokens as if they had."""
        c, rows = self.columns, self._alive_rows()
        leaving = ((c.state[rows] == RUNNING) & ~c.keep[rows]).tolist()
        rollouts = self.rollouts((rows + self.first_id).tolist())
        return [without_tokens(r) if drops else r for r, drops in zip(rollouts, leaving, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """What `in_flight` does not say; plain JSON."""
        return {
            "version": self.version,
            "next_id": self.first_id + self.columns.size,
            "next_group": self.next_group,
            "counters": dict(self.counters),
        }

    def load_state_dict(self, state: dict[str, Any], in_flight: Sequence[Rollout]) -> list[Rollout]:
        """Restore into a fresh ledger; returns the responses that were waiting for the task's answer.

        What was running is PARKED with its tokens: its worker is gone.
        """
        if self.columns.size:
            raise ValueError("a ledger is restored before anything is admitted")
        self.version, self.next_group = state["version"], state["next_group"]
        self.counters.update(state["counters"])
        self.first_id = in_flight[0].request_id if in_flight else state["next_id"]
        self.columns.grow(state["next_id"] - self.first_id)
        self.columns.state[: self.columns.size] = State.DISCARDED
        unanswered: list[Rollout] = []
        for rollout in in_flight:
            self._restore(rollout)
            if rollout.outcome in (State.FINISHED, State.WAITING):
                unanswered.append(rollout)
        return unanswered

    def _restore(self, rollout: Rollout) -> None:
        request_id, group = rollout.request_id, rollout.group_id
        state = rollout.outcome
        if state in (State.RUNNING, State.PARKED, State.PENDING):
            state = State.PARKED if len(rollout.token_ids) else State.PENDING
            self.waiting[request_id] = None
        self.columns.restore(request_id - self.first_id, rollout, state)
        if rollout.token_ids.size and not is_unknown(rollout.token_ids):
            self.tokens[request_id] = Tokens.of(rollout)
        if rollout.draft_ids.size:
            self.drafts[request_id] = rollout.draft_ids
            if rollout.token_ids.size:
                self.drafted.add(request_id)
        self.groups.restore(group, rollout.prompt, request_id, scored=state == State.SCORED)
        if state == State.SCORED:
            self.scored[request_id] = None
        self.alive += 1
