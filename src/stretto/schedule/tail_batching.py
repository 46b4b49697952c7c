"""`tail_batching`: short rounds that leave the long prompts behind, and long rounds of nothing else (RollPacker,
2509.21009, section 4).

A short round launches `max_prompts_ratio` x `prompts` prompts with `max_num_return_sequences` responses each. Of a
prompt the first `samples` scored responses are kept and the others discarded ("overlaunch"); the update takes the first
`prompts` prompts that get there. The prompts left over go to a queue. When it holds `prompts` of them the next round is
a long one: exactly the first `prompts` of the queue, `samples` responses each, to the end. (At a ratio of 1.25, four
short rounds and a long one.)

Harvest unit: `prompts` whole groups; under `tokens_per_update` as many as have so many tokens, in a long round at least
all of its prompts. In a short round nobody waits for the longest; in a long one everybody does.
What is dropped: the surplus responses; of a prompt that is left behind those beyond `samples`, by their number and not
by their length, so that the long round selects none; and groups without reward variance under `drop_zero_variance`,
which are replaced from the queue or the data. The tokens of what is left behind: the published method reruns the prompt
from nothing; here the ledger refreshes it (same keys, the old tokens as draft of the rerun).
Staleness gate: max_staleness 0, always; the method is synchronous.
Offers the same tokens (a response depends on its weights and its key only); which ones are kept depends on timing.
Favours short responses for good: the fastest `samples` of `max_num_return_sequences` are trained on, the others never.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil
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
    Scored,
    Stopped,
    WorkerDown,
)
from stretto.schedule.batches import Fruitless, differ
from stretto.schedule.placement import FreeSlots, behind, fill, publish_cause
from stretto.view import LedgerView


class TailBatching:
    """Knobs: `prompts` (P0), `samples` (R0), `max_prompts_ratio` (eta), `max_num_return_sequences` (none: 1.25 x
    `samples`), `drop_zero_variance`, `tokens_per_update`.
    """

    overlaps = False

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.launched = ceil(config.prompts * config.max_prompts_ratio - 1e-9)
        self.responses = config.max_num_return_sequences or ceil(1.25 * config.samples - 1e-9)
        self.free = FreeSlots()
        self.fruitless = Fruitless(config)
        self.long = False
        self.round: dict[int, None] | None = None  # groups of the round at hand
        self._kept: dict[
            int, list[int]
        ] = {}  # those of them that are complete, in this order -> their responses
        self._starts: deque[int] = deque()
        self._metrics: dict[str, float] = {}

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        self.free.watch(events)
        if view.updating:
            return []
        decisions: list[Decision] = []
        if publish_cause(events):
            old = behind(view)
            decisions += [Publish(old, "continue")] if old else []
        if self.round is None:
            decisions += self._begin(view)
        self._queue(view, events)
        decisions += self._complete(view, events)
        whole = not any(isinstance(d, Admit) for d in decisions)  # else who is to come belongs to this round
        batch = self._batch(view) if whole else []
        if batch:
            return decisions + self._close(view, batch)
        if self.round and len(self._kept) == len(self.round) and whole:
            decisions += self._more(view, self.config.prompts)  # all have ended, and they are not enough
        if self._starts:
            decisions += fill(view, self._next(view), self.free.room(view, newest=True))
        return decisions

    # ---- a round ------------------------------------------------------------------------------------------

    def _begin(self, view: LedgerView) -> list[Decision]:
        """Between rounds everything alive is the queue."""
        self.round = {}
        self.long = len(view.alive_groups) >= self.config.prompts
        return self._more(view, self.config.prompts if self.long else self.launched)

    def _more(self, view: LedgerView, count: int) -> list[Decision]:
        """Let so many prompts into the round: in a long one from the queue, the rest from the data."""
        assert self.round is not None
        queue = [group for group in view.alive_groups if group not in self.round] if self.long else []
        for group in queue[:count]:
            self.round[group] = None
            self._starts.extend(view.members(group))
        missing = count - len(queue)
        return [Admit(missing, self.responses)] if missing > 0 else []

    def _queue(self, view: LedgerView, events: Sequence[Event]) -> None:
        """Note what is new in the round, or has come back from its worker."""
        assert self.round is not None
        for event in events:
            if isinstance(event, Admitted):
                ids = range(event.first, event.first + event.count)
                self.round.update(dict.fromkeys(view.groups_of(ids).tolist()))
                self._starts.extend(ids)
            elif isinstance(event, (Stopped, Finished, Observed)) and event.id in view.waiting:
                self._starts.appendleft(event.id)
            elif isinstance(event, WorkerDown):
                self._starts = deque(view.waiting)

    def _next(self, view: LedgerView) -> Iterator[int]:
        assert self.round is not None
        given = set[int]()  # what a round begins with may come back from its worker and be queued once more
        while self._starts:
            request_id = self._starts.popleft()
            group = view.group_of(request_id)
            if group not in self.round or group in self._kept:
                continue  # of a kept group what still waits is being given up
            if request_id in view.waiting and request_id not in given:
                given.add(request_id)
                yield request_id

    def _complete(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        """Give up the surplus of prompts that have their responses, and prompts that teach nothing."""
        assert self.round is not None
        just: dict[int, list[int]] = {}
        for event in events:
            if isinstance(event, Scored) and event.id in view.scored:
                just.setdefault(view.group_of(event.id), []).append(event.id)
        surplus, useless = list[int](), dict[int, list[int]]()
        for group, ids in just.items():
            members = view.members(group)
            over = len(members) - view.unfinished(group) - self.config.samples
            if over < 0 or group not in self.round or group in self._kept:
                continue
            late = set(ids[len(ids) - over :])
            kept = [i for i in members if i in view.scored and i not in late]
            surplus += [i for i in members if i not in view.scored or i in late]
            if self.config.drop_zero_variance and not differ(view, kept):
                useless[group] = kept
            else:
                self._kept[group] = kept
        decisions: list[Decision] = [Discard(surplus, "overlaunch")] if surplus else []
        if useless:
            self.fruitless.count(view, len(useless))
            decisions.append(Discard([i for kept in useless.values() for i in kept], "zero_variance"))
            decisions += self._more(view, len(useless))
            for group in useless:
                del self.round[group]
        return decisions

    def _batch(self, view: LedgerView) -> list[int]:
        """The groups of the update batch, if it is complete."""
        assert self.round is not None
        wanted, prompts = self.config.tokens_per_update, self.config.prompts
        if wanted is None:
            return list(islice(self._kept, prompts)) if len(self._kept) >= prompts else []
        if self.long and len(self._kept) < len(self.round):
            return []
        for count, kept in enumerate(self._kept.values(), 1):
            wanted -= int(view.lengths_of(kept).sum())
            if wanted <= 0:
                return list(self._kept) if self.long else list(islice(self._kept, count))
        return []

    def _close(self, view: LedgerView, batch: Sequence[int]) -> list[Decision]:
        """The update; who is left behind is queued with as many responses as a long round needs."""
        assert self.round is not None
        left = [group for group in self.round if group not in batch]
        beyond = [i for g in left if g not in self._kept for i in view.members(g)[self.config.samples :]]
        self._metrics = {
            "schedule/long_round": float(self.long),
            "schedule/long_prompts_left": float(len(left)),
        }
        harvest = Harvest([i for group in batch for i in self._kept[group]])
        self.round, self._kept = None, {}
        self._starts.clear()
        return [Discard(beyond, "overlaunch"), harvest] if beyond else [harvest]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state  # between rounds everything is in the ledger

    def metrics(self) -> dict[str, float]:
        """Of the last round: whether it was a long one, and the prompts that it left behind."""
        metrics, self._metrics = self._metrics, {}
        return metrics
