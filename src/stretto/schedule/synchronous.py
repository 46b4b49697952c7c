"""`synchronous`: generate a whole batch, update on it, generate the next. The baseline of every paper here.

Harvest unit: the batch of `prompts` groups, or as many as have `tokens_per_update`. Everybody waits for the longest
response. Nothing is dropped but, under `drop_zero_variance`, groups whose rewards are all equal, whose places are
filled with new prompts until the batch is whole. Staleness is 0 by construction. Offers all three levels of sameness,
the same run bit for bit included. Favours no response: what was begun is
always ended.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from stretto.config import ScheduleConfig
from stretto.history.lengths import LengthHistory
from stretto.records import Admit, Decision, Discard, Event, Harvest, Publish
from stretto.schedule.batches import Fruitless, just_ready_but_useless, members_of, usable
from stretto.schedule.placement import behind, longest_first, publish_cause, spread_groups
from stretto.view import LedgerView


class Synchronous:
    """Knobs: `prompts` per update batch, `samples` per prompt, `drop_zero_variance`, `tokens_per_update`;
    `longest_first` starts and places by predicted length.
    """

    overlaps = False

    def __init__(self, config: ScheduleConfig, lengths: LengthHistory) -> None:
        self.config = config
        self.lengths = lengths
        self.fruitless = Fruitless(config)
        self._late = False  # whether workers had old weights, when it was last looked

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        if view.updating or not view.slots:
            return []
        cause = publish_cause(events)
        if cause or self._late:  # a worker that came up late, or everyone after an update
            late = behind(view)
            self._late = bool(late)
            if late:  # `Loaded` brings us back
                return [Publish(late, running="continue")] if cause else []
        useless = just_ready_but_useless(view, events) if self.config.drop_zero_variance else []
        if len(view.scored) == view.alive and self.config.drop_zero_variance:
            useless = [group for group in view.ready_groups if not usable(view, group, True)]
        if useless:
            self.fruitless.count(view, len(useless))
        missing = self.config.prompts - len(view.alive_groups) + len(useless)
        gone = members_of(view, useless)
        decisions: list[Decision] = [Discard(gone, "zero_variance")] if gone else []
        if missing > 0:
            return [*decisions, Admit(missing, self.config.samples)]
        return decisions + self._next(view, set(gone))

    def _next(self, view: LedgerView, gone: Container[int]) -> list[Decision]:
        if view.waiting and self.config.longest_first:
            return list(longest_first(view, view.waiting, self.lengths))
        if view.waiting:
            return list(spread_groups(view, view.waiting))
        if len(view.scored) < view.alive:
            return []
        wanted, batch = self.config.tokens_per_update, [i for i in view.scored if i not in gone]
        if wanted is not None and view.lengths_of(batch).sum() < wanted:
            return [Admit(self.config.prompts, self.config.samples)]
        return [Harvest(batch)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state  # everything is in the ledger

    def metrics(self) -> dict[str, float]:
        return {}
