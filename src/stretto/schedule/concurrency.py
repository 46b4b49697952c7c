"""`concurrency`: a fixed pool of responses in flight; an update takes what is whole first (CoPRIS, 2511.05589).

`concurrency` responses are in flight; each that ends lets in the next. Harvest unit: the first `prompts` whole groups
(with `unit = "response"` as many single responses; or `tokens_per_update`). Nobody waits for the longest response:
at a harvest the rest is stopped with its tokens kept, so that nothing runs during the update (the devices may be the
trainer's), and goes on first under the new weights, K/V recomputed. A response may then have tokens of several
versions, each with the log-prob that it was sampled with.
With `refill = false` it is APRIL (2509.18521): what is missing to `concurrency` responses is let in after an update
only, all at once; an update takes the first `prompts` groups, and the rest is resumed first.

What is dropped: groups whose rewards are all equal under `drop_zero_variance` (the next are let in), and what the
ledger's staleness gate asks for at `max_staleness` and `off_policy_strategy`; the published form has no bound (none).
While an update waits, as the gate may ask, nobody is let in: what ends meanwhile could grow without bound. Nor while
rewards are so late that, besides the pool, as many responses as an update takes have none. Under "wait" no more is
begun than (max_staleness + 1) updates need.
Offers the same distribution: harvest sets depend on timing. Each update favours short groups, the more the larger the
pool is; what is long is trained on later, not less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.config import ScheduleConfig
from stretto.records import Admit, Decision, Discard, Event, Harvest, Publish, Stop
from stretto.schedule.batches import Closing, ZeroVariance, members_of
from stretto.schedule.placement import FreeSlots, behind, fill, publish_cause
from stretto.view import LedgerView


class Concurrency:
    """Knobs: `prompts`, `samples`, `concurrency` (N', none: as many as there are slots), `refill`, `unit`,
    `max_staleness`, `off_policy_strategy`, `refresh_budget`, `drop_zero_variance`, `tokens_per_update`.
    """

    overlaps = False

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.closing = Closing(config)
        self.zero_variance = ZeroVariance(config)
        self.free = FreeSlots()
        self._let_in = False  # since the last update
        self._metrics: dict[str, float] = {}

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        self.free.watch(events)
        useless = self.zero_variance.useless(view, events)
        gone = members_of(view, useless)
        decisions: list[Decision] = [Discard(gone, "zero_variance")] if gone else []
        if view.updating or not view.slots:
            return decisions
        if publish_cause(events):
            old = behind(view)
            decisions += [Publish(old, "continue")] if old else []  # nothing runs that could be concerned
        batch = self.closing.batch(view, useless)
        if batch:
            running = [i for worker in view.slots for i in view.running(worker)]
            self._let_in = False
            self._metrics = {"schedule/carried_over": len(running)}
            return [*decisions, *([Stop(running, keep=True)] if running else []), Harvest(batch)]
        return decisions + self._go_on(view, len(gone))

    def _go_on(self, view: LedgerView, gone: int) -> list[Decision]:
        config = self.config
        limits = [limit for limit in (self.closing.room(view, gone), self._pool(view)) if limit is not None]
        room = self.free.room(view, newest=True, enough=min(limits, default=None))
        wanted = max(0, min([sum(room.values()), *limits]))
        decisions: list[Decision] = []
        decisions += fill(view, self.closing.startable(view, False), room, wanted)
        pool = config.concurrency or sum(view.slots.values())
        unfinished = view.alive - len(view.scored)
        missing = min(wanted - len(view.waiting), pool + config.prompts * config.samples - unfinished)
        if not config.refill:
            let_in, self._let_in = self._let_in and unfinished > 0, True
            missing = 0 if let_in else pool - unfinished
        if missing > 0 and not self.closing.gate.blocked:
            decisions.append(Admit(-(-missing // config.samples), config.samples))
        return decisions

    def _pool(self, view: LedgerView) -> int | None:
        """How many more may be in flight."""
        if self.config.concurrency is None or not self.config.refill:
            return None
        return self.config.concurrency - self.free.in_flight(view)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state  # at a boundary everything is in the ledger

    def metrics(self) -> dict[str, float]:
        """Responses that were in flight at the last harvest, and went on after the update."""
        metrics, self._metrics = self._metrics, {}
        return metrics
