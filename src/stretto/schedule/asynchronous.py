"""`async`: generation never waits for the learner; admission is paced (AReaL, 2505.24298, section 5.1).

Harvest unit: `prompts` whole groups, those admitted first of the ones that are ready. Nobody waits, except
for admission. Nothing is dropped: at new weights running responses go on, with their K/V recomputed under
them (AReaL's interruptible rollout) or kept. Staleness gate: none. Pacing admits no more groups than
(max_staleness + version + 1) * prompts in all, which bounds how far generation runs ahead on average, not
how stale a straggler gets; the metrics report what it was. Offers the same distribution: which weights
sampled a token depends on timing. Favours short responses in early updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from stretto.config import ScheduleConfig
from stretto.records import Admit, Decision, Event, Harvest, Publish
from stretto.schedule.placement import publish_cause, spread_groups
from stretto.view import LedgerView


class Async:
    """Knobs: `prompts`, `samples`, `max_staleness` (eta), `max_concurrent`, `running`."""

    overlaps = True

    def __init__(self, config: ScheduleConfig) -> None:
        self.prompts = config.prompts
        self.samples = config.samples
        self.max_staleness = config.max_staleness
        self.max_concurrent = config.max_concurrent
        self.running = config.running

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        if not view.slots:
            return []
        decisions: list[Decision] = []
        behind = [worker for worker, version in view.loaded.items() if version != view.version]
        if behind and publish_cause(events):
            decisions.append(Publish(behind, self.running))
        if not view.updating and len(view.ready_groups) >= self.prompts:
            oldest = sorted(view.ready_groups)[: self.prompts]
            decisions.append(Harvest([i for group in oldest for i in view.members(group)]))
        # Requests wait in the ledger, not in an engine's queue: there they can still be placed anywhere.
        free = sum(view.slots.values()) - sum(view.num_running(worker) for worker in view.slots)
        if free > 0 and view.waiting:
            decisions += spread_groups(view, islice(view.waiting, free))
        admit = self._admissible(view)
        if admit > 0 and len(view.waiting) < free:
            decisions.append(Admit(admit, self.samples))
        return decisions

    def _admissible(self, view: LedgerView) -> int:
        """Groups that pacing and the concurrency limit let in now."""
        paced = (self.max_staleness + view.version + 1) * self.prompts - view.admitted_groups
        if self.max_concurrent is None:
            return paced
        in_flight = view.alive - len(view.scored)
        return min(paced, (self.max_concurrent - in_flight) // self.samples)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state  # everything is in the ledger

    def metrics(self) -> dict[str, float]:
        return {}
