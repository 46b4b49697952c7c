"""Which request starts next, on which worker, with which weights."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence
from itertools import islice

import numpy as np

from stretto.history.lengths import LengthHistory
from stretto.records import (
    Admitted,
    Event,
    Finished,
    Loaded,
    Start,
    State,
    Stopped,
    Updated,
    WorkerDown,
    WorkerUp,
)
from stretto.view import LedgerView

NEW_WEIGHTS = frozenset((Updated, WorkerUp))
ROOM = frozenset((Finished, Stopped, Loaded, WorkerUp, WorkerDown))
"""Events after which there may be weights to publish, and room."""
ENDED = (State.FINISHED, State.SCORED)


def spread_groups(
    view: LedgerView, ids: Iterable[int], predicted: dict[int, float] | None = None
) -> list[Start]:
    """Start requests group by group, each group on the worker with the least work per slot (ties: lower
    number).

    Siblings stay together because their worker then computes their prompt once. Work is counted in requests, or in
    `predicted` tokens by group; then what runs already counts as the mean.
    """
    by_group: dict[int, list[int]] = {}
    for request_id in ids:
        by_group.setdefault(view.group_of(request_id), []).append(request_id)
    predicted = predicted or {}
    mean = sum(predicted.values()) / len(predicted) if predicted else 1.0
    slots = view.slots
    load = {worker: mean * view.num_running(worker) for worker in slots}
    heap = [(work / slots[worker], worker) for worker, work in load.items()]
    heapq.heapify(heap)
    starts: dict[int, list[int]] = {}
    for group, members in by_group.items():
        worker = heap[0][1]
        load[worker] += predicted.get(group, mean) * len(members)
        heapq.heapreplace(heap, (load[worker] / slots[worker], worker))
        starts.setdefault(worker, []).extend(members)
    return [Start(members, worker) for worker, members in starts.items()]


def predict_groups(view: LedgerView, groups: Iterable[int], lengths: LengthHistory) -> dict[int, float]:
    """Predicted tokens of a response, by group: from earlier visits, and siblings that have ended. A prompt that was
    never answered gets the mean of the others.
    """
    found = {group: lengths.predict(view.prompt(group), ended_lengths(view, group)) for group in groups}
    known = [length for length in found.values() if length is not None]
    mean = sum(known) / len(known) if known else 1.0
    return {group: mean if length is None else length for group, length in found.items()}


def ended_lengths(view: LedgerView, group: int) -> list[int]:
    """How long those of a group are that have ended."""
    return [view.length(i) for i in view.members(group) if view.state(i) in ENDED]


def longest_first(view: LedgerView, ids: Iterable[int], lengths: LengthHistory) -> list[Start]:
    """As `spread_groups`, the predicted longest groups first, each where the least predicted work is: longest
    processing time first (Graham, 1969).
    """
    ids = list(ids)
    predicted = predict_groups(view, dict.fromkeys(map(view.group_of, ids)), lengths)
    ids.sort(key=lambda i: (-predicted[view.group_of(i)], i))
    return spread_groups(view, ids, predicted)


class LongestFirst:
    """What waits, the predicted longest first; in front of all what has come back from a worker.

    A heap, since what waits may be much more than what starts. Predictions are those of the time of admission.
    """

    def __init__(self, lengths: LengthHistory) -> None:
        self.lengths = lengths
        self._heap: list[tuple[float, int]] = []
        self._queued: set[int] = set()
        self._resumed = True  # nothing was seen yet: perhaps requests wait from before

    def admitted(self, view: LedgerView, events: Sequence[Event]) -> None:
        """Take in what was admitted."""
        new = [range(e.first, e.first + e.count) for e in events if isinstance(e, Admitted)]
        ids = list(view.waiting) if self._resumed else [i for part in new for i in part]
        self._resumed = False
        predicted = predict_groups(view, dict.fromkeys(map(view.group_of, ids)), self.lengths)
        for request_id in ids:
            self._queue(-predicted[view.group_of(request_id)], request_id)

    def _queue(self, priority: float, request_id: int) -> None:
        heapq.heappush(self._heap, (priority, request_id))
        self._queued.add(request_id)

    def take(self, view: LedgerView, count: int, leaving: Container[int] = ()) -> list[int]:
        """The next `count` to start, or fewer; none of the groups `leaving`."""
        chosen: list[int] = []
        for request_id in view.waiting:  # what came back is in front
            if request_id in self._queued or len(chosen) == count:
                break
            if view.group_of(request_id) not in leaving:
                chosen.append(request_id)
        passed: list[tuple[float, int]] = []
        while self._heap and len(chosen) < count:
            priority, request_id = heapq.heappop(self._heap)
            self._queued.discard(request_id)
            if request_id not in view.waiting:
                continue  # discarded
            if view.group_of(request_id) in leaving:
                passed.append((priority, request_id))
            else:
                chosen.append(request_id)
        for entry in passed:
            self._queue(*entry)
        return chosen


def publish_cause(events: Sequence[Event]) -> bool:
    """Whether weights should be published now: once per update, and once when a worker has come up."""
    for event in events:  # noqa: SIM110 - asked at every turn, and `any` takes three times as long
        if type(event) in NEW_WEIGHTS:
            return True
    return False


class FreeSlots:
    """Where there is room, kept up by events: O(events) instead of O(workers) each time.

    Requests wait in the ledger, not in engines' queues: there they can still be placed anywhere.
    """

    def __init__(self) -> None:
        self._workers: dict[int, None] = {}  # those that may have room
        self._recent: dict[int, None] = {}  # of those, the last events'
        self._running: dict[int, int] = {}  # worker -> responses, when it was last counted
        self._changed: set[int] = set()  # since then
        self._total = 0

    def watch(self, events: Sequence[Event]) -> None:
        """Take note of who has let go of something, or has come up."""
        recent: dict[int, None] = {}
        self._recent = recent
        for event in events:
            if type(event) in ROOM:
                recent[event.worker] = None  # type: ignore[union-attr]
        if recent:
            self._workers.update(recent)
            self._changed.update(recent)

    def room(self, view: LedgerView, newest: bool = False, enough: int | None = None) -> dict[int, int]:
        """Worker -> free slots, where there are some; `newest`: only of workers that have the newest weights. If
        `enough` have just become free, only these.
        """
        if enough is not None and len(self._recent) < len(self._workers):
            free = self._free(view, self._recent, newest)
            if sum(free.values()) >= enough:
                return free
        free = self._free(view, self._workers, False)
        self._workers = dict.fromkeys(free)
        return self._free(view, free, True) if newest else free

    def _free(self, view: LedgerView, workers: Iterable[int], newest: bool) -> dict[int, int]:
        slots = view.slots
        free: dict[int, int] = {}
        for worker in workers:
            if worker in slots and not (newest and view.loaded[worker] != view.version):
                room = slots[worker] - view.num_running(worker)
                if room > 0:
                    free[worker] = room
        if free:
            self._changed.update(free)
        return free

    def in_flight(self, view: LedgerView) -> int:
        """Responses that run or are queued on workers; those given up until their worker has let go of them."""
        for worker in self._changed:
            now = view.num_running(worker) if worker in view.slots else 0
            self._total += now - self._running.get(worker, 0)
            self._running[worker] = now
        self._changed.clear()
        return self._total


def fill(view: LedgerView, ids: Iterable[int], room: dict[int, int], limit: int | None = None) -> list[Start]:
    """Start as many of `ids` as `room` (worker -> free slots) has places for, at most `limit`, in this order, and take
    those places. Each group goes where the share of free slots is largest, its siblings together as far as they fit:
    their prompt is then computed once.
    """
    total = sum(room.values())
    if limit is not None:
        total = max(0, min(total, limit))
    chosen = list(islice(ids, total))
    if not chosen:
        return []
    if len(room) == 1:
        (worker,) = room
        room[worker] -= len(chosen)
        return [Start(chosen, worker)]
    heap = [(-free / view.slots[worker], worker) for worker, free in room.items() if free]
    heapq.heapify(heap)
    starts: dict[int, list[int]] = {}
    at = 0
    for end in _group_ends(view, chosen):
        while at < end:
            worker = heap[0][1]
            taken = chosen[at : min(end, at + room[worker])]
            starts.setdefault(worker, []).extend(taken)
            at += len(taken)
            room[worker] -= len(taken)
            if room[worker]:
                heapq.heapreplace(heap, (-room[worker] / view.slots[worker], worker))
            else:
                heapq.heappop(heap)
    return [Start(part, worker) for worker, part in starts.items()]


def _group_ends(view: LedgerView, ids: Sequence[int]) -> list[int]:
    """Where, in a list of requests, one group ends and the next begins."""
    groups = view.groups_of(ids)
    return [*(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(ids)]


def behind(view: LedgerView) -> list[int]:
    """Workers that have not the newest weights. O(workers): ask at `publish_cause` only."""
    return [worker for worker, version in view.loaded.items() if version != view.version]
