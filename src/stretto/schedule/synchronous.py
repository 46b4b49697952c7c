"""`synchronous`: generate a whole batch, update on it, generate the next. The baseline of every paper here.

Harvest unit: the batch of `prompts` groups. Everybody waits for the longest response. Nothing is dropped.
Staleness is 0 by construction. Offers all three levels of sameness, the same run bit for bit included.
Favours no response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.config import ScheduleConfig
from stretto.records import Admit, Decision, Event, Harvest, Publish
from stretto.schedule.placement import publish_cause, spread_groups
from stretto.view import LedgerView


class Synchronous:
    """Knobs: `prompts` per update batch, `samples` per prompt."""

    overlaps = False

    def __init__(self, config: ScheduleConfig) -> None:
        self.prompts = config.prompts
        self.samples = config.samples

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        if view.updating or not view.slots:
            return []
        behind = [worker for worker, version in view.loaded.items() if version != view.version]
        if behind:  # a worker that came up late, or everyone after an update; `Loaded` brings us back
            return [Publish(behind, running="continue")] if publish_cause(events) else []
        if view.waiting:
            return list(spread_groups(view, view.waiting))
        if not view.alive:
            return [Admit(self.prompts, self.samples)]
        if len(view.scored) == view.alive:
            return [Harvest(list(view.scored))]
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state  # everything is in the ledger

    def metrics(self) -> dict[str, float]:
        return {}
