"""An engine without a model: lengths and step times are given, time leaps from one event to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.records import Event, Finished, FinishReason, Loaded, Progress, Request, Running, Stopped
from stretto.runtime import SimulatedRuntime
from stretto.weights import WeightsRef


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decoding step: `base + per_sequence * r` with r sequences running."""

    base: float = 0.01
    per_sequence: float = 0.001


@dataclass(slots=True)
class _Running:
    request: Request
    remaining: int


class SimulatedEngine:
    """Q slots with continuous batching; `length(request)` is how long the whole response will be.

    Between two changes of what is running every step takes equally long, so the engine plans the next
    finish, and when something comes in between it first accounts for the steps completed until then.
    """

    def __init__(
        self,
        runtime: SimulatedRuntime,
        length: Callable[[Request], int],
        *,
        worker: int = 0,
        slots: int = 64,
        cost: StepCost | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        self.runtime = runtime
        self.length = length
        self.worker = worker
        self.slots = slots
        self.version = 0
        self.cost = cost or StepCost()
        self.load_seconds = load_seconds
        self._queue: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._since = 0.0  # when the steps not yet accounted for began
        self._plan = 0  # number of the newest plan; ticks of older ones do nothing
        self._counters = dict.fromkeys(("steps", "decode_tokens", "busy_slot_seconds"), 0.0)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return False  # driven by the runtime's heap, never stepped while the inbox is empty

    def submit(self, requests: Sequence[Request]) -> None:
        self._post(self._advance())
        self._queue.extend(requests)
        self._plan_next()

    def stop(self, ids: Sequence[int], attempts: Sequence[int]) -> None:
        events = self._advance()
        told = dict(zip(ids, attempts, strict=True))
        for request in [r.request for r in self._running.values()] + list(self._queue):
            if told.get(request.id) == request.attempt:
                self._drop(request)
                events.append(Stopped(self.worker, request.id, request.attempt))
        self._post(events)
        self._plan_next()

    def load(self, ref: WeightsRef, running: Running) -> None:
        events = self._advance()
        self.version = ref.version
        if running == "stop":
            for request in [r.request for r in self._running.values()]:
                self._drop(request)
                events.append(Stopped(self.worker, request.id, request.attempt))
        for event in [*events, Loaded(self.worker, ref.version)]:
            self.runtime.post(event, self.load_seconds)
        self._since += self.load_seconds
        self._plan_next()

    def step(self) -> list[Event]:
        return []

    def metrics(self) -> dict[str, float]:
        counters, self._counters = self._counters, dict.fromkeys(self._counters, 0.0)
        return counters

    def _drop(self, request: Request) -> None:
        if self._running.pop(request.id, None) is None:
            self._queue.remove(request)

    def _post(self, events: list[Event]) -> None:
        for event in events:
            self.runtime.post(event)

    def _step_seconds(self) -> float:
        return self.cost.base + self.cost.per_sequence * len(self._running)

    def _advance(self) -> list[Event]:
        """Account for the steps completed since `_since`: their tokens, and who finished."""
        now = self.runtime.now()
        if not self._running:
            self._since = max(self._since, now)
            return []
        seconds = self._step_seconds()
        # A tick arrives at `_since + n * seconds` up to rounding: the last step is then complete.
        shortest = min(r.remaining for r in self._running.values())
        steps = min(int((now - self._since) / seconds + 1e-6), shortest)
        if steps <= 0:
            return []
        self._since += steps * seconds
        running = list(self._running.values())
        for entry in running:
            entry.remaining -= steps
        self._counters["steps"] += steps
        self._counters["decode_tokens"] += steps * len(running)
        self._counters["busy_slot_seconds"] += steps * seconds * len(running)
        events: list[Event] = [
            Progress(
                self.worker,
                np.array([r.request.id for r in running]),
                np.array([r.request.attempt for r in running]),
                np.full(len(running), steps),
                self.version,
            )
        ]
        for entry in running:
            if entry.remaining == 0:
                del self._running[entry.request.id]
                request = entry.request
                stopped = self.length(request) <= request.sampling.max_new_tokens
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                events.append(Finished(self.worker, request.id, request.attempt, reason))
        return events

    def _plan_next(self) -> None:
        while self._queue and len(self._running) < self.slots:
            request = self._queue.popleft()
            whole = min(self.length(request), request.sampling.max_new_tokens)
            self._running[request.id] = _Running(request, max(1, whole - len(request.token_ids)))
        self._plan += 1
        if not self._running:
            return
        plan, steps = self._plan, min(r.remaining for r in self._running.values())

        def tick() -> list[Event]:
            if plan != self._plan:
                return []
            events = self._advance()
            self._plan_next()
            return events

        self.runtime.call_at(self._since + steps * self._step_seconds(), tick)
