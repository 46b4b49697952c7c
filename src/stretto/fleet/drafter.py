"""The drafters of a fleet's workers as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.fleet.workers import WorkerFleet
from stretto.records import Rollout
from stretto.tally import Tally


class FleetDrafter:
    """Each has the history of all prompts and learns from its own steps."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet

    def remember(self, rollouts: Sequence[Rollout]) -> None:
        self._fleet.remember(rollouts)

    def settle(self) -> None:
        """Nothing: workers index what they are sent in processes of their own, while they load their weights."""

    def state_dict(self) -> dict[str, Any]:
        """The first worker's state as one drafter has it, and those of all in `workers`."""
        states = self._fleet.drafter_states()
        return {**states[0], "workers": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any], *, budget: bool = True) -> None:
        self._fleet.restore_drafters(state.get("workers", [state]), budget)

    def counts(self) -> Tally:
        """As of the fleet's last `metrics`."""
        return self._fleet.take_drafter_counts()

    def metrics(self) -> dict[str, float]:
        return self.counts().figures()
