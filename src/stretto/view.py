"""What a schedule may see of the ledger: everything, nothing to write."""

from __future__ import annotations

from collections.abc import KeysView, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.buffer import Ledger


class LedgerView:
    """Read-only windows on the ledger. Everything here is O(1); iterate only over what an event concerns."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def version(self) -> int:
        """Optimiser steps made."""
        return self._ledger.version

    @property
    def updating(self) -> bool:
        """Whether the learner has a batch."""
        return self._ledger.updating

    @property
    def slots(self) -> Mapping[int, int]:
        """Worker -> slots, of the workers that are up."""
        return self._ledger.slots

    @property
    def loaded(self) -> Mapping[int, int]:
        """Worker -> version of its weights."""
        return self._ledger.loaded

    @property
    def waiting(self) -> KeysView[int]:
        """Requests that may be started (PENDING, PARKED), oldest first."""
        return self._ledger.waiting.keys()

    @property
    def scored(self) -> KeysView[int]:
        """Requests with a reward that no update has consumed, in order of scoring."""
        return self._ledger.scored.keys()

    @property
    def ready_groups(self) -> KeysView[int]:
        """Groups whose members are all SCORED, in order of completion."""
        return self._ledger.ready_groups.keys()

    @property
    def alive(self) -> int:
        """Requests that have neither been consumed nor discarded."""
        return self._ledger.alive

    @property
    def admitted_groups(self) -> int:
        """Groups ever admitted."""
        return self._ledger.next_group

    def num_running(self, worker: int) -> int:
        """Requests that `worker` runs or queues."""
        return len(self._ledger.running[worker])

    def members(self, group: int) -> range:
        """The request ids of a group."""
        return self._ledger.members[group]

    def group_of(self, request_id: int) -> int:
        """The group of a request."""
        return int(self._ledger.columns.group[request_id - self._ledger.first_id])
