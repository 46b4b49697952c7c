"""`stream`: whole groups go to the learner as they get ready, and long responses have workers of their own (StreamRL,
2504.15930).

Harvest unit: `prompts` whole groups make an update (or as many as have `tokens_per_update`), but each goes to the
learner at once, which adds up gradients; the last one makes the optimiser step. So the update is `synchronous`'s, and
part of its work is done while the longest responses, for which it waits, are still generated.
Dispatch: the `long_share` of the responses that is predicted to be longest runs on `long_workers` workers, the others
on the rest, longest first in both. A step takes 1 + `token_cost` x batch: a small one is faster.
Without `long_workers` the split with the least time is taken: a pool's time is step time x predicted length (the 90th
percentile for the long, the median for the others) x rounds of its slots; since both pools run at the same time and the
update waits for the later, the larger of the two counts (third parties report the sum). A pool whose queue is
empty takes from the other's: the others' workers always, the long ones' only when they run nothing any more.
Nothing is split as long as all predictions are the same.

What is dropped: groups without reward variance under `drop_zero_variance`, which are replaced; with `tokens_per_update`
the tokens of what is left when enough are there: it is refreshed and comes first in the next update.
Staleness gate: max_staleness 0, always (the paper's asynchronous form is `async`'s business).
Offers the same tokens, and the same run up to the order in which gradients are added; under `tokens_per_update` only
the tokens: which groups an update takes depends on timing then, and favours short ones. Otherwise it favours none.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stretto.config import ScheduleConfig
from stretto.history.lengths import LengthHistory
from stretto.records import (
    Admit,
    Admitted,
    Decision,
    Discard,
    Event,
    Finished,
    FloatArray,
    Harvest,
    Observed,
    Publish,
    Start,
    Stopped,
    Updated,
    WorkerDown,
    WorkerUp,
)
from stretto.schedule.batches import ZeroVariance, members_of
from stretto.schedule.placement import FreeSlots, behind, fill, predict_groups, publish_cause
from stretto.view import LedgerView

Queue = list[tuple[float, int]]
"""A heap of (-predicted length, request)."""


class Stream:
    """Knobs: `prompts`, `samples`, `long_share` (alpha), `long_workers`, `token_cost`, `drop_zero_variance`,
    `tokens_per_update`.
    """

    overlaps = False

    def __init__(self, config: ScheduleConfig, lengths: LengthHistory) -> None:
        self.config = config
        self.lengths = lengths
        self.zero_variance = ZeroVariance(config)
        self.free = FreeSlots()
        self.long_workers = 0  # the first ones of those that are up
        self._long: set[int] = set()
        self._threshold = float("inf")  # predicted length from which a response counts as long
        self._queues: tuple[Queue, Queue] = ([], [])  # others, long
        self._taken = [0, 0]  # groups and tokens of the update at hand that the learner has
        self._parts = self._parts_so_far = 0

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        self.free.watch(events)
        if view.slots:
            self._queue(view, events)
        if view.updating or not view.slots:
            return []
        decisions: list[Decision] = []
        if publish_cause(events):
            old = behind(view)
            decisions += [Publish(old, "continue")] if old else []
        useless = self.zero_variance.useless(view, events)
        if useless:
            decisions.append(Discard(members_of(view, useless), "zero_variance"))
        ready = [group for group in view.ready_groups if group not in useless]
        harvest = self._harvest(view, ready)
        if harvest is not None:
            decisions.append(harvest)
            if harvest.final:
                return decisions
        return decisions + self._admit(view, len(ready), len(useless)) + self._start(view)

    def _harvest(self, view: LedgerView, ready: Sequence[int]) -> Harvest | None:
        """What is ready, up to the end of the update."""
        if not ready:
            return None
        config, taken = self.config, self._taken
        final = False
        chosen: list[int] = []
        for group in ready:
            members = view.members(group)
            chosen += members
            taken[0] += 1
            if config.tokens_per_update is None:
                final = taken[0] >= config.prompts
            else:
                taken[1] += int(view.lengths_of(members).sum())
                final = taken[1] >= config.tokens_per_update
            if final:
                break
        final = final and not view.gate(chosen).blocked  # else what was refreshed too often is waited for
        self._parts_so_far += 1
        if final:
            self._taken = [0, 0]
            self._parts, self._parts_so_far = self._parts_so_far, 0
        return Harvest(chosen, final)

    def _admit(self, view: LedgerView, ready: int, useless: int) -> list[Decision]:
        """What the update still needs: its prompts, or, if it counts tokens, as many again when all have ended."""
        config = self.config
        left = len(view.alive_groups) - ready - useless
        if config.tokens_per_update is None:
            missing = config.prompts - self._taken[0] - left
        else:
            first = self._taken[0] == 0 and ready == 0
            missing = config.prompts - left if first else useless if left else config.prompts
        return [Admit(missing, config.samples)] if missing > 0 else []

    # ---- dispatch -----------------------------------------------------------------------------------------

    def _queue(self, view: LedgerView, events: Sequence[Event]) -> None:
        """Note what waits. An update's begin, and a worker that comes or goes, make a new plan."""
        new: list[int] = []
        for event in events:
            begins = isinstance(event, Admitted) and self._taken[0] == 0
            if begins or isinstance(event, (Updated, WorkerUp, WorkerDown)):
                return self._plan(view)
            if isinstance(event, Admitted):
                new += range(event.first, event.first + event.count)
            elif isinstance(event, (Stopped, Finished, Observed)) and event.id in view.waiting:
                new.append(event.id)
        if new:
            predicted = predict_groups(view, dict.fromkeys(view.groups_of(new).tolist()), self.lengths)
            for request_id in new:
                length = predicted[view.group_of(request_id)]
                heapq.heappush(self._queues[length >= self._threshold], (-length, request_id))
        return None

    def _plan(self, view: LedgerView) -> None:
        """Divide what waits, and the workers."""
        ids = list(view.waiting)
        groups = view.groups_of(ids).tolist() if ids else []
        predicted = predict_groups(view, dict.fromkeys(groups), self.lengths)
        lengths = np.array([predicted[group] for group in groups])
        workers = view.line()
        self.long_workers, self._threshold = 0, float("inf")
        if len(workers) > 1 and lengths.size and lengths.min() < lengths.max():
            threshold = float(np.quantile(lengths, 1 - self.config.long_share, method="higher"))
            if threshold > lengths.min():
                self._threshold = threshold
                slots = min(view.slots.values())
                fixed = self.config.long_workers
                self.long_workers = (
                    min(fixed, len(workers) - 1)
                    if fixed is not None
                    else split(
                        lengths,
                        int((lengths >= threshold).sum()),
                        len(workers),
                        slots,
                        self.config.token_cost,
                    )
                )
        self._long = set(workers[: self.long_workers])
        self._queues = ([], [])
        for request_id, length in zip(ids, lengths.tolist(), strict=True):
            self._queues[length >= self._threshold].append((-length, request_id))
        for queue in self._queues:
            heapq.heapify(queue)

    def _start(self, view: LedgerView) -> list[Start]:
        others, long = self._queues
        if not others and not long:
            return []
        room = self.free.room(view, newest=True)
        apart = {worker: room.pop(worker) for worker in list(room) if worker in self._long}
        given = set[int]()
        starts = fill(view, _drain(view, long, given), apart) + fill(view, _drain(view, others, given), room)
        if long and not others:
            starts += fill(view, _drain(view, long, given), room)
        if others and not long:
            idle = {worker: free for worker, free in apart.items() if free == view.slots[worker]}
            starts += fill(view, _drain(view, others, given), idle)
        return starts

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state  # at a boundary everything is in the ledger

    def metrics(self) -> dict[str, float]:
        """Workers that the long responses have to themselves, and parts in which the last update was given."""
        return {"schedule/long_workers": float(self.long_workers), "schedule/parts": float(self._parts)}


def _drain(view: LedgerView, queue: Queue, given: set[int]) -> Iterator[int]:
    """What waits, each once: an event of an old attempt may have queued it again. Adds to `given`."""
    while queue:
        request_id = heapq.heappop(queue)[1]
        if request_id in view.waiting and request_id not in given:
            given.add(request_id)
            yield request_id


def split(lengths: FloatArray, long: int, workers: int, slots: int, token_cost: float) -> int:
    """How many of `workers` the `long` longest of the responses should have: 1 .. workers - 1. `lengths` is (n,)."""
    tail, regular = np.quantile(lengths, (0.9, 0.5)).tolist()

    def seconds(responses: int, pool: int, length: float) -> float:
        each = responses / pool
        return float((1 + token_cost * min(each, slots)) * length * max(1.0, each / slots))

    def later(pool: int) -> float:
        others = seconds(lengths.size - long, workers - pool, regular)
        return max(seconds(long, pool, tail), others)

    return min(range(1, workers), key=later)
