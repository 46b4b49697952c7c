"""The real controller, ledger and schedule, with everything around them simulated: engines, rewards, learner, data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, nan

import numpy as np

from stretto.buffer import Ledger
from stretto.columns import NO_IDS, NOT_ENDED, STATES, unknown_arrays
from stretto.config import ScheduleConfig
from stretto.controller import Controller
from stretto.engine.responses import Span, mixed, uniform
from stretto.engine.simulated import SimulatedEngine
from stretto.fleet.simulated import SimulatedFleet
from stretto.history.lengths import Ended, LengthHistory
from stretto.records import Event, IntArray, Request, Rollout, SamplingParams, Scored, UpdateBatch, Updated
from stretto.runtime import SimulatedRuntime
from stretto.schedule import ledger_options, make_schedule
from stretto.simulate.cost import Costs
from stretto.simulate.workload import NORMAL, Workload
from stretto.weights import WeightsRef

PREDICTING = ("histopipe", "stream")
"""Kinds that ask how long responses will be."""
UNKNOWN = unknown_arrays(0, -1)
REDRAWN = 1 << 32  # salts from here on make the keys of responses that are drawn anew


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers of `slots` responses each, of which the first `shared` are on the trainer's devices.

    `report_seconds`: see `SimulatedFleet`. Reward latency is lognormal with this mean and sigma.
    """

    workers: int
    slots: int
    shared: int = 0
    reward_seconds: float = 0.0
    reward_sigma: float = 0.0
    report_seconds: float | None = None
    arrivals: Sequence[tuple[float, int]] = ()
    failures: Sequence[tuple[float, int]] = ()


@dataclass(frozen=True, slots=True)
class Drafting:
    """Speculative decoding as its effect: tokens per step by visit of the prompt (the last goes on), nodes verified."""

    tokens_per_step: Sequence[float] = (1.0,)
    nodes: float = 0.0


@dataclass(slots=True)
class Update:
    """One update as it was, in seconds of the simulated clock; counters since the harvest before."""

    harvested: float = 0.0
    trained: float = 0.0  # seconds that the trainer worked on it
    responses: int = 0
    tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Batch(UpdateBatch):
    """Without records: a simulation asks the ledger's columns."""

    rows: IntArray = field(default_factory=lambda: NO_IDS)


class _Ledger(Ledger):
    """Its records say of a response what a simulation looks at; nobody knows its tokens."""

    def _batch(self, ids: Sequence[int], final: bool) -> _Batch:
        return _Batch(self.version, [], final, np.asarray(ids, np.int64) - self.first_id)

    def rollouts(self, ids: Sequence[int]) -> list[Rollout]:
        if not ids:
            return []
        c, prompts = self.columns, self.groups.prompts
        rows = np.asarray(ids, np.int64) - self.first_id
        none, zeros, _, _, mask = UNKNOWN
        kept = (c.group, c.sample_index, c.visit, c.key, c.finish_reason, c.state, c.attempt)
        # fmt: off
        return [
            Rollout(  # by position, which takes a fifth of the time that names take
                request_id, group, prompts[group], sample, visit, key, none, zeros, zeros, none, mask, 0, 0,
                nan, {}, "ok", reason or NOT_ENDED, STATES[state], -1, attempt, 0, nan, nan, 0, 0, 0,
                None, "", 0, none,
            )
            for request_id, group, sample, visit, key, reason, state, attempt in zip(
                ids, *(column[rows].tolist() for column in kept), strict=True
            )
        ]
        # fmt: on


