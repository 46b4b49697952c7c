"""Simulated workers: they come and go at given times, and share their device with the trainer or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stretto.engine.simulated import SimulatedEngine
from stretto.records import Event, Request, Running
from stretto.runtime import SimulatedRuntime
from stretto.weights import WeightsRef


class SimulatedFleet:
    """Worker i is `engines[i]`.

    Args:
        arrivals: (seconds, worker): it is absent until then, or comes back after a failure.
        failures: (seconds, worker): it goes down; what ran there is told with all its tokens before.
        report_seconds: how often running responses' lengths are reported, which an engine with a model does every
            step. None: only when something happens to them.
    """

    def __init__(
        self,
        runtime: SimulatedRuntime,
        engines: Sequence[SimulatedEngine],
        *,
        arrivals: Sequence[tuple[float, int]] = (),
        failures: Sequence[tuple[float, int]] = (),
        report_seconds: float | None = None,
    ) -> None:
        self.runtime = runtime
        self.engines = list(engines)
        self.arrivals = list(arrivals)
        self.failures = list(failures)
        self.report_seconds = report_seconds
        self._reporting = False

    def start(self) -> None:
        changes = [(when, 1, worker) for when, worker in self.arrivals]
        changes += [(when, 0, worker) for when, worker in self.failures]
        first = {worker: up for when, up, worker in sorted(changes, reverse=True)}
        for worker, engine in enumerate(self.engines):
            if first.get(worker):
                engine.absent()  # its first change is an arrival
            else:
                engine.start()
        for when, up, worker in changes:
            self._change_at(when, worker, up=bool(up))

    def _change_at(self, when: float, worker: int, *, up: bool) -> None:
        engine = self.engines[worker]

        def change() -> list[Event]:
            if not up:
                engine.fail()
            elif not engine.alive:
                engine.start()
            return []

        self.runtime.call_at(when, change)

    def submit(self, worker: int, requests: Sequence[Request]) -> None:
        self.engines[worker].submit(requests)
        if self.report_seconds is not None and not self._reporting:
            self._reporting = True
            self.runtime.call_at(self.runtime.time + self.report_seconds, self._report)

    def _report(self) -> list[Event]:
        assert self.report_seconds is not None
        running = [engine for engine in self.engines if engine.num_running]
        for engine in running:
            engine.report()
        self._reporting = bool(running)  # without an end, a schedule at a stand would never be noticed
        if running:
            self.runtime.call_at(self.runtime.time + self.report_seconds, self._report)
        return []

    def stop(self, worker: int, ids: Sequence[int], attempts: Sequence[int]) -> None:
        self.engines[worker].stop(ids, attempts)

    def load(self, ref: WeightsRef, workers: Sequence[int], running: Running) -> None:
        for worker in workers:
            self.engines[worker].load(ref, running)

    def pause(self, seconds: float, workers: Iterable[int]) -> None:
        """The trainer has these workers' devices for so long."""
        for worker in workers:
            self.engines[worker].pause(seconds)

    def metrics(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for engine in self.engines:
            for name, value in engine.metrics().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def close(self) -> None:
        self.engines.clear()
