"""Engines in the trainer's own process, stepped by the runtime when its inbox is empty."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.engine import Engine
from stretto.records import Event, Request, Running, WorkerUp
from stretto.weights import WeightsRef


class InProcessFleet:
    """Worker i is `engines[i]`; a round steps each engine that has work once."""

    def __init__(self, engines: Sequence[Engine], post: Callable[[Event], None]) -> None:
        self.engines = list(engines)
        self._post = post

    def start(self) -> None:
        for worker, engine in enumerate(self.engines):
            self._post(WorkerUp(worker, engine.slots, engine.version))

    def submit(self, worker: int, requests: Sequence[Request]) -> None:
        self.engines[worker].submit(requests)

    def stop(self, worker: int, ids: Sequence[int], attempts: Sequence[int]) -> None:
        self.engines[worker].stop(ids, attempts)

    def load(self, ref: WeightsRef, workers: Sequence[int], running: Running) -> None:
        for worker in workers:
            self.engines[worker].load(ref, running)

    def busy(self) -> bool:
        """Whether a round would do something."""
        return any(engine.has_work for engine in self.engines)

    def step(self) -> list[Event]:
        """One step of every engine that has work; their events in worker order."""
        return [event for engine in self.engines if engine.has_work for event in engine.step()]

    def metrics(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for engine in self.engines:
            for name, value in engine.metrics().items():
                total[name] = total.get(name, 0.0) + value
        total["worker_seconds"] = total["step_seconds"]  # they step in turn
        return total

    def close(self) -> None:
        self.engines.clear()