class SimulatedWorld:
    """One run: `run(steps)` makes it, `updates` tells how it went.

    `drafting` and `agreement` (see `SimulatedEngine`) say what drafts do; `spans` gathers who was in which slot. With
    `redraw` a dropped response is not refreshed but drawn anew: with another length, and without a draft.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        workload: Workload,
        cluster: Cluster,
        costs: Costs,
        *,
        max_new_tokens: int,
        seed: int = 0,
        drafting: Drafting | None = None,
        agreement: float = 0.0,
        redraw: bool = False,
        spans: list[Span] | None = None,
    ) -> None:
        self.runtime = SimulatedRuntime()
        self.config, self.workload, self.cluster, self.costs = config, workload, cluster, costs
        self.drafting, self.redraw = drafting, redraw
        self.ledger = _Ledger(
            SamplingParams(max_new_tokens=max_new_tokens),
            seed=seed,
            now=self.runtime.now,
            **ledger_options(config),
        )
        self.lengths = LengthHistory()
        self._lengths: list[int] = []  # of what was admitted, by request
        self._rewards: list[float] = []
        self.engines = [self._engine(worker, agreement, spans) for worker in range(cluster.workers)]
        self.fleet = SimulatedFleet(
            self.runtime,
            self.engines,
            arrivals=cluster.arrivals,
            failures=cluster.failures,
            report_seconds=cluster.report_seconds,
        )
        self.schedule = make_schedule(config, self.lengths)
        self.controller = Controller(
            self.runtime,
            self.ledger,
            self.schedule,
            self.fleet,
            rewards=self,
            prompts=workload,
            learner=self,
            observer=self,
        )
        self._predicts = config.longest_first or config.kind in PREDICTING
        self.version = 0
        self.ended = 0  # responses that were generated to their end
        self.updates: list[Update] = []
        self.trainings: list[tuple[float, float]] = []  # from, until
        self._trained_until = 0.0
        self._update = Update()
        self._counted: dict[str, float] = {}

    def _engine(self, worker: int, agreement: float, spans: list[Span] | None) -> SimulatedEngine:
        drafting = self.drafting
        return SimulatedEngine(
            self.runtime,
            self._redrawn_length if self.redraw else self._length,
            worker=worker,
            slots=self.cluster.slots,
            cost=self.costs.step,
            load_seconds=self.costs.sync,
            kv_tokens=self.costs.kv_tokens,
            speed=self._speed if drafting is not None else None,
            nodes=self._nodes if drafting is not None else None,
            agreement=0.0 if self.redraw else agreement,
            score=self._score if self.cluster.reward_seconds == 0.0 else None,
            spans=spans,
        )

    def _redrawn_length(self, request: Request) -> int:
        """As often as it was dropped, so often has it another key."""
        drops = self.ledger.view.refreshes(request.id)
        if not drops:
            return self._length(request)
        return self.workload.length(request.group, mixed(request.key, REDRAWN + drops))

    def _length(self, request: Request) -> int:
        if request.id >= len(self._lengths):
            self._foresee()
        return self._lengths[request.id]

    def _foresee(self) -> None:
        """What will come of everything that was admitted since the last call; row i is request i."""
        columns, rows = self.ledger.columns, slice(len(self._rewards), self.ledger.columns.size)
        lengths, rewards = self.workload.foresee(columns.group[rows].tolist(), columns.key[rows])
        self._lengths += lengths
        self._rewards += rewards

    def _speed(self, request: Request) -> float:
        assert self.drafting is not None
        recorded = self.workload.drafts(request.key)
        if recorded is not None:
            return recorded[0]
        speeds = self.drafting.tokens_per_step
        return speeds[min(self.workload.visit(request.group), len(speeds) - 1)]

    def _nodes(self, request: Request) -> float:
        assert self.drafting is not None
        recorded = self.workload.drafts(request.key)
        return self.drafting.nodes if recorded is None else recorded[1]

    def run(self, steps: int) -> SimulatedWorld:
        """Until so many updates have been made."""
        self.controller.run(lambda: self.ledger.version >= steps)
        return self

    # ---- rewards --------------------------------------------------------------------------------------

    def _score(self, request: Request) -> float:
        """Of a response that has just ended: what takes no time comes in the same turn of the controller's loop."""
        self.ended += 1
        return self._rewards[request.id]  # foreseen with its length

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Rewards that take their time."""
        if not rollouts:
            return
        mean, sigma = self.cluster.reward_seconds, self.cluster.reward_sigma
        scored: list[Event] = []
        self.ended += len(rollouts)
        for rollout in rollouts:
            event = Scored(rollout.request_id, rollout.attempt, self._rewards[rollout.request_id])
            if sigma:
                z = NORMAL.inv_cdf(uniform(rollout.key, 4))
                self.runtime.post(event, mean * exp(sigma * z - 0.5 * sigma * sigma))
            else:
                scored.append(event)
        if scored:
            self.runtime.deliver(self.runtime.time + mean, scored)

    # ---- learner --------------------------------------------------------------------------------------

    def accumulate(self, batch: UpdateBatch) -> None:
        """A part of an update: its gradients, without a step."""
        self._train(self.costs.train_per_token * self._tokens(batch))

    def begin(self, batch: UpdateBatch) -> None:
        """The rest of an update, and the step."""
        self._train(self.costs.train_per_token * self._tokens(batch) + self.costs.train_base)
        self.version += 1
        self.runtime.deliver(self._trained_until, [Updated(self.version)])

    def _train(self, seconds: float) -> None:
        """The trainer takes one thing after another."""
        began = max(self.runtime.time, self._trained_until)
        self.fleet.pause(seconds, range(self.cluster.shared))
        self._trained_until = began + seconds
        self._update.trained += seconds
        self.trainings.append((began, self._trained_until))

    def publish(self) -> WeightsRef:
        return WeightsRef(self.version, "copy", {})

    # ---- observer -------------------------------------------------------------------------------------

    def _tokens(self, batch: UpdateBatch) -> int:
        assert isinstance(batch, _Batch)
        return int(self.ledger.columns.length[batch.rows].sum())

    def harvested(self, batch: UpdateBatch) -> None:
        """Enter a batch, or a part of one, into the figures of its update."""
        assert isinstance(batch, _Batch)
        columns, update, rows = self.ledger.columns, self._update, batch.rows
        staleness = batch.version - columns.first_version[rows]
        update.responses += len(rows)
        update.tokens += int(columns.length[rows].sum())
        update.staleness_sum += int(staleness.sum())
        update.staleness_max = max(update.staleness_max, int(staleness.max(initial=0)))
        if batch.final:
            update.harvested = self.runtime.time
            update.counters = self._count()

    def updated(self, event: Updated) -> None:
        self.updates.append(self._update)
        self._update = Update()
        if self._predicts:
            finished = self.ledger.take_finished()
            self.lengths.observe_lengths([self._ended(r) for r in finished if r.finish_reason])
        else:
            self.ledger.forget_finished()

    def _ended(self, rollout: Rollout) -> Ended:
        """Without tokens, only the ledger's columns know how long it was."""
        return Ended.of(rollout, int(self.ledger.columns.length[rollout.request_id - self.ledger.first_id]))

    def publishing(self) -> None: ...

    def published(self) -> None: ...

    def _count(self) -> dict[str, float]:
        """Engines' and ledger's counters since the last call."""
        now = {name: float(value) for name, value in self.ledger.counters.items()}
        since = {name: value - self._counted.get(name, 0.0) for name, value in now.items()}
        self._counted = now
        return {**self.fleet.metrics(), **{f"ledger/{name}": value for name, value in since.items()}}
