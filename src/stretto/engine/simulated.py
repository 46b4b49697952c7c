"""An engine without a model: lengths and step times are given, time leaps from one event to the next.

Commands take effect between two steps, as in an engine with a model: the step in hand is completed first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import numpy as np

from stretto.engine.decoding import COUNTERS, Counters, Decoding
from stretto.engine.decoding import StepCost as StepCost
from stretto.engine.responses import Response, Span
from stretto.records import Event, Leapt, Loaded, Progress, Request, Running, Stopped, WorkerDown, WorkerUp
from stretto.runtime import SimulatedRuntime
from stretto.weights import WeightsRef

FEW = 8
"""Requests that are told of one by one: with more, arrays are faster."""


class SimulatedEngine(Decoding):
    """Q slots with continuous batching; `length(request)` is how long the whole response will be.

    Args:
        cost: the step-time model.
        load_seconds: how long taking new weights keeps the engine from stepping.
        kv_tokens: K/V entries that fit; where they do not, the newest response is preempted and recomputed later. A
            group's prompt is held once. None: all fit.
        speed: tokens that a response emits per step, drafts included; None: 1.
        nodes: draft tokens that a response has verified per step; None: 0.
        agreement: chance that a token of a dropped response is sampled again when it restarts with its old tokens as
            draft: the prefix kept is geometric, a function of key and version. 0: they are no draft, and not verified.
        score: the reward of a response, where rewards take no time: its `Scored` comes with its `Finished`. None: they
            are somebody else's affair.
        spans: where to note who was in which slot, if wanted.

    Tokens are reported when something happens to their response or to the weights, or by `report`, while an engine with
    a model tells them every step. A response taken away before its first step has ended has made that step's token.
    """

    __slots__ = (
        "_absent", "_arrivals", "_changed", "_coming", "_counted", "_loads", "_plan", "alive", "load_seconds",
        "runtime",
    )  # fmt: skip

    def __init__(
        self,
        runtime: SimulatedRuntime,
        length: Callable[[Request], int],
        *,
        worker: int = 0,
        slots: int = 64,
        cost: StepCost | None = None,
        load_seconds: float = 0.0,
        kv_tokens: int | None = None,
        speed: Callable[[Request], float] | None = None,
        nodes: Callable[[Request], float] | None = None,
        agreement: float = 0.0,
        score: Callable[[Request], float] | None = None,
        spans: list[Span] | None = None,
    ) -> None:
        super().__init__(
            length, worker, slots, cost or StepCost(), kv_tokens, speed, nodes, agreement, score, spans
        )
        self.runtime = runtime
        self.load_seconds = load_seconds
        self.alive = True
        self._coming = False  # it will be
        self._arrivals = 0
        self._counted = 0.0  # up to when `metrics` has counted the seconds in which slots were there
        # (from, until), disjoint, in which they were not, not all of it counted yet.
        self._absent: list[tuple[float, float]] = []
        self._loads: list[tuple[float, float]] = []  # likewise, in which it took new weights
        self._plan = -1  # number of the newest plan's tick; those of older ones do nothing
        self._changed = False  # since then

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return False  # driven by the runtime's heap, never stepped while the inbox is empty

    # ---- commands -----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        if not self.alive:
            return  # the ledger takes them back when it hears
        self._settle()
        for request in requests:
            tokens = len(request.token_ids)
            self._queue.append(Response(request, tokens, tokens))
        self._go_on()

    def stop(self, ids: Sequence[int], attempts: Sequence[int]) -> None:
        if not self.alive:
            return
        self._settle()
        # With the attempt: of a worker that was thought dead an old one may still be here.
        here = {(r.request.id, r.request.attempt): r for r in (*self._running.values(), *self._queue)}
        for request_id, attempt in zip(ids, attempts, strict=True):
            response = here.pop((int(request_id), int(attempt)), None)
            if response is None:
                continue
            if response.end in self._running:
                self._report([response])
                self._leave(response, "stopped")
            else:
                self._queue.remove(response)
            self._events.append(Stopped(self.worker, request_id, attempt))
        self._go_on()

    def load(self, ref: WeightsRef, running: Running) -> None:
        if not self.alive:
            return
        self._settle()
        self._report(self._running.values())  # under the version that sampled them
        if running == "stop":
            for response in list(self._running.values()):
                self._leave(response, "stopped")
                self._events.append(Stopped(self.worker, response.request.id, response.request.attempt))
        self._flush()
        if running == "recompute":
            self._counters.recomputed_tokens += self._context
            self._prefill(self._context)
        self.version = ref.version
        self._loads.append((self._boundary, self._boundary + self.load_seconds))
        self._boundary += self.load_seconds
        self._events.append(Loaded(self.worker, ref.version))
        self._go_on()

    def pause(self, seconds: float) -> None:
        """The device does something else (a colocated trainer): no step, and no slot is available."""
        if not self.alive:  # it does not come back before
            self._boundary = max(self._boundary, self.runtime.time) + seconds
            return
        self._settle()
        self._absent.append((self._boundary, self._boundary + seconds))
        self._boundary += seconds
        self._go_on()

    def report(self) -> None:
        """Tell how many tokens every running response has."""
        if self._running:
            self._settle()
            self._report(self._running.values())
            self._go_on()

    def start(self) -> None:
        """Come up; also again after `fail`, with the weights it had, and not before it is known that it went down: what
        is said to it until then was meant for what it was before, and is lost.
        """
        if not self._coming:
            self._coming = True
            self._arrivals += 1
            self._boundary = max(self.runtime.time, self._boundary)
            self.runtime.call_at(self._boundary, partial(self._come_up, self._arrivals))

    def _come_up(self, arrival: int) -> list[Event]:
        if not self._coming or arrival != self._arrivals:  # it has failed before it was there
            return []
        if self.runtime.time < self._boundary:  # the trainer has its device
            self.runtime.call_at(self._boundary, partial(self._come_up, arrival))
            return []
        self.alive, self._coming = True, False
        if self._absent and self._absent[-1][1] == inf:
            self._absent[-1] = self._absent[-1][0], self.runtime.time
        return [WorkerUp(self.worker, self.slots, self.version)]

    def fail(self) -> None:
        """Go down with the step in hand; all tokens until then have been received."""
        self._coming = False
        if not self.alive:
            return
        self._settle()
        self._report(self._running.values())
        for response in list(self._running.values()):
            self._leave(response, "down")
        self._events.append(WorkerDown(self.worker))
        self._flush()
        self.absent()
        self._plan = -1
        self._clear()

    def absent(self) -> None:
        """Not be there from now on, or from the end of the step in hand, until `start`."""
        self.alive = False
        down = max(self.runtime.time, self._step_end)
        self._absent, self._loads = (
            [(since, min(until, down)) for since, until in times if since < down]
            for times in (self._absent, self._loads)
        )
        self._absent.append((down, inf))

    def step(self) -> list[Event]:
        return []

    def metrics(self) -> dict[str, float]:
        if self.alive:
            self._settle()
            self._go_on()
        self._count()
        now = self.runtime.time
        early = max(0.0, self._step_end - now)  # of the step in hand, what is still to come
        counters, self._counters = self._counters, Counters()
        counters.step_seconds -= early
        counters.busy_slot_seconds -= early * self._stepping
        self._counters.step_seconds = early
        self._counters.busy_slot_seconds = early * self._stepping
        return {name: getattr(counters, name) for name in COUNTERS}

    def _count(self) -> None:
        """The seconds since the last count, but for those in which the slots were not there."""
        since, now = self._counted, self.runtime.time

        def elapsed(times: Sequence[tuple[float, float]]) -> float:
            return sum(max(0.0, min(b, now) - max(a, since)) for a, b in times)

        passed = now - since - elapsed(self._absent)
        self._counters.sync_seconds += elapsed(self._loads)
        self._counted = now
        self._absent = [(a, b) for a, b in self._absent if b > now]
        self._loads = [(a, b) for a, b in self._loads if b > now]
        self._counters.up_seconds += passed
        self._counters.available_slot_seconds += passed * self.slots

    # ---- time ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Complete the step in hand, and account for those before."""
        now = self.runtime.time
        if now <= self._boundary:
            return
        if self._running:
            self._advance(self._steps_until(now))
        if now > self._boundary:  # but for rounding: the next command at this moment makes no step
            self._boundary = now
        self._release_due()

    def _go_on(self) -> None:
        """After something has changed: plan anew before time goes on."""
        if not self._changed:
            self._changed = True
            self.runtime.soon(self._plan_next)

    def _plan_next(self) -> None:
        """Fill the slots, and plan until the next end of a response."""
        self._changed = False
        if self.kv_tokens is not None and self._context + self._rate > self.kv_tokens:
            self._preempt()
        if self._queue and self._free:
            self._admit()
        self._plan = self.runtime.call_at(self._aim(), self._tick) if self._running else -1
        if self._events or self._reports:
            self._flush()

    def _tick(self) -> list[Event]:
        """The planned end has come."""
        if self.runtime.called != self._plan:
            return []
        self._advance(self._target - self._step)
        self._boundary = self._step_end = self.runtime.time  # but for rounding
        self._release_due()
        self._go_on()
        return self._gathered()

    # ---- events -------------------------------------------------------------------------------------

    def _gathered(self) -> list[Event]:
        """Everything that is to be said, tokens first."""
        reports, events = self._reports, self._events
        self._reports, self._events = [], []
        worker, version = self.worker, self.version
        if len(reports) <= FEW:
            told: list[Event] = [Leapt(worker, i, attempt, count, version) for i, attempt, count in reports]
            return told + events
        ids, attempts, counts = (np.array(column, np.int64) for column in zip(*reports, strict=True))
        return [Progress(worker, ids, attempts, counts, version), *events]

    def _flush(self) -> None:
        """Send it, to arrive when the step in hand ends."""
        if self._reports or self._events:
            self.runtime.deliver(self._boundary, self._gathered())
