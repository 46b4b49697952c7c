"""`sorted`: harvest what is finished first, so that updates go from short responses to long ones and no slot waits for
the longest (SortedRL, 2603.23414; reconstructed, no official code).

A load of `load_prompts` x `prompts` prompts is taken in at once and nothing new before all of it has been consumed
(grouped loading: nobody starves). More responses wait than there are slots; a slot that gets free is filled at once.
Harvest unit: whole groups, or single responses (the paper's, with a baseline that needs no siblings). An update closes
as soon as `prompts` groups (or as many responses, or `tokens_per_update`) are scored; where more are, the oldest
versions go first, then what was refreshed most, then the shortest. Successive updates of a load get longer: the
micro-curriculum, to be seen in `schedule/harvest_of_load` and `schedule/harvest_length_mean`. Sorting decides what an
update takes; inside it the ledger's canonical order stands, for an update is one optimiser step on all of it
(docs/decisions/0006).
The last harvest of a load takes what is left and waits for all of it; else nobody waits.

What is dropped, and the staleness gate: the ledger's, at `max_staleness`. 0 is the paper's fully on-policy mode: at a
harvest everything that holds tokens is refreshed (not redrawn: same keys, its old tokens as draft) and starts again
under the new weights, after all that has been refreshed less often: who was not done at a harvest is rather long, and
at the next ones would again hold a slot for nothing. Nothing runs during the update. From 1 on it is the partial mode:
running responses go on through the update and the loading of weights, with tokens, log-probs and versions kept, their
K/V recomputed or continued as `running` says. They are not stopped: a colocated fleet pauses its engines itself, any
other would only idle, and a stopped response would need the same recomputation. None bounds nothing. `refresh_budget`:
unset, a response may be refreshed at every harvest, for the load's end is its drain anyway.
`drop_zero_variance` gives up useless groups and adds as many new prompts to the load.

Offers the same tokens when on-policy (over a load at learning rate 0 exactly `synchronous`'s), else the same
distribution: the harvest sets depend on timing. Each update favours a length, short ones first; a load favours none.
With `post_hoc` the whole load is generated before it is sorted into updates: the paper's ablation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
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
    Stopped,
    Updated,
    WorkerDown,
)
from stretto.schedule.batches import Closing, ZeroVariance, members_of
from stretto.schedule.placement import FreeSlots, behind, fill, publish_cause
from stretto.view import LedgerView

LEAVING = frozenset((Stopped, Finished, Observed))
"""Events after which a request may wait again."""


class FewestRefreshes:
    """What waits: first what has tokens, then what was refreshed least often, then in order of admission."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._queued: set[int] = set()
        self._complete = False  # nothing was seen yet: perhaps requests wait from before

    def watch(self, view: LedgerView, events: Sequence[Event]) -> None:
        """Take in what has begun to wait. O(waiting) where the gate may have taken tokens, else O(events)."""
        for event in events:
            if isinstance(event, Admitted):
                self._queue(view, range(event.first, event.first + event.count))
            elif type(event) in LEAVING:
                if event.id in view.waiting:  # type: ignore[union-attr]
                    self._queue(view, [event.id])  # type: ignore[union-attr]
            elif isinstance(event, (Updated, WorkerDown)):
                self._complete = False
        if not self._complete:
            self._complete = True
            self._heap, self._queued = [], set()
            self._queue(view, list(view.waiting))

    def _queue(self, view: LedgerView, ids: Sequence[int]) -> None:
        for request_id in ids:
            if request_id not in self._queued:
                self._queued.add(request_id)
                often = -1 if view.length(request_id) else view.refreshes(request_id)
                heapq.heappush(self._heap, (often, request_id))

    def take(self, view: LedgerView) -> Iterator[int]:
        """One after another; who is taken has to be started."""
        while self._heap:
            request_id = heapq.heappop(self._heap)[1]
            self._queued.discard(request_id)
            if request_id in view.waiting:
                yield request_id


class Sorted:
    """Knobs: `prompts`, `samples`, `load_prompts` (in multiples of `prompts`), `unit`, `max_staleness`,
    `off_policy_strategy`, `refresh_budget`, `running`, `post_hoc`, `drop_zero_variance`, `tokens_per_update`.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.on_policy = config.max_staleness == 0
        self.overlaps = not self.on_policy
        self.closing = Closing(config, shortest_first=True)
        self.zero_variance = ZeroVariance(config)
        self.free = FreeSlots()
        self.order = FewestRefreshes()
        self.harvests = 0  # of the load at hand
        self._metrics: dict[str, float] = {}

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        self.free.watch(events)
        self.order.watch(view, events)
        if not view.slots:
            return []
        config, decisions = self.config, list[Decision]()
        if publish_cause(events) and not view.updating:
            old = behind(view)
            decisions += [Publish(old, config.running)] if old else []
        useless = self.zero_variance.useless(view, events)
        if useless:
            decisions += [
                Discard(members_of(view, useless), "zero_variance"),
                Admit(len(useless), config.samples),
            ]
        unfinished = view.alive > len(view.scored) or bool(useless)
        batch = (
            [] if unfinished and config.post_hoc else self.closing.batch(view, useless, rest=not unfinished)
        )
        if batch:
            self._note(view, batch)
            decisions.append(Harvest(batch))
        if self.on_policy and (view.updating or batch):
            return decisions  # what began before the update has ended could not be trained on
        if view.alive == len(batch) and not useless:
            self.harvests = 0
            decisions.append(Admit(config.load_prompts * config.prompts, config.samples))
        if not view.waiting:
            return decisions
        room = self.free.room(view, newest=self.on_policy)
        if not room:
            return decisions
        waiting = self.closing.startable(view, bool(batch), self.order.take(view))
        return decisions + fill(view, waiting, room, self.closing.room(view, len(batch)))

    def _note(self, view: LedgerView, batch: Sequence[int]) -> None:
        self.harvests += 1
        self._metrics = {
            "schedule/harvest_of_load": self.harvests,
            "schedule/harvest_length_mean": float(view.lengths_of(batch).mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"harvests": self.harvests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.harvests = state["harvests"]

    def metrics(self) -> dict[str, float]:
        """Of the last harvest: which of its load it was (from 1), and the mean length of its responses."""
        metrics, self._metrics = self._metrics, {}
        return metrics
