"""`one_pass`: answer the data once and stop. Not a training schedule: evaluation runs on the same loop with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.records import Admit, Decision, Event
from stretto.schedule.placement import spread_groups
from stretto.view import LedgerView


class OnePass:
    """Admits `prompts` rows at once, `samples` each, and never harvests."""

    overlaps = False

    def __init__(self, prompts: int, samples: int) -> None:
        self.prompts = prompts
        self.samples = samples

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        del events
        if not view.slots:
            return []
        if view.admitted_groups == 0:
            return [Admit(self.prompts, self.samples)]
        return list(spread_groups(view, view.waiting)) if view.waiting else []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state

    def metrics(self) -> dict[str, float]:
        return {}
