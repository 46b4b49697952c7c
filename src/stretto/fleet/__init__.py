"""Fleets: several engines behind one interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stretto.records import Request, Rollout, Running
from stretto.tally import Tally
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


class Drafting(Protocol):
    """A run's side of drafting, be it of one engine or of a fleet's."""

    def remember(self, rollouts: Sequence[Rollout]) -> None:
        """Finished responses become history."""

    def settle(self) -> None:
        """Before the engines begin: what is done with these in the background need not be waited for any more."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned from verification; plain JSON."""

    def load_state_dict(self, state: Mapping[str, Any], *, budget: bool = True) -> None:
        """Go on from there; `budget`: it is of a budget of the same kind, and that is loaded too."""

    def counts(self) -> Tally:
        """Under `spec/`, since the last call."""

    def metrics(self) -> dict[str, float]:
        """`counts`, as they are shown."""
