"""Reward workers for tests."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from stretto.config import RewardConfig
from stretto.records import Event, Scored
from stretto.tasks.rewards import RewardSpec
from stretto.tasks.workers import Job, RewardWorkers

TIMEOUT = 1.0
PATIENCE = 30.0  # seconds until a test gives up


class Pool:
    """Reward workers with an inbox."""

    def __init__(
        self, spec: RewardSpec, *, timeout: float = TIMEOUT, workers: int = 1, encode: Any = None
    ) -> None:
        self.inbox: queue.Queue[Event] = queue.Queue()
        config = RewardConfig(timeout=timeout, workers=workers)
        self.workers = RewardWorkers(spec, config, self.inbox.put, encode)

    def scores(self, *completions: str, **row: Any) -> list[Scored]:
        jobs = [Job(i, c, [7, 8], {"answer": "4", **row}) for i, c in enumerate(completions)]
        self.workers.submit(jobs)
        found = [self.inbox.get(timeout=PATIENCE) for _ in jobs]
        assert all(isinstance(event, Scored) for event in found)
        return sorted((event for event in found if isinstance(event, Scored)), key=lambda event: event.id)


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
