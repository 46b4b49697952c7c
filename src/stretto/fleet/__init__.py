"""Fleets: several engines behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stretto.records import Request, Running
from stretto.weights import WeightsRef


class Fleet(Protocol):
    """Commands to workers by number; every result comes back as an event in the runtime's inbox."""

    def start(self) -> None:
        """Bring the workers up; each reports `WorkerUp`."""

    def submit(self, worker: int, requests: Sequence[Request]) -> None:
        """Queue requests on a worker, in this order."""

    def stop(self, worker: int, ids: Sequence[int], attempts: Sequence[int]) -> None:
        """Tell a worker to let go of these requests."""

    def load(self, ref: WeightsRef, workers: Sequence[int], running: Running) -> None:
        """Give new weights to these workers; each takes them between two of its steps."""

    def metrics(self) -> dict[str, float]:
        """Engine counters summed over workers since the last call."""

    def close(self) -> None:
        """Let the workers go."""
