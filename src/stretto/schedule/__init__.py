"""Schedules: who runs where and when, and what closes an update batch. One file per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, assert_never

from stretto.config import ScheduleConfig
from stretto.history.lengths import LengthHistory
from stretto.records import Decision, Event
from stretto.view import LedgerView

if TYPE_CHECKING:
    from stretto.staleness import Strategy, Unit


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


class LedgerOptions(TypedDict):
    """What a schedule asks of its ledger."""

    unit: Unit
    max_staleness: int | None
    strategy: Strategy
    batch: int
    refresh_budget: int


ON_POLICY = ("synchronous", "tail_batching", "divided", "stream")
"""Kinds that train on responses of the current weights only."""

UNLIMITED = (1 << 31) - 1


def ledger_options(config: ScheduleConfig) -> LedgerOptions:
    """The keyword arguments for the ledger that this schedule runs on."""
    bound = 0 if config.kind in ON_POLICY else config.max_staleness
    strategy, budget = config.off_policy_strategy, config.refresh_budget
    if budget is None:  # in `sorted` the end of a load keeps everybody from starving
        budget = UNLIMITED if config.kind == "sorted" else 2
    return {
        "unit": config.unit,
        "max_staleness": None if strategy == "paced" else bound,
        "strategy": "refresh" if strategy == "paced" else strategy,
        "batch": config.prompts * config.samples,
        "refresh_budget": budget,
    }


def make_schedule(config: ScheduleConfig, lengths: LengthHistory | None = None) -> Schedule:
    """The schedule that the configuration names; `lengths` is what it predicts by, none: nothing known yet."""
    lengths = lengths or LengthHistory()
    match config.kind:
        case "synchronous":
            from stretto.schedule.synchronous import Synchronous

            return Synchronous(config, lengths)
        case "async":
            from stretto.schedule.asynchronous import Async

            return Async(config, lengths)
        case "sorted":
            from stretto.schedule.sorted import Sorted

            return Sorted(config)
        case "tail_batching":
            from stretto.schedule.tail_batching import TailBatching

            return TailBatching(config)
        case "concurrency":
            from stretto.schedule.concurrency import Concurrency

            return Concurrency(config)
        case "stream":
            from stretto.schedule.stream import Stream

            return Stream(config, lengths)
        case "histopipe":
            from stretto.schedule.histopipe import HistoPipe

            return HistoPipe(config, lengths)
        case "divided":
            from stretto.schedule.divided import Divided

            return Divided(config)
        case "elastic":
            from stretto.schedule.elastic import Elastic

            return Elastic(config)
        case _:
            assert_never(config.kind)
