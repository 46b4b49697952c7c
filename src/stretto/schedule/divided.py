"""`divided` (Seer, 2511.14617, sections 3.2 and 3.3): responses are generated in chunks, and siblings tell how long.

After `chunk_size` new tokens a response returns and may go on anywhere, so that no worker keeps the long ones. One
response of each group is its probe: probes go first, the one with the fewest tokens before the others, so that short
groups are known soon. Then comes the group with the largest estimate: the longest of its responses that have ended, or
the limit of new tokens as long as none has. Every `SERVICE`-th start is for the group that has been served least
recently. Each goes to the worker with the largest share of free slots, whatever its siblings do; its K/V is computed
again from its tokens (the authors move it through a global pool, and stay with a worker that has it).

Harvest unit: the batch of `prompts` groups, or as many as have `tokens_per_update`. The update waits for the longest
response. Nothing is dropped but, under `drop_zero_variance`, groups whose rewards are all equal, whose places are
filled. Strictly synchronous: staleness 0, no history of earlier visits. Offers the same
tokens; in one process the same run, else step shapes depend on timing. Favours no response.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from stretto.config import ScheduleConfig
from stretto.records import (
    Admit,
    Admitted,
    Decision,
    Discard,
    Event,
    Finished,
    Harvest,
    Observed,
    Publish,
    Start,
    State,
    Stopped,
    Updated,
    WorkerDown,
)
from stretto.schedule.batches import ZeroVariance, members_of
from stretto.schedule.placement import FreeSlots, behind, publish_cause
from stretto.view import LedgerView

SERVICE = 16


class Divided:
    """Knobs: `prompts`, `samples`, `chunk_size`, `drop_zero_variance`, `tokens_per_update`."""

    overlaps = False

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.zero_variance = ZeroVariance(config)
        self.free = FreeSlots()
        self.queue = ContextQueue()
        self._chunks = 0

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        self.free.watch(events)
        self.queue.watch(view, events)
        useless = self.zero_variance.useless(view, events)
        if view.updating or not view.slots:
            return []
        decisions: list[Decision] = []
        if publish_cause(events):
            old = behind(view)
            decisions += [Publish(old, "continue")] if old else []
        gone = members_of(view, useless)
        if gone:
            decisions.append(Discard(gone, "zero_variance"))
        missing = self.config.prompts - len(view.alive_groups) + len(useless)
        wanted, all_scored = self.config.tokens_per_update, len(view.scored) == view.alive
        if missing > 0:
            return [*decisions, Admit(missing, self.config.samples)]
        if all_scored:
            batch = [i for i in view.scored if i not in gone]
            if wanted is not None and view.lengths_of(batch).sum() < wanted:
                return [*decisions, Admit(self.config.prompts, self.config.samples)]
            return [*decisions, Harvest(batch)]
        return [*decisions, *self._start(view)]

    def _start(self, view: LedgerView) -> list[Start]:
        room = self.free.room(view, newest=True)
        chosen = self.queue.take(view, sum(room.values()))
        self._chunks += len(chosen)
        freest = [(-free / view.slots[worker], worker) for worker, free in room.items()]
        heapq.heapify(freest)
        starts: dict[int, list[int]] = {}
        for request_id in chosen:
            worker = freest[0][1]
            starts.setdefault(worker, []).append(request_id)
            room[worker] -= 1
            heapq.heapreplace(freest, (-room[worker] / view.slots[worker], worker))
        return [Start(ids, worker, self.config.chunk_size) for worker, ids in starts.items()]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state  # everything is in the ledger

    def metrics(self) -> dict[str, float]:
        """Chunks that were started since the last call."""
        chunks, self._chunks = self._chunks, 0
        return {"schedule/chunks": float(chunks)}


class ContextQueue:
    """What waits, in Seer's order: probes, then groups by their estimates. O(log waiting) for each request."""

    def __init__(self) -> None:
        self._probe: dict[int, int] = {}  # of each group
        self._probes: list[tuple[int, int]] = []  # heap of (tokens so far, request)
        self._waiting: OrderedDict[int, deque[int]] = (
            OrderedDict()
        )  # others by group, least recently served first
        self._longest: list[
            tuple[int, int]
        ] = []  # heap of (-estimate, group), with entries that hold no more
        self._estimate: dict[int, int] = {}  # the longest that has ended; groups of which one has
        self._taken = 0
        self._stale = True  # it may not be known what waits

    def watch(self, view: LedgerView, events: Sequence[Event]) -> None:
        """Take in what has begun to wait, and which lengths have become known."""
        new: list[int] = []
        for event in events:
            match event:
                case Admitted():
                    new += range(event.first, event.first + event.count)
                case Finished() | Stopped() | Observed():
                    if event.id in view.waiting:
                        new.append(event.id)
                    elif isinstance(event, Finished):
                        self._ended(view, event.id)
                case WorkerDown() | Updated():
                    self._stale = True
        if self._stale:
            self._rebuild(view)
        else:
            for request_id in new:
                self._add(view, request_id)

    def _rebuild(self, view: LedgerView) -> None:
        self._stale = False
        self._probes, self._longest = [], []
        self._waiting.clear()
        for table in (self._probe, self._estimate):
            for group in [group for group in table if group not in view.alive_groups]:
                del table[group]
        for group in view.alive_groups:
            for member in view.members(group):
                if view.state(member) in (State.FINISHED, State.SCORED):
                    self._ended(view, member)
        for request_id in sorted(view.waiting):
            self._add(view, request_id)

    def _ended(self, view: LedgerView, request_id: int) -> None:
        group, length = view.group_of(request_id), view.length(request_id)
        if length > self._estimate.get(group, 0):
            self._estimate[group] = length
            self._rank(view, group)

    def _rank(self, view: LedgerView, group: int) -> None:
        if group in self._waiting:
            heapq.heappush(self._longest, (-self._estimate.get(group, view.max_new_tokens), group))

    def _add(self, view: LedgerView, request_id: int) -> None:
        group = view.group_of(request_id)
        if self._probe.setdefault(group, view.members(group)[0]) == request_id:
            heapq.heappush(self._probes, (view.length(request_id), request_id))
        elif group not in self._waiting:
            self._waiting[group] = deque([request_id])
            self._rank(view, group)
        elif view.length(request_id):
            self._waiting[group].appendleft(request_id)  # what has been begun goes on first
        else:
            self._waiting[group].append(request_id)

    def take(self, view: LedgerView, count: int) -> list[int]:
        """The next `count` to be started, or fewer."""
        chosen: dict[int, None] = {}  # an event of an old attempt may have queued one again
        while len(chosen) < count and (self._probes or self._waiting):
            request_id = self._pop(view)
            if request_id in view.waiting:
                chosen[request_id] = None
        return list(chosen)

    def _pop(self, view: LedgerView) -> int:
        if self._probes:
            return heapq.heappop(self._probes)[1]
        self._taken += 1
        group = next(iter(self._waiting)) if self._taken % SERVICE == 0 else self._longest_group(view)
        request_id = self._waiting[group].popleft()
        self._waiting.move_to_end(group)
        if not self._waiting[group]:
            del self._waiting[group]
        return request_id

    def _longest_group(self, view: LedgerView) -> int:
        while True:
            estimate, group = self._longest[0]
            if group in self._waiting and -estimate == self._estimate.get(group, view.max_new_tokens):
                return group
            heapq.heappop(self._longest)
