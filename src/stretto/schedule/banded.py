"""One batch laid out in bands, and how workers are filled from it: the mechanics of `histopipe`."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stretto.records import FloatArray
from stretto.schedule import bands
from stretto.schedule.batches import members_of
from stretto.view import LedgerView

Starts = dict[int, list[int]]
"""Worker -> requests to start there, in order."""


class BandedBatch:
    """What the update `step` -> `step` + 1 will consume, and what of it waits for whom."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.groups: dict[int, float] = {}  # predicted length of their responses
        self.deferred: set[int] = set()  # groups that need not be ready with the rest
        self.ready: set[int] = set()
        self.band: dict[int, int] = {}  # by group
        self.workers: list[list[int]] = []  # by band
        self.queues: list[deque[int]] = []  # by band: requests to be started
        self.size: list[int] = []  # by band: requests,
        self.left: list[int] = []  # and how many of them have no reward yet
        self.watched: set[int] = set()  # bands so near their end that outliers are looked for
        self._place: dict[int, int] = {}  # worker -> its band

    @property
    def complete(self) -> bool:
        """Whether some groups are ready, and all that have not been deferred."""
        few = len(self.groups) > len(self.ready) + len(self.deferred)
        return bool(self.ready) and not few and self.groups.keys() <= self.ready | self.deferred

    def remove(self, group: int) -> None:
        """It has been given up, or goes elsewhere."""
        self.groups.pop(group, None)
        self.band.pop(group, None)
        self.ready.discard(group)
        self.deferred.discard(group)

    def lay_out(self, view: LedgerView, widths: Sequence[int]) -> None:
        """Cut it into bands on the workers that are there, and queue what waits, the longest first."""
        groups = list(self.groups)
        self.workers = bands.line(widths, view.line(), self.step + 1)
        self._place = {worker: band for band, part in enumerate(self.workers) for worker in part}
        self.band, self.queues, self.size, self.left = {}, [], [], []
        for band, part in enumerate(self._cut(len(widths))):
            chosen = [groups[place] for place in reversed(part)]
            members = members_of(view, chosen)
            self.band.update(dict.fromkeys(chosen, band))
            self.queues.append(deque(i for i in members if i in view.waiting))
            self.size.append(len(members))
            self.left.append(sum(map(view.unfinished, chosen)))
        self.ready = {group for group in groups if group in view.ready_groups}
        self.watched.clear()

    def _cut(self, number: int) -> list[list[int]]:
        parts = bands.cut(list(self.groups.values()), number)
        return parts + [[]] * (number - len(parts))

    def lengths(self, number: int, spread: FloatArray, longest: int) -> list[FloatArray]:
        """Predicted lengths of the responses of each of `number` bands, at most `longest`; `spread` (samples,) is how
        those to a prompt lie around its own.
        """
        predicted = np.array(list(self.groups.values()))
        parts = [np.outer(predicted[np.array(part, np.int64)], spread) for part in self._cut(number)]
        return [np.minimum(part.ravel(), longest) for part in parts]

    def put_back(self, view: LedgerView, request_id: int) -> list[int]:
        """Queue a request that has come back, in front; returns the workers that may take it."""
        band = self.band[view.group_of(request_id)]
        self.queues[band].appendleft(request_id)
        return self.workers[band]

    def fill(self, view: LedgerView, free: dict[int, int], starts: Starts) -> None:
        """Give workers with `free` slots what waits in their bands; lowers `free`, adds to `starts`."""
        candidates: dict[int, list[tuple[int, int]]] = {}
        for worker, slots in free.items():
            band = self._place.get(worker)
            if slots > 0 and band is not None and self.queues[band]:
                candidates.setdefault(band, []).append((-slots, worker))
        for band, workers in candidates.items():
            for worker, ids in share(view, self.queues[band], workers).items():
                starts.setdefault(worker, []).extend(ids)
                free[worker] -= len(ids)

    def wanted_by(self) -> Iterable[int]:
        """Workers that have something left to start."""
        return (w for queue, part in zip(self.queues, self.workers, strict=True) if queue for w in part)


def share(view: LedgerView, queue: deque[int], workers: list[tuple[int, int]]) -> Mapping[int, list[int]]:
    """Take from a queue's front for `workers`, (minus free slots, worker): group by group, each by the freest."""
    heapq.heapify(workers)
    starts: Starts = {}
    given = set[int]()  # an event of an old attempt may have queued one again
    while queue and workers:
        slots, worker = heapq.heappop(workers)
        room, group = -slots, view.group_of(queue[0])
        while queue and room and view.group_of(queue[0]) == group:
            request_id = queue.popleft()
            if request_id in view.waiting and request_id not in given:
                given.add(request_id)
                starts.setdefault(worker, []).append(request_id)
                room -= 1
        if room:
            heapq.heappush(workers, (-room, worker))
    return starts
