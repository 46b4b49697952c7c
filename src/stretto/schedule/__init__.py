"""Schedules: who runs where and when, and what closes an update batch. One file per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from stretto.config import ScheduleConfig
from stretto.records import Decision, Event
from stretto.view import LedgerView


class Schedule(Protocol):
    """Pure logic: sees the ledger and what has just happened, returns decisions."""

    overlaps: bool
    """Whether it may generate while the learner updates: such a schedule cannot use `shared` weights."""

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        """Called once per batch of events, after the ledger has taken them in."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers besides the ledger; plain JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""

    def metrics(self) -> dict[str, float]:
        """Its own figures since the last call."""


def make_schedule(config: ScheduleConfig) -> Schedule:
    """The schedule that the configuration names."""
    from stretto.schedule.asynchronous import Async
    from stretto.schedule.synchronous import Synchronous

    return Async(config) if config.kind == "async" else Synchronous(config)
