"""The rollout buffer: the ledger that owns the state of every request.

Numpy columns indexed by a dense, never reused request id hold the only copy that counts; engines hold working copies.
There is one writer of results, `Ledger.apply(events)`; the other methods carry out a schedule's decisions. Indexes
that `apply` maintains keep a schedule's work proportional to its events. No torch, no clock, no I/O.

    PENDING -> RUNNING -> FINISHED -> SCORED -> CONSUMED
               RUNNING -> PARKED (tokens kept) | PENDING (tokens dropped)
               RUNNING -> WAITING (for the environment) -> PENDING | FINISHED
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from stretto.columns import Columns, Tokens
from stretto.records import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    Loaded,
    Observed,
    Progress,
    Prompt,
    Purpose,
    Request,
    Rollout,
    SamplingParams,
    Scored,
    State,
    Stopped,
    UpdateBatch,
    Updated,
    WorkerDown,
    WorkerUp,
)
from stretto.sampling import request_key
from stretto.view import LedgerView

ENDED = (State.CONSUMED, State.DISCARDED)


class Ledger:
    """Every request's state, tokens and times, and the indexes over them.

    `first_id` is the id of row 0: ids go on counting after a resume, rows of ended requests do not come back.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        seed: int = 0,
        purpose: Purpose = Purpose.TRAIN,
        multi_turn: bool = False,
        max_model_len: int = 1 << 31,
        refresh: float = 1.0,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.purpose = purpose
        self.multi_turn = multi_turn
        self.max_model_len, self.refresh = max_model_len, refresh
        self.now = now
        self.first_id = 0
        self.columns = Columns()
        self.tokens: dict[int, Tokens] = {}  # of requests that have any and have not been logged
        self.prompts: dict[int, Prompt] = {}  # group -> prompt
        self.members: dict[int, range] = {}  # group -> its request ids; contiguous by construction
        self.unscored: dict[int, int] = {}  # group -> members without a reward yet
        self.waiting: OrderedDict[int, None] = OrderedDict()  # PENDING and PARKED, oldest first
        self.running: dict[int, dict[int, None]] = {}  # worker -> its requests
        self.scored: OrderedDict[int, None] = OrderedDict()  # SCORED, in order of scoring
        self.ready_groups: OrderedDict[int, None] = OrderedDict()  # groups whose members are all SCORED
        self.slots: dict[int, int] = {}  # worker -> slots, of the workers that are up
        self.loaded: dict[int, int] = {}  # worker -> version of its weights
        self.version = 0  # optimiser steps made
        self.updating = False  # between Harvest and Updated
        self.next_group = 0
        self.generated_tokens = 0  # ever, whatever became of them
        self.alive = 0  # admitted, neither CONSUMED nor DISCARDED
        names = ("stale_events", "discarded_tokens", "reward_errors", "reward_timeouts")
        self.counters = dict.fromkeys(names, 0)
        self._to_log: dict[int, Rollout | None] = {}  # scored since the last `take_finished`
        self.view = LedgerView(self)

    # ---- results ------------------------------------------------------------------------------------

    def apply(self, events: Iterable[Event]) -> list[Rollout]:
        """Enter results; returns the responses that ended a turn and now need the task's answer.

        Events of an old attempt are dropped and counted in `counters["stale_events"]`.
        """
        ended: list[Rollout] = []
        for event in events:
            match event:
                case Progress():
                    self._progress(event)
                case Finished():
                    if self._current(event.id, event.attempt):
                        ended.append(self._finished(event))
                case Scored():
                    self._scored(event)
                case Stopped():
                    if self._current(event.id, event.attempt):
                        self._release(event.id)
                case Observed():
                    ended += self._observed(event)
                case Updated():
                    self.version, self.updating = event.version, False
                case Loaded():
                    self.loaded[event.worker] = event.version
                case WorkerUp():
                    self.slots[event.worker] = event.slots
                    self.loaded[event.worker] = event.version
                    self.running.setdefault(event.worker, {})
                case WorkerDown():
                    self._worker_down(event.worker)
        return ended

    def _current(self, request_id: int, attempt: int) -> bool:
        row = request_id - self.first_id
        if (
            0 <= row < self.columns.size
            and self.columns.state[row] == State.RUNNING
            and self.columns.attempt[row] == attempt
        ):
            return True
        self.counters["stale_events"] += 1
        return False

    def _progress(self, event: Progress) -> None:
        c = self.columns
        rows = event.ids - self.first_id
        known = (c.state[rows] == State.RUNNING) & (c.attempt[rows] == event.attempts)
        if not known.all():
            self.counters["stale_events"] += int((~known).sum())
        rows, counts = rows[known], event.counts[known]
        self.generated_tokens += int(counts.sum())
        c.length[rows] += counts
        if event.drafted is not None and event.accepted is not None:
            c.drafted[rows] += event.drafted[known]
            c.accepted[rows] += event.accepted[known]
        c.first_version[rows] = np.where(c.first_version[rows] < 0, event.version, c.first_version[rows])
        if event.token_ids is None or event.logprobs is None or event.raw_logprobs is None:
            return
        ids, logprobs = event.token_ids.tolist(), event.logprobs.tolist()
        raw = event.raw_logprobs.tolist()
        ends = np.cumsum(event.counts)
        columns = zip(event.ids.tolist(), (ends - event.counts).tolist(), ends.tolist(), known, strict=True)
        for request_id, start, stop, keep in columns:
            if keep:
                part = slice(start, stop)
                self._tokens(request_id).extend(ids[part], logprobs[part], raw[part], event.version)

    def _tokens(self, request_id: int) -> Tokens:
        tokens = self.tokens.get(request_id)
        if tokens is None:
            tokens = self.tokens[request_id] = Tokens()
        return tokens

    def _finished(self, event: Finished) -> Rollout:
        row = event.id - self.first_id
        c = self.columns
        del self.running[int(c.worker[row])][event.id]
        turn_ended = self.multi_turn and event.reason == FinishReason.STOP
        c.state[row] = State.WAITING if turn_ended else State.FINISHED
        c.finish_reason[row] = event.reason
        c.finished_at[row] = self.now()
        return self.rollout(event.id)

    def _observed(self, event: Observed) -> list[Rollout]:
        row = event.id - self.first_id
        if self.columns.state[row] != State.WAITING:
            self.counters["stale_events"] += 1
            return []
        prompt = self.prompts[int(self.columns.group[row])]
        limit = min(self.sampling.max_new_tokens, self.max_model_len - len(prompt.token_ids))
        space = limit - int(self.columns.length[row])
        if not event.done and len(event.token_ids) < space:
            self._tokens(event.id).observe(event.token_ids.tolist())
            self.columns.length[row] += len(event.token_ids)
            self.columns.turn_start[row] = self.columns.length[row]
            self.columns.turn[row] += 1
            self.columns.finish_reason[row] = FinishReason.NONE
            self._wait(event.id, State.PENDING)
            return []
        if not event.done:  # the environment's answer leaves no room for another turn
            self.columns.finish_reason[row] = FinishReason.LENGTH
        self.columns.state[row] = State.FINISHED
        return [self.rollout(event.id)]

    def _scored(self, event: Scored) -> None:
        row = event.id - self.first_id
        c = self.columns
        if c.state[row] != State.FINISHED:
            self.counters["stale_events"] += 1
            return
        c.state[row] = State.SCORED
        c.reward[row] = event.reward
        c.reward_status[row] = event.status
        c.reward_parts[row] = event.parts
        self.counters["reward_errors"] += event.status in ("error", "invalid")
        self.counters["reward_timeouts"] += event.status == "timeout"
        self.scored[event.id] = None
        self._to_log[event.id] = None
        group = int(c.group[row])
        self.unscored[group] -= 1
        if self.unscored[group] == 0:
            self.ready_groups[group] = None

    def _release(self, request_id: int) -> None:
        """A running request has left its worker: PARKED with its tokens, or PENDING without them."""
        row = request_id - self.first_id
        c = self.columns
        self.running[int(c.worker[row])].pop(request_id)
        if c.keep[row]:
            self._wait(request_id, State.PARKED if c.length[row] else State.PENDING)
            return
        self.counters["discarded_tokens"] += int(c.length[row])
        self.tokens.pop(request_id, None)
        c.length[row] = c.turn_start[row] = c.turn[row] = 0
        c.first_version[row] = -1
        self._wait(request_id, State.PENDING)

    def _wait(self, request_id: int, state: State) -> None:
        row = request_id - self.first_id
        self.columns.state[row] = state
        self.columns.worker[row] = -1
        self.waiting[request_id] = None

    def _worker_down(self, worker: int) -> None:
        for request_id in list(self.running.get(worker, ())):
            self._release(request_id)
        for table in (self.running, self.slots, self.loaded):
            table.pop(worker, None)

    # ---- decisions ------------------------------------------------------------------------------------

    def admit(self, prompts: Sequence[tuple[Prompt, int]], samples_each: int) -> Admitted:
        """Enter `samples_each` PENDING requests for every (prompt, visit), group after group."""
        first = self.first_id + self.columns.size
        for prompt, visit in prompts:
            group, self.next_group = self.next_group, self.next_group + 1
            what = (self.seed, self.purpose, prompt.uid, prompt.occurrence)
            keys = [request_key(*what, i, visit, refresh=self.refresh) for i in range(samples_each)]
            start = self.first_id + self.columns.admit(group, visit, self.version, keys)
            self.prompts[group] = prompt
            self.members[group] = range(start, start + samples_each)
            self.unscored[group] = samples_each
            self.waiting.update(dict.fromkeys(self.members[group]))
        count = samples_each * len(prompts)
        self.alive += count
        return Admitted(first, count)

    def start(self, ids: Sequence[int], worker: int) -> list[Request]:
        """Hand waiting requests to a worker under a new attempt. Raises ValueError if one is not waiting."""
        now = self.now()
        requests = []
        c = self.columns
        for request_id in ids:
            row = request_id - self.first_id
            if request_id not in self.waiting:
                state = State(c.state[row]).name
                raise ValueError(f"request {request_id} is {state}, not waiting: it cannot start")
            del self.waiting[request_id]
            self.running[worker][request_id] = None
            c.state[row] = State.RUNNING
            c.worker[row] = worker
            c.attempt[row] += 1
            c.keep[row] = True
            if np.isnan(c.started_at[row]):
                c.started_at[row] = now
            prompt = self.prompts[int(c.group[row])]
            requests.append(c.request(row, request_id, prompt, self.tokens.get(request_id), self.sampling))
        return requests

    def stop(self, ids: Sequence[int], keep: bool) -> dict[int, tuple[list[int], list[int]]]:
        """Mark running requests to be let go; returns worker -> (ids, attempts), without what is not running."""
        by_worker: dict[int, tuple[list[int], list[int]]] = {}
        for request_id in ids:
            row = request_id - self.first_id
            if self.columns.state[row] == State.RUNNING:
                self.columns.keep[row] = keep
                held = by_worker.setdefault(int(self.columns.worker[row]), ([], []))
                held[0].append(request_id)
                held[1].append(int(self.columns.attempt[row]))
        return by_worker

    def harvest(self, ids: Sequence[int]) -> UpdateBatch:
        """Consume scored requests: the next update batch, in canonical order (admission, sample index).

        Raises ValueError if one is not SCORED, or if a group is not taken whole: a group-relative advantage
        needs all its siblings.
        """
        chosen = sorted(ids)
        groups = dict.fromkeys(int(self.columns.group[i - self.first_id]) for i in chosen)
        incomplete = [group for group in groups if group not in self.ready_groups]
        if incomplete or len(set(chosen)) != sum(len(self.members[group]) for group in groups):
            raise ValueError(
                f"an update batch takes whole scored groups; incomplete: {incomplete or list(groups)}"
            )
        rollouts = []
        for request_id in chosen:
            self.columns.state[request_id - self.first_id] = State.CONSUMED
            del self.scored[request_id]
            rollouts.append(self.rollout(request_id))
            if request_id in self._to_log:
                self._to_log[request_id] = rollouts[-1]
            else:
                self._forget(request_id)
        for group in groups:
            del self.ready_groups[group], self.unscored[group]
        self.alive -= len(chosen)
        self.updating = True
        return UpdateBatch(self.version, rollouts)

    # ---- reading and keeping --------------------------------------------------------------------------

    def rollout(self, request_id: int) -> Rollout:
        """The response of a request as it stands now."""
        row = request_id - self.first_id
        prompt = self.prompts[int(self.columns.group[row])]
        return self.columns.rollout(row, request_id, prompt, self.tokens.get(request_id, Tokens()))

    def take_finished(self) -> list[Rollout]:
        """The responses scored since the last call, as they stand, by id; the consumed ones are then forgotten."""
        finished = []
        for request_id, rollout in sorted(self._to_log.items()):
            finished.append(rollout or self.rollout(request_id))
            if rollout is not None:
                self._forget(request_id)
        self._to_log.clear()
        return finished

    def _forget(self, request_id: int) -> None:
        self.tokens.pop(request_id, None)
        group = int(self.columns.group[request_id - self.first_id])
        members = self.members.get(group)
        if members and all(self.columns.state[i - self.first_id] in ENDED for i in members):
            del self.members[group], self.prompts[group]

    def in_flight(self) -> list[Rollout]:
        """Every request that has not ended, in order of its id."""
        live = ~np.isin(self.columns.state[: self.columns.size], ENDED)
        return [self.rollout(int(row) + self.first_id) for row in np.flatnonzero(live)]

    def state_dict(self) -> dict[str, Any]:
        """What `in_flight` does not say; plain JSON."""
        return {
            "version": self.version,
            "next_id": self.first_id + self.columns.size,
            "next_group": self.next_group,
            "counters": dict(self.counters),
        }

    def load_state_dict(self, state: dict[str, Any], in_flight: Sequence[Rollout]) -> list[Rollout]:
        """Restore into a fresh ledger; returns the responses that were waiting for the task's answer.

        What was running is PARKED with its tokens: its worker is gone.
        """
        if self.columns.size:
            raise ValueError("a ledger is restored before anything is admitted")
        self.version, self.next_group = state["version"], state["next_group"]
        self.counters.update(state["counters"])
        self.first_id = in_flight[0].request_id if in_flight else state["next_id"]
        self.columns.grow(state["next_id"] - self.first_id)
        self.columns.state[: self.columns.size] = State.DISCARDED
        unanswered: list[Rollout] = []
        for rollout in in_flight:
            self._restore(rollout)
            if rollout.outcome in (State.FINISHED, State.WAITING):
                unanswered.append(rollout)
        return unanswered

    def _restore(self, rollout: Rollout) -> None:
        request_id, group = rollout.request_id, rollout.group_id
        state = rollout.outcome
        if state in (State.RUNNING, State.PARKED, State.PENDING):
            state = State.PARKED if len(rollout.token_ids) else State.PENDING
            self.waiting[request_id] = None
        self.columns.restore(request_id - self.first_id, rollout, state)
        if len(rollout.token_ids):
            self.tokens[request_id] = Tokens.of(rollout)
        self.prompts[group] = rollout.prompt
        start = self.members[group].start if group in self.members else request_id
        self.members[group] = range(start, request_id + 1)
        self.unscored[group] = self.unscored.get(group, 0) + (state != State.SCORED)
        self.ready_groups.pop(group, None)
        if self.unscored[group] == 0:
            self.ready_groups[group] = None
        if state == State.SCORED:
            self.scored[request_id] = None
        self.alive += 1
