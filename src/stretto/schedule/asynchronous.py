"""`async`: generation never waits for the learner; admission is paced (AReaL, 2505.24298, section 5.1), and the gate
keeps what pacing alone does not: no response is trained on that is more than `max_staleness` updates old.

Harvest unit: `prompts` whole groups (`unit = "response"`: as many single responses), the oldest tokens first.
Who waits: admission, for pacing; an update, for what has been refreshed `refresh_budget` times and is in the way again
(`off_policy_strategy = "wait"`: for everything that is in the way). At new weights running responses go on, with their
K/V recomputed under them (AReaL's interruptible rollout) or kept. What is dropped: with "refresh" the tokens of what is
in the way, which come back as its draft; with "drop" whole groups, for the reason "stale"; under `drop_zero_variance`
groups whose rewards are all equal.
Staleness gate: the ledger's, at `max_staleness`. "paced" is AReaL's own: no more than (max_staleness + 1) batches that
are not trained on yet are let in, which bounds how far generation runs ahead on average, not how stale a straggler
gets; the metrics report what it was. Without a `max_staleness` there is neither: what fits the slots is let in, as long
as rewards and learner follow (less than an update's responses wait for rewards, less than two updates for the learner).
Offers the same distribution: which weights sampled a token depends on timing. Favours short responses in early updates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from stretto.config import ScheduleConfig
from stretto.gate import Gate
from stretto.history.lengths import LengthHistory
from stretto.records import Admit, Decision, Discard, Event, Harvest, Publish, Start
from stretto.schedule.batches import (
    ZeroVariance,
    members_of,
    next_batch,
    next_responses,
    oldest_groups,
)
from stretto.schedule.placement import FreeSlots, LongestFirst, behind, fill, publish_cause
from stretto.view import LedgerView

NOTHING = Gate()
NOBODY: frozenset[int] = frozenset()


class Async:
    """Knobs: `prompts`, `samples`, `unit`, `max_staleness` (eta), `off_policy_strategy`, `refresh_budget`, `running`,
    `max_concurrent`, `longest_first`, `drop_zero_variance`, `tokens_per_update`.
    """

    overlaps = True

    def __init__(self, config: ScheduleConfig, lengths: LengthHistory) -> None:
        self.config = config
        self.order = LongestFirst(lengths) if config.longest_first else None
        self.responses = config.unit == "response"
        self.size = config.prompts * (config.samples if self.responses else 1)  # of an update
        self.free = FreeSlots()
        self.zero_variance = ZeroVariance(config)
        self._asked = (-1, 0)  # a group that the gate waits for, and its unfinished members then

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        self.free.watch(events)
        if self.order is not None:
            self.order.admitted(view, events)
        if not view.slots:
            return []
        decisions: list[Decision] = []
        if publish_cause(events) and (late := behind(view)):
            decisions.append(Publish(late, self.config.running))
        dropped = self.zero_variance.useless(view, events) if self.zero_variance.drop else []
        if dropped:
            decisions.append(Discard(members_of(view, dropped), "zero_variance"))
        gone = sum(len(view.members(group)) for group in dropped) if dropped else 0
        updating, leaving = view.updating, NOBODY
        if not updating:
            batch, gate = self._batch(view, dropped)
            if batch:
                decisions.append(Harvest(batch))
                gone += len(batch)
                updating = True
                # What the gate takes the tokens of is started when it has lost them.
                leaving = frozenset(map(view.group_of, gate.in_the_way))
        if updating and view.max_staleness == 0:
            return decisions  # what began before the update has ended could not be trained on
        waiting = len(view.waiting)
        if not (waiting or self._admissible(view, view.alive - gone, updating) > 0):
            return decisions
        room = self.free.room(view)
        if not room:
            return decisions
        free = sum(room.values())
        if free > waiting:
            decisions += self._admit(view, free, view.alive - gone, updating)
        if waiting:
            decisions += self._start(view, room, free, leaving)
        return decisions

    def _batch(self, view: LedgerView, dropped: Sequence[int]) -> tuple[list[int], Gate]:
        """An update batch that the gate lets pass, if there is one, and what the gate does to the rest."""
        size, tokens = self.size, self.config.tokens_per_update
        ready = len(view.scored) if self.responses else len(view.ready_groups) - len(dropped)
        if ready < (1 if tokens else size):
            return [], NOTHING
        group, unfinished = self._asked
        if group in view.alive_groups and view.unfinished(group) == unfinished:
            return [], NOTHING  # it still waits
        if self.responses:
            found = next_responses(view, view.oldest_first(list(view.scored)), size, tokens)
        else:
            groups = [group for group in oldest_groups(view) if group not in dropped]
            found = next_batch(view, groups, size, tokens)
        batch = found or []
        gate = view.gate(batch) if batch else NOTHING
        group = view.group_of(gate.blocked[0]) if gate.blocked else -1
        self._asked = (group, view.unfinished(group))
        return ([] if gate.blocked else batch), gate

    def _start(
        self, view: LedgerView, room: dict[int, int], free: int, leaving: Collection[int]
    ) -> list[Start]:
        """Fill the `free` slots. Requests wait in the ledger, not in an engine's queue: there they can still be placed
        anywhere.
        """
        if self.order is not None:
            return fill(view, self.order.take(view, free, leaving), room)
        if leaving:
            first = islice(view.waiting, free)
            return fill(view, [i for i in first if view.group_of(i) not in leaving], room)
        return fill(view, view.waiting, room)

    def _admit(self, view: LedgerView, free: int, alive: int, updating: bool) -> list[Admit]:
        """Groups for slots that would be free otherwise, as far as pacing and the concurrency limit let them in."""
        groups = self._admissible(view, alive, updating)
        if self.config.max_staleness is None:
            if self._too_far_ahead(view, updating):
                return []
            groups = min(groups, -(-(free - len(view.waiting)) // self.config.samples))
        return [Admit(groups, self.config.samples)] if groups > 0 else []

    def _too_far_ahead(self, view: LedgerView, updating: bool) -> bool:
        """Whether rewards or the learner come so late that without pacing ever more responses would pile up."""
        config, in_flight = self.config, self.free.in_flight(view)
        unanswered = view.alive - len(view.scored) - len(view.waiting) - in_flight
        ready = len(view.scored) if self.responses else len(view.ready_groups)
        batches = 2 if view.updating else 3  # what has just been taken is still among them
        late = updating and ready >= batches * self.size
        return late or unanswered >= config.prompts * config.samples

    def _admissible(self, view: LedgerView, alive: int, updating: bool) -> int:
        """Groups that pacing and the concurrency limit let in now."""
        config, groups = self.config, 1 << 30
        if config.max_staleness is not None:
            updates = config.max_staleness + 1 - updating
            groups = (updates * config.prompts * config.samples - alive) // config.samples
            if config.tokens_per_update and not updating and len(view.scored) == view.alive:
                groups = max(groups, config.prompts)  # what was let in has too few tokens for an update
        if config.max_concurrent is not None:
            in_flight = view.alive - len(view.scored)
            groups = min(groups, (config.max_concurrent - in_flight) // config.samples)
        return groups

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state  # everything is in the ledger

    def metrics(self) -> dict[str, float]:
        return {}
