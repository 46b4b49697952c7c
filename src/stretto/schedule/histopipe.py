"""`histopipe` (HistoPipe, RhymeRL, 2508.18588, section 5): long and short bands alternate on each worker.

A batch is cut into bands of predicted length, laid along the line of workers: ascending at odd steps, descending at
even ones, so that what a worker waits at the end of one step it catches up in the next. How many workers a band has:
see `stretto.schedule.bands`. A worker starts its next band without waiting, with the newest weights; so two batches
are in flight and generation is one step off.

Harvest unit: the batch as admitted, whole groups; after a deferral it is smaller and the next one larger. With
`tokens_per_update` as many groups are admitted as have so many tokens on average. Who waits: a worker that has ended
its band, for weights that are new enough for the next (at `max_staleness` 1 only if the update takes longer than the
shortest band; at 0 the schedule is synchronous). Outliers are responses of the batch that is due, among the last
`outlier_share` of their band and beyond `outlier_factor` times the prompt's earlier `outlier_quantile`. They go on at
the worker with least to do if they will probably end sooner there; else their group is deferred to the next batch.
(The authors' rules are not public.) What is dropped: tokens of what the gate refreshes or drops, such as groups
deferred at `max_staleness` 1; under `drop_zero_variance` groups whose rewards are all equal, replaced in the batch.
Staleness gate: the ledger's. Offers the same distribution: which weights sample a token depends on timing. Favours no
response; deferral makes the longest a step late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

from stretto.config import ScheduleConfig
from stretto.history.lengths import LengthHistory
from stretto.records import (
    Admit,
    Admitted,
    Decision,
    Discard,
    Event,
    Finished,
    Harvest,
    Leapt,
    Loaded,
    Observed,
    Progress,
    Publish,
    Scored,
    Start,
    State,
    Stop,
    Stopped,
    Updated,
    WorkerDown,
    WorkerUp,
)
from stretto.schedule import bands
from stretto.schedule.banded import BandedBatch, Starts
from stretto.schedule.batches import ZeroVariance, members_of
from stretto.schedule.placement import predict_groups
from stretto.view import LedgerView


class HistoPipe:
    """Knobs: `prompts`, `samples`, `bands`, `tier`, `token_cost`, `outlier`, `outlier_quantile`, `outlier_factor`,
    `outlier_share`, `max_staleness`, `off_policy_strategy`, `refresh_budget`, `running`, `drop_zero_variance`,
    `tokens_per_update`.
    """

    overlaps = True

    def __init__(self, config: ScheduleConfig, lengths: LengthHistory) -> None:
        self.config, self.lengths = config, lengths
        self._zero_variance = ZeroVariance(config)
        self.batches: deque[BandedBatch] = deque()  # in order of their steps: what is due, and the one after
        self.batch_of: dict[int, BandedBatch] = {}  # by group
        self._next_step = 0  # of the batch to be admitted next
        self._expected: deque[tuple[int, int]] = deque()  # (step, groups) asked for and not there yet
        self._group_tokens: float | None = None  # of a group, mean over updates, the newest counting half
        self._widths: tuple[list[int], list[int]] = (
            [],
            [],
        )  # of the bands, and the workers that they are for
        self._stale = True  # queues may not say what waits
        self._resumed: dict[str, Any] | None = None
        self._asked: dict[int, int] = {}  # worker -> version that it has been told to load
        self._touched: set[int] = set()  # workers that may have free slots
        self._tail: dict[int, float] = {}  # request -> length beyond which it is an outlier
        self._judged: set[int] = set()  # requests that have been one
        self._moves: dict[int, int] = {}  # request -> worker that it goes to
        self._blocked: set[int] = set()  # for whom the gate makes the due batch wait
        self._migrated = self._deferred = 0

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        if not view.slots:
            self._stale = True  # what happens meanwhile is read from the ledger when a worker has come up
            return []
        useless = self._see(view, events)
        decisions = [*self._replace(view, useless)] if useless else []
        harvest = self._harvest(view)
        if harvest is not None:
            decisions.append(harvest)
        decisions += self._admit(view, harvest is not None)
        if decisions:
            return decisions  # `Admitted` or the update brings us back
        return [*self._fill(view), *self._treat_outliers(view, events)]

    # ---- what has happened ----------------------------------------------------------------------------------

    def _see(self, view: LedgerView, events: Sequence[Event]) -> list[int]:
        """Keep the books; returns groups that teach nothing."""
        returned: list[int] = []
        admitted: list[int] = []
        updated = False
        if self._resumed is not None:
            self._resume(view)
        for event in events:
            match event:
                case Leapt() | Progress():
                    pass
                case Scored():
                    self._scored(view, event.id)
                case Finished() | Stopped() | Observed():
                    if event.id in view.waiting:
                        returned.append(event.id)
                    elif self.config.off_policy_strategy == "drop":
                        self._stale |= view.state(event.id) == State.DISCARDED  # by the gate, as too old
                    if not isinstance(event, Observed):
                        self._touched.add(event.worker)
                case Admitted():
                    admitted += range(event.first, event.first + event.count)
                case Updated():
                    updated = True
                case Loaded() | WorkerUp() | WorkerDown():
                    self._asked.pop(event.worker, None)
                    self._stale |= not isinstance(event, Loaded)
        if updated:
            queued = sum(len(queue) for batch in self.batches for queue in batch.queues)
            self._stale |= queued + len(returned) + len(admitted) != len(view.waiting)
            self._touched.update(view.slots)
        if self._stale:
            self._rebuild(view)
        else:
            for request_id in returned:
                if request_id not in self._moves:
                    self._touched.update(self.batch_of[view.group_of(request_id)].put_back(view, request_id))
            if admitted:
                self._take_in(view, dict.fromkeys(view.groups_of(admitted).tolist()))
        return [group for group in self._zero_variance.useless(view, events) if group in self.batch_of]

    def _take_in(self, view: LedgerView, arrived: Iterable[int]) -> None:
        """Put groups into the batches that they were asked for, in order of admission; those known already stay."""
        groups = [group for group in arrived if group not in self.batch_of]
        while groups:
            step, count = self._expected.popleft() if self._expected else (self._next_step - 1, len(groups))
            self._enter(view, step, groups[:count])
            groups = groups[count:]

    def _enter(self, view: LedgerView, step: int, groups: Sequence[int]) -> None:
        batch = self._batch(step)
        batch.groups.update(predict_groups(view, groups, self.lengths))
        self.batch_of.update(dict.fromkeys(groups, batch))
        self._lay_out(view, batch)

    def _batch(self, step: int) -> BandedBatch:
        for batch in self.batches:
            if batch.step == step:
                return batch
        self.batches.append(BandedBatch(step))
        return self.batches[-1]

    def _scored(self, view: LedgerView, request_id: int) -> None:
        if request_id not in view.scored:
            return  # the answer to a response that has been dropped
        self._tail.pop(request_id, None)
        self._moves.pop(request_id, None)
        self._blocked.discard(request_id)
        if self._stale:
            return  # all is counted anew
        group = view.group_of(request_id)
        batch = self.batch_of[group]
        batch.left[batch.band[group]] -= 1
        if group in view.ready_groups:
            batch.ready.add(group)
        self._watch(view, batch, batch.band[group])

    def _rebuild(self, view: LedgerView) -> None:
        """Lay out everything anew: workers have come or gone, or the ledger took tokens or groups away. O(alive)."""
        self._stale = False
        for group in [group for group in self.batch_of if group not in view.alive_groups]:
            self.batch_of.pop(group).remove(group)
        self._moves = {i: w for i, w in self._moves.items() if i not in view.waiting and w in view.slots}
        self._blocked.difference_update(view.scored)
        for batch in self.batches:
            self._lay_out(view, batch)
        self._take_in(view, view.alive_groups)

    def _lay_out(self, view: LedgerView, batch: BandedBatch) -> None:
        line = view.line()
        number = bands.number(self.config.bands, max(1, len(batch.groups)), len(line))
        widths, there = self._widths
        ascending = (
            batch.step + 1
        ) % 2 == 1 and not batch.band  # the next descending step has the same widths
        if ascending or there != line or len(widths) != number:
            slots = min(view.slots.values())
            spread = self.lengths.spread(self.config.samples)
            lengths = batch.lengths(number, spread, view.max_new_tokens)
            widths = bands.widths(lengths, slots, len(line), self.config.token_cost, self.config.tier)
            self._widths = (widths, line)
        batch.lay_out(view, widths)
        self._touched.update(line)
        self._watch_all(view)

    # ---- batches --------------------------------------------------------------------------------------------

    def _replace(self, view: LedgerView, useless: Sequence[int]) -> Iterator[Decision]:
        """Groups that teach nothing go, and others come into the same batch."""
        yield Discard(members_of(view, useless), "zero_variance")
        for group in useless:
            batch = self.batch_of.pop(group)
            batch.remove(group)
            yield self._ask(batch.step, 1)

    def _ask(self, step: int, prompts: int) -> Admit:
        self._expected.append((step, prompts))
        return Admit(prompts, self.config.samples)

    def _harvest(self, view: LedgerView) -> Harvest | None:
        """The due batch, when all of it is ready but what has been deferred."""
        if view.updating or not self.batches or self._blocked or not self.batches[0].complete:
            return None
        batch = self.batches[0]
        if any(step == batch.step for step, _ in self._expected):
            return None
        ids = members_of(view, sorted(batch.ready))
        gate = view.gate(ids)
        if gate.blocked:
            self._blocked = (
                set(gate.blocked) - view.scored
            )  # of a group that is waited for, some may have ended
            batch.deferred -= {view.group_of(i) for i in gate.blocked}
            return None
        mean = float(view.lengths_of(ids).sum()) / len(batch.ready)
        self._group_tokens = mean if self._group_tokens is None else 0.5 * (self._group_tokens + mean)
        for group in batch.ready:
            del self.batch_of[group]
        self.batches.popleft()
        late = {group: length for group, length in batch.groups.items() if group not in batch.ready}
        if late:
            following = self._batch(batch.step + 1)
            following.groups.update(late)
            self.batch_of.update(dict.fromkeys(late, following))
            self._deferred += len(late)
        self._stale |= bool(late or gate.in_the_way)
        self._tail.clear()
        self._judged.clear()
        self._watch_all(view)
        return Harvest(ids)

    def _admit(self, view: LedgerView, harvested: bool) -> Iterator[Admit]:
        """One batch ahead of the one that is due."""
        due = view.version + (view.updating or harvested)
        if self.batches and not self.batches[0].groups and not self._expected:
            yield self._ask(self.batches[0].step, self._size())  # the gate has dropped all of it
        while self._next_step <= due + 1:
            self._next_step += 1
            yield self._ask(self._next_step - 1, self._size())

    def _size(self) -> int:
        wanted = self.config.tokens_per_update
        if wanted is None or self._group_tokens is None:
            return self.config.prompts
        return max(1, round(wanted / self._group_tokens))

    # ---- workers --------------------------------------------------------------------------------------------

    def _startable(self, view: LedgerView) -> list[BandedBatch]:
        """Batches for which the newest weights are new enough."""
        bound = self.config.max_staleness
        return [b for b in self.batches if bound is None or view.version >= b.step - bound]

    def _fill(self, view: LedgerView) -> Iterator[Decision]:
        """Give workers with free slots what they run next: of each batch, their band of it."""
        if not self._touched and not self._moves:
            return
        free = {w: view.slots[w] - view.num_running(w) for w in sorted(self._touched) if w in view.slots}
        self._touched.clear()
        starts: Starts = {}
        for request_id in [i for i in self._moves if i in view.waiting]:
            worker = self._moves.pop(request_id)
            starts.setdefault(worker, []).append(request_id)
            if worker in free:
                free[worker] -= 1
        for batch in self._startable(view):
            batch.fill(view, free, starts)
        behind = [w for w in starts if max(view.loaded[w], self._asked.get(w, -1)) < view.version]
        if behind:
            self._asked.update(dict.fromkeys(behind, view.version))
            yield Publish(behind, self.config.running)
        for worker, ids in starts.items():
            yield Start(ids, worker)

    # ---- outliers -------------------------------------------------------------------------------------------

    def _watch_all(self, view: LedgerView) -> None:
        if self.batches:
            for band in range(len(self.batches[0].left)):
                self._watch(view, self.batches[0], band)

    def _watch(self, view: LedgerView, batch: BandedBatch, band: int) -> None:
        """Note from which lengths on the last of a band are outliers; only in the batch that is due."""
        few = self.config.outlier_share * batch.size[band]
        if self.config.outlier == "none" or batch is not self.batches[0] or band in batch.watched:
            return
        if batch.left[band] > few:
            return
        batch.watched.add(band)
        for group in [g for g, b in batch.band.items() if b == band and g not in batch.ready]:
            usual = self.lengths.quantile(view.prompt(group), self.config.outlier_quantile)
            if usual is not None and usual < inf:
                limit = self.config.outlier_factor * usual
                self._tail.update(dict.fromkeys(set(view.members(group)) - self._judged, limit))

    def _treat_outliers(self, view: LedgerView, events: Sequence[Event]) -> Iterator[Decision]:
        if not self._tail:
            return
        reported = {e.id for e in events if isinstance(e, Leapt)}
        reported.update(i for e in events if isinstance(e, Progress) for i in e.ids.tolist())
        for request_id in sorted(reported & self._tail.keys()):
            if view.state(request_id) != State.RUNNING or view.length(request_id) <= self._tail[request_id]:
                continue
            del self._tail[request_id]
            self._judged.add(request_id)
            target = self._better_place(view, request_id) if self.config.outlier == "migrate" else None
            if target is not None:
                self._moves[request_id] = target
                self._migrated += 1
                yield Stop([request_id], keep=True)
            elif self._may_defer():
                self.batches[0].deferred.add(view.group_of(request_id))

    def _better_place(self, view: LedgerView, request_id: int) -> int | None:
        """The worker with least to do, if it will probably end sooner there, its K/V being computed again."""
        here = view.worker(request_id)
        busy = {worker for batch in self._startable(view) for worker in batch.wanted_by()}
        load = {w: slots if w in busy else view.num_running(w) for w, slots in view.slots.items()}
        target = min(load, key=lambda w: (load[w] / view.slots[w], w))
        if target == here or load[target] >= view.slots[target]:
            return None
        so_far = view.length(request_id)
        prompt = view.prompt(view.group_of(request_id))
        # With this chance it will be as long again. Every request in a step costs as much as a token of prefill.
        left = min(view.max_new_tokens - so_far, so_far * self.lengths.p_long(prompt, so_far, 2 * so_far))
        return target if left * (load[here] - load[target] - 1) > so_far else None

    def _may_defer(self) -> bool:
        """Whether a group may come with the next batch: not where the gate would make that wait for it, or drop it."""
        bound = self.config.max_staleness
        return bound is None or bound > 1 or self.config.off_policy_strategy == "refresh"

    # ---- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "next_step": self._next_step,
            "expected": [list(entry) for entry in self._expected],
            "batches": [[b.step, list(b.groups), sorted(b.deferred)] for b in self.batches],
            "group_tokens": self._group_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next_step, self._group_tokens = state["next_step"], state["group_tokens"]
        self._expected = deque((step, count) for step, count in state["expected"])
        self._resumed = state

    def _resume(self, view: LedgerView) -> None:
        """Put what the ledger has into its batches again."""
        assert self._resumed is not None
        for step, groups, deferred in self._resumed["batches"]:
            self._enter(view, step, [group for group in groups if group in view.alive_groups])
            self.batches[-1].deferred.update(group for group in deferred if group in self.batch_of)
        self._resumed = None

    def metrics(self) -> dict[str, float]:
        figures = {"schedule/migrated": float(self._migrated), "schedule/deferred": float(self._deferred)}
        self._migrated = self._deferred = 0
        return figures
