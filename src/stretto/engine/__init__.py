"""Engines turn requests into tokens: one protocol, several implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stretto.records import Event, Request, Running
from stretto.weights import WeightsRef


class Engine(Protocol):
    """One replica of the model with `slots` places; knows nothing of schedules.

    It queues what does not fit its slots, first come, first served. Commands return nothing: results are the
    events of the next `step`.
    """

    worker: int
    slots: int
    version: int

    @property
    def num_running(self) -> int:
        """Slots that are prefilling or decoding."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something: a running or queued request, or an event to report."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in this order."""

    def stop(self, ids: Sequence[int], attempts: Sequence[int]) -> None:
        """Let go of these requests; each is answered by `Stopped`. Unknown pairs are ignored."""

    def load(self, ref: WeightsRef, running: Running) -> None:
        """Take new weights before the next step; answered by `Loaded` (and `Stopped` if running="stop")."""

    def step(self) -> list[Event]:
        """One forward pass over what is running, after admitting what fits; its events in order."""

    def metrics(self) -> dict[str, float]:
        """Counters since the last call (steps, tokens, seconds by part), reset by it."""
