"""What an update batch is made of: shared by the schedules."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np

from stretto.config import ScheduleConfig
from stretto.errors import StrettoError
from stretto.gate import Gate
from stretto.records import Event, IntArray, Scored, State, WorkerUp
from stretto.view import LedgerView


def usable(view: LedgerView, group: int, drop_zero_variance: bool) -> bool:
    """Whether a ready group teaches anything: under dynamic sampling (DAPO, 2503.14476, section 3.2) only where usable
    rewards differ.
    """
    return not drop_zero_variance or differ(view, view.members(group))


def differ(view: LedgerView, ids: Sequence[int]) -> bool:
    """Whether these have usable rewards that differ."""
    rewards = view.rewards_of(ids)
    rewards = rewards[~np.isnan(rewards)]
    return bool(rewards.size) and bool((rewards != rewards[0]).any())


def just_ready_but_useless(view: LedgerView, events: Sequence[Event]) -> list[int]:
    """The groups that have become ready with these events, and are not `usable` under dynamic sampling."""
    scored = [event.id for event in events if isinstance(event, Scored)]
    groups = dict.fromkeys(view.group_of(i) for i in scored if i in view.scored)
    return [group for group in groups if group in view.ready_groups and not usable(view, group, True)]


class Fruitless:
    """Ends a run in which nothing can be learned (verl: `filter_groups.max_num_gen_batches`): so many batches' worth of
    groups were given up for their equal rewards since the last update.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self._batches = config.max_num_gen_batches
        self._prompts = config.prompts
        self._version = 0
        self._groups = 0

    def count(self, view: LedgerView, groups: int) -> None:
        """So many more are given up. Raises StrettoError when it is enough.

        While the learner is at work, or has an update's groups waiting for it, nobody lacks them.
        """
        if view.updating or len(view.ready_groups) - groups >= self._prompts:
            return
        if view.version != self._version:
            self._version, self._groups = view.version, 0
        self._groups += groups
        if self._batches is not None and self._groups >= self._batches * self._prompts:
            raise StrettoError(
                f"schedule.drop_zero_variance: since update {view.version}, {self._groups} groups were given up, since "
                f"all their rewards are equal: {self._batches} times what an update takes "
                "(schedule.max_num_gen_batches): the reward does not tell responses apart, or the prompts are too hard "
                "or too easy; look at the rewards (`stretto show`), use other prompts or more schedule.samples, or set "
                'schedule.max_num_gen_batches = "none"'
            )


class ZeroVariance:
    """Finds groups that teach nothing (dynamic sampling), each once, when they get ready."""

    def __init__(self, config: ScheduleConfig) -> None:
        self.drop = config.drop_zero_variance
        self.fruitless = Fruitless(config)
        self._first = True

    def useless(self, view: LedgerView, events: Sequence[Event]) -> list[int]:
        """Those that have become ready with these events. At first (perhaps of a resumed run), and when a worker has
        come up (perhaps the only one, and nobody has looked before), all that are. StrettoError: see `Fruitless`.
        """
        if not self.drop:
            return []
        first, self._first = self._first, False
        if first or any(isinstance(event, WorkerUp) for event in events):
            found = [group for group in view.ready_groups if not usable(view, group, True)]
        else:
            found = just_ready_but_useless(view, events)
        if found:
            self.fruitless.count(view, len(found))
        return found


def members_of(view: LedgerView, groups: Iterable[int]) -> list[int]:
    """All requests of these groups."""
    return [member for group in groups for member in view.members(group)]


def oldest_groups(view: LedgerView) -> list[int]:
    """The ready groups by their oldest token's version, then admission: what has to be trained on soonest."""
    groups = sorted(view.ready_groups)
    ids = members_of(view, groups)
    if not ids:
        return []
    starts = np.cumsum([0, *(len(view.members(group)) for group in groups[:-1])])
    oldest = np.minimum.reduceat(view.first_versions_of(ids), starts)
    return [groups[place] for place in np.argsort(oldest, kind="stable").tolist()]


def next_batch(
    view: LedgerView, groups: Iterable[int], prompts: int, tokens: int | None = None
) -> list[int] | None:
    """The requests of the first of `groups` that make an update batch; None if they are too few.

    `prompts` groups, or with `tokens` the fewest that have so many together (C3PO: every update the same number of
    tokens, up to one group).
    """
    chosen: list[int] = []
    total = 0
    for count, group in enumerate(groups, 1):
        members = view.members(group)
        chosen.extend(members)
        if tokens is not None:
            total += int(view.lengths_of(members).sum())
        if count >= prompts if tokens is None else total >= tokens:
            return chosen
    return None


