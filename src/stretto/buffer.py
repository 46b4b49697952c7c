"""The rollout buffer: the ledger that owns the state of every request.

Numpy columns indexed by a dense, never reused request id hold the only copy that counts; engines hold working copies.
There is one writer of results, `Ledger.apply(events)`; the other methods carry out a schedule's decisions. Indexes
that `apply` maintains keep a schedule's work proportional to its events. No torch, no clock, no I/O.

    PENDING -> RUNNING -> FINISHED -> SCORED -> CONSUMED
               RUNNING -> PARKED (tokens kept)
               RUNNING -> WAITING (for the environment) -> PENDING | FINISHED
    any of them but the last -> PENDING (refreshed: its tokens dropped, to come back as its draft) | DISCARDED
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from stretto.columns import NO_IDS, STATES, StepTokens, unknown_ids
from stretto.gate import Gate
from stretto.records import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    Leapt,
    Loaded,
    Observed,
    Progress,
    Prompt,
    Purpose,
    Request,
    Reuse,
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
from stretto.requests import (
    CONSUMED,
    FINISHED,
    PENDING,
    RUNNING,
    SCORED,
    WAITING,
    counted,
)
from stretto.sampling import request_keys
from stretto.staleness import BoundedRequests, Strategy, Unit
from stretto.view import LedgerView


class Ledger(BoundedRequests):
    """Every request's state, tokens and times, and the indexes over them.

    An update takes whole groups or, with `unit = "response"`, any scored responses. With `max_staleness` no update
    consumes a response whose oldest token is more versions behind: what would get there is dealt with by the gate
    (`stretto.gate`; `batch` is its B) at each final harvest, as `strategy` says: "refresh", "drop", or "wait", by which
    the update waits for it (and what waiting does not help is refreshed). A request is refreshed `refresh_budget` times
    at most before it has ended; then the update waits for it too.
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
        reuse: Callable[[Rollout], Reuse | None] | None = None,
        unit: Unit = "group",
        max_staleness: int | None = None,
        strategy: Strategy = "refresh",
        batch: int = 1,
        refresh_budget: int = 2,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(unit, max_staleness, strategy, batch, refresh_budget, now)
        self.sampling = sampling
        self.seed = seed
        self.purpose = purpose
        self.multi_turn = multi_turn
        self.max_model_len, self.refresh, self.reuse = max_model_len, refresh, reuse
        self.view = LedgerView(self)
        self._enter: dict[type, Callable[[Any], Sequence[int] | None]] = {
            Progress: self._progress,
            Leapt: self._leapt,
            Finished: self._finished,
            Scored: self._scored,
            Stopped: self._stopped,
            Observed: self._observed,
            Updated: self._updated,
            Loaded: self._loaded,
            WorkerUp: self._worker_up,
            WorkerDown: self._worker_down,
        }

    # ---- results ------------------------------------------------------------------------------------

    def apply(self, events: Iterable[Event]) -> list[Rollout]:
        """Enter results; returns the responses that ended a turn and now need the task's answer.

        Events of an old attempt are dropped and counted in `counters["stale_events"]`.
        """
        ended: list[int] = []
        handlers = self._enter
        for event in events:
            enter = handlers.get(type(event))
            if enter is not None and (new := enter(event)):
                ended += new
        if not ended:
            return []
        state, first = self.cells.state, self.first_id
        # What ended may have been scored or given up by a later event.
        ended = [i for i in ended if state[i - first] in (FINISHED, WAITING)]
        if not ended:
            return []
        rollouts = self.rollouts(ended)
        for rollout in rollouts:
            if rollout.outcome is State.FINISHED:
                self._records[rollout.request_id] = rollout
        return rollouts

    def _updated(self, event: Updated) -> None:
        self.version, self.updating = event.version, False
        self._refresh_overdue()

    def _loaded(self, event: Loaded) -> None:
        self.loaded[event.worker] = event.version

    def _worker_up(self, event: WorkerUp) -> None:
        self.slot_seconds()  # of those until now
        self.slots[event.worker] = event.slots
        self.loaded[event.worker] = event.version
        self.places[event.worker] = event.worker if event.place is None else event.place
        self.running.setdefault(event.worker, {})

    def _worker_down(self, event: WorkerDown) -> None:
        self.slot_seconds()  # of those until now
        for request_id in list(self.running.get(event.worker, ()))[::-1]:
            self._release(request_id)
        for table in (self.running, self.slots, self.loaded, self.places):
            table.pop(event.worker, None)

    def _stopped(self, event: Stopped) -> None:
        if self._row_at(event.id, RUNNING, event.attempt) >= 0:
            self._release(event.id)

    def _row_at(self, request_id: int, state: int, attempt: int) -> int:
        """The row of a request that is in this state, in this attempt; -1: an event about it is old, and counted."""
        row = request_id - self.first_id
        if 0 <= row < self.columns.size:
            cells = self.cells
            if cells.state[row] == state and cells.attempt[row] == attempt:
                return row
        self.counters["stale_events"] += 1
        return -1

    def _progress(self, event: Progress) -> None:
        c = self.columns
        rows = event.ids - self.first_id
        known = (c.state[rows] == RUNNING) & (c.attempt[rows] == event.attempts)
        chosen: Any = slice(None)
        if not known.all():
            self.counters["stale_events"] += int((~known).sum())
            chosen = known
        rows, counts = rows[chosen], event.counts[chosen]
        self.generated_tokens += int(counts.sum())
        c.length[rows] += counts
        if event.drafted is not None and event.accepted is not None:
            c.drafted[rows] += event.drafted[chosen]
            c.accepted[rows] += event.accepted[chosen]
            c.decode_steps[rows] += 1
        before = c.first_version[rows]
        older = (before < 0) | (before > event.version)
        if older.any():
            c.first_version[rows[older]] = event.version
        if event.token_ids is None or event.logprobs is None or event.raw_logprobs is None:
            return
        step = StepTokens(event.token_ids, event.logprobs, event.raw_logprobs, event.version, event.top)
        start, ends = 0, np.cumsum(event.counts).tolist()
        for request_id, stop, keep in zip(event.ids.tolist(), ends, known.tolist(), strict=True):
            if keep:
                self._tokens(request_id).extend(step, start, stop)
            start = stop

    def _leapt(self, event: Leapt) -> None:
        row = self._row_at(event.id, RUNNING, event.attempt)
        if row >= 0:
            cells, count, version = self.cells, event.count, event.version
            self.generated_tokens += count
            cells.length[row] += count
            if not 0 <= cells.first_version[row] <= version:
                cells.first_version[row] = version

    def _finished(self, event: Finished) -> Sequence[int]:
        request_id, cells = event.id, self.cells
        row = self._row_at(request_id, RUNNING, event.attempt)
        if row < 0:
            return ()
        if self.max_staleness is not None:
            lost = cells.refreshing[row]
            if not lost and 0 <= cells.first_version[row] < self.version - self.max_staleness:
                self._let_go([row])  # its worker had weights that are too old by now
                lost = True
            if lost:
                if cells.state[row] == RUNNING:
                    self._release(request_id)
                return ()
        del self.running[cells.worker[row]][request_id]
        turn_ended = self.multi_turn and event.reason == FinishReason.STOP
        cells.state[row] = WAITING if turn_ended else FINISHED
        self.columns.finish_reason[row] = event.reason
        cells.finished_at[row] = self.now()
        return (request_id,)

    def _observed(self, event: Observed) -> Sequence[int]:
        row = self._row_at(event.id, WAITING, event.attempt)
        if row < 0:
            return ()
        prompt = self.groups.prompts[int(self.columns.group[row])]
        limit = min(self.sampling.max_new_tokens, self.max_model_len - len(prompt.token_ids))
        space = limit - int(self.columns.length[row])
        if not event.done and len(event.token_ids) < space:
            self._tokens(event.id).observe(event.token_ids.tolist())
            self.columns.length[row] += len(event.token_ids)
            self.columns.turn_start[row] = self.columns.length[row]
            self.columns.turn[row] += 1
            self.columns.finish_reason[row] = FinishReason.NONE
            self._wait(event.id, PENDING)
            return ()
        if not event.done:  # the environment's answer leaves no room for another turn
            self.columns.finish_reason[row] = FinishReason.LENGTH
        self.columns.state[row] = FINISHED
        return (event.id,)

    def _scored(self, event: Scored) -> None:
        request_id, cells = event.id, self.cells
        row = self._row_at(request_id, FINISHED, event.attempt)
        if row < 0:
            return
        cells.state[row] = SCORED
        cells.reward[row] = event.reward
        if event.parts:
            self.columns.reward_parts[row] = event.parts
        record = self._records.get(request_id)
        if record is not None:
            record.outcome = State.SCORED
            record.reward, record.reward_status, record.reward_parts = event.reward, event.status, event.parts
        if event.status != "ok":
            self.columns.reward_status[row] = event.status
            self.counters["reward_timeouts" if event.status == "timeout" else "reward_errors"] += 1
        self.scored[request_id] = None
        self._to_log[request_id] = None
        self.groups.scored(cells.group[row])

    # ---- decisions ------------------------------------------------------------------------------------

    def admit(self, prompts: Sequence[tuple[Prompt, int]], samples_each: int) -> Admitted:
        """Enter `samples_each` PENDING requests for every (prompt, visit), group after group."""
        keys: list[int] = []
        for prompt, visit in prompts:
            what = (self.seed, self.purpose, prompt.uid, prompt.occurrence)
            keys += request_keys(*what, samples_each, visit, self.refresh)
        visits = [visit for _, visit in prompts]
        row = self.columns.admit(self.next_group, visits, samples_each, self.version, keys)
        first = end = self.first_id + row
        for prompt, _ in prompts:
            begin, end = end, end + samples_each
            self.groups.add(self.next_group, prompt, range(begin, end))
            self.next_group += 1
        self.waiting.update(dict.fromkeys(range(first, end)))
        self.alive += len(keys)
        return Admitted(first, len(keys))

    def start(self, ids: Sequence[int], worker: int, max_new: int | None = None) -> list[Request]:
        """Hand waiting requests to a worker under a new attempt, for at most `max_new` tokens.

        Raises ValueError if one is not waiting.
        """
        now = self.now()
        requests = []
        cells, first, running = self.cells, self.first_id, self.running[worker]
        waiting, drafts, prompts = self.waiting, self.drafts, self.groups.prompts
        for request_id in ids:
            row = request_id - first
            if request_id not in waiting:
                state = STATES[cells.state[row]].name
                raise ValueError(f"request {request_id} is {state}, not waiting: it cannot start")
            del waiting[request_id]
            running[request_id] = None
            cells.state[row] = RUNNING
            cells.worker[row] = worker
            cells.attempt[row] = attempt = cells.attempt[row] + 1
            cells.keep[row] = True
            if attempt == 1:  # never before
                cells.started_at[row] = now
            group, length, token_ids, draft = cells.group[row], cells.length[row], NO_IDS, NO_IDS
            if length:
                # A simulated engine leaves tokens out; that there are so many is what it needs to go on.
                tokens = self.tokens.get(request_id)
                token_ids = tokens.token_ids() if tokens is not None else unknown_ids(length)
            if drafts and request_id in drafts:
                draft = drafts[request_id]
                if request_id not in self.drafted:
                    self.drafted.add(request_id)
                    self.counters["reverified_tokens"] += draft.size
            request = Request(  # by position, which takes a fifth of the time that names take
                request_id, attempt, group, prompts[group].token_ids, token_ids, cells.turn_start[row],
                cells.key[row], self.sampling, draft, None, max_new,
            )  # fmt: skip
            if self.reuse is not None:
                request.reuse = self.reuse(self.rollout(request_id))
            requests.append(request)
        return requests

    def stop(self, ids: Sequence[int], keep: bool) -> None:
        """Mark running requests to be let go; what is not running, or has to go already, stays as it is.

        Without `keep` they are refreshed, unless they have ended before their worker hears of it.
        """
        for request_id in ids:
            row, cells = request_id - self.first_id, self.cells
            if cells.state[row] == RUNNING and not cells.refreshing[row]:
                cells.keep[row] = keep
                self._tell_to_stop(row)

    def harvest(self, ids: Sequence[int], final: bool = True) -> UpdateBatch:
        """Consume scored requests, in canonical order (admission, sample index): the next update batch, or a part of it
        that others follow. The `final` one applies the gate to what is left behind.

        Raises ValueError during an update, if one is not SCORED, if a group is not taken whole where it must be (a
        group-relative advantage needs all its siblings), or if the gate makes the update wait.
        """
        if self.updating:
            raise ValueError("the learner is at an update: nothing can be harvested before it has ended")
        chosen = sorted(ids)
        self._check_harvest(chosen)
        gate = self.gate(chosen) if final else Gate()
        if gate.blocked:
            raise ValueError(
                f"the gate makes the update wait for {len(gate.blocked)} requests, first {gate.blocked[0]}: "
                "ask `gate` before"
            )
        batch = self._batch(chosen, final)
        rows = np.asarray(chosen, np.int64) - self.first_id
        self.columns.state[rows] = CONSUMED
        for request_id in chosen:
            del self.scored[request_id]
        for group, count in counted(self.columns.group[rows]):
            self.groups.consumed(group, count)
        self._forget([request_id for request_id in chosen if request_id not in self._to_log])
        self.alive -= len(chosen)
        self.updating = final
        if final:
            self._apply_gate(gate)
        return batch

    def _batch(self, ids: Sequence[int], final: bool) -> UpdateBatch:
        """Of scored requests that are about to be consumed; only those that were scored before a resume have no record
        yet.
        """
        records = self._records
        missing = [request_id for request_id in ids if request_id not in records]
        records.update(zip(missing, self.rollouts(missing), strict=True))
        rollouts, consumed = [records[request_id] for request_id in ids], STATES[CONSUMED]
        for rollout in rollouts:
            rollout.outcome = consumed
        return UpdateBatch(self.version, rollouts, final)

    def _check_harvest(self, chosen: Sequence[int]) -> None:
        wrong = [i for i in chosen if i not in self.scored]
        if wrong or len(set(chosen)) != len(chosen):
            raise ValueError(f"an update batch takes scored responses, each once; not so: {wrong or 'twice'}")
        if self.unit == "response":
            return
        groups = dict.fromkeys(self.columns.group[np.asarray(chosen, np.int64) - self.first_id].tolist())
        incomplete = [group for group in groups if group not in self.groups.ready]
        if incomplete or len(chosen) != sum(len(self.groups.members[group]) for group in groups):
            raise ValueError(
                f"an update batch takes whole scored groups; incomplete: {incomplete or list(groups)}"
            )