def next_responses(
    view: LedgerView, ids: Sequence[int], responses: int, tokens: int | None = None
) -> list[int] | None:
    """`next_batch` of single responses: the first `responses` of `ids`, or the fewest that have `tokens`."""
    if tokens is None:
        return list(ids[:responses]) if len(ids) >= responses else None
    totals = np.cumsum(view.lengths_of(ids))
    enough = int(np.searchsorted(totals, tokens))
    return list(ids[: enough + 1]) if enough < len(ids) else None


NOT_SEEN = (-1, 0, -1)


class Closing:
    """Closes update batches: enough of what is scored, where the gate consents.

    Takes whole groups or single responses, the oldest tokens first (they have to be trained on soonest), among those
    what was refreshed most, then the shortest or what was ready first. While the gate makes the update wait, it is not
    asked again before all that it waits for have ended.
    """

    def __init__(self, config: ScheduleConfig, *, shortest_first: bool = False) -> None:
        self.config = config
        self.shortest_first = shortest_first
        self.gate = Gate()
        self._few = NOT_SEEN  # what was ready at this version, so many and this one last, was not enough
        self.patient = config.off_policy_strategy == "wait" or config.refresh_budget == 0

    def batch(self, view: LedgerView, without: Container[int] = (), *, rest: bool = False) -> list[int]:
        """The requests of the next update batch; none: not now. `without` are groups that are given up; with `rest`
        fewer than enough are taken, if there are any.
        """
        if view.updating or self.waits(view):
            return []
        responses, wanted = view.unit == "response", self.config.tokens_per_update
        ready = view.scored if responses else view.ready_groups
        size = self.config.prompts * (self.config.samples if responses else 1)
        if len(ready) < (size if wanted is None and not rest else 1):
            return []
        seen = view.version, len(ready), next(reversed(ready), -1)  # type: ignore[call-overload]  # of a dict
        if seen == self._few and not rest:
            return []
        self._few = NOT_SEEN
        units = [[i] for i in ready] if responses else [view.members(g) for g in ready if g not in without]
        order, tokens = self._order(view, units)
        if wanted is not None:
            size = int(np.searchsorted(np.cumsum(tokens[order]), wanted)) + 1
        if not units or (size > len(units) and not rest):
            self._few = seen
            return []
        chosen = [i for place in order[:size].tolist() for i in units[place]]
        self.gate = view.gate(chosen)
        return [] if self.gate.blocked else chosen

    def _order(self, view: LedgerView, units: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
        """The order in which units are taken, and the tokens of each; both (U,)."""
        ids = [i for unit in units for i in unit]
        if not ids:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        starts = np.cumsum([0, *map(len, units[:-1])])
        tokens = np.add.reduceat(view.lengths_of(ids), starts)
        oldest = np.minimum.reduceat(view.first_versions_of(ids), starts)
        refreshes = np.maximum.reduceat([view.refreshes(i) for i in ids], starts)
        last = tokens if self.shortest_first else np.arange(len(units))
        return np.lexsort((last, -refreshes, oldest)), tokens

    def waits(self, view: LedgerView) -> bool:
        """Whether the update waits for somebody."""
        blocked = self.gate.blocked
        while blocked and self._ended(view, blocked[-1]):
            blocked.pop()
        return bool(blocked)

    def _ended(self, view: LedgerView, request_id: int) -> bool:
        if view.unit == "response":
            return view.state(request_id) >= State.SCORED
        return view.unfinished(view.group_of(request_id)) == 0

    def startable(self, view: LedgerView, taken: bool, order: Iterable[int] | None = None) -> Iterator[int]:
        """What waits and may be started, in `order`, when a batch has just been `taken` or not: nothing that the gate
        drops with it; where everything in the way is waited for, nothing new while an update waits. `order` is for
        all that waits where nothing is held back; otherwise, and without it, the ledger's order stands.
        """
        strategy, gate = self.config.off_policy_strategy, self.gate
        if self.patient and gate.blocked:
            groups = {view.group_of(i) for i in gate.blocked}
            return (i for i in view.waiting if view.group_of(i) in groups)
        if strategy == "drop" and taken and gate.in_the_way:
            groups = {view.group_of(i) for i in gate.in_the_way}
            return (i for i in view.waiting if view.group_of(i) not in groups)
        return iter(view.waiting if order is None else order)

    def room(self, view: LedgerView, taken: int) -> int | None:
        """How many more may be started: where everything in the way is waited for, what (max_staleness + 1) batches
        take, in all; but whom an update waits for is started in any case.
        """
        config = self.config
        if not self.patient or config.tokens_per_update is not None or config.max_staleness is None:
            return None
        if self.gate.blocked:
            return None
        most = (config.max_staleness + 1) * config.prompts * config.samples
        return most - (view.alive - taken - len(view.waiting))
