"""What a schedule may see of the ledger: everything, nothing to write."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stretto.gate import Gate
from stretto.records import FloatArray, IntArray, Prompt, RewardStatus, State

if TYPE_CHECKING:
    from stretto.buffer import Ledger
    from stretto.staleness import Unit


class LedgerView:
    """Read-only windows on the ledger. What is not said to cost more is O(1); iterate only over
    what an event concerns.
    """

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def version(self) -> int:
        """Optimiser steps made."""
        return self._ledger.version

    @property
    def now(self) -> float:
        """Seconds on the runtime's clock: for what is about time itself, since it makes a run hard to repeat."""
        return self._ledger.now()

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
        return self._ledger.groups.ready.keys()

    @property
    def alive(self) -> int:
        """Requests that have neither been consumed nor discarded."""
        return self._ledger.alive

    @property
    def alive_groups(self) -> KeysView[int]:
        """Groups with such requests, in order of admission."""
        return self._ledger.groups.unscored.keys()

    @property
    def admitted_groups(self) -> int:
        """Groups ever admitted."""
        return self._ledger.next_group

    @property
    def max_new_tokens(self) -> int:
        """The limit of a response."""
        return self._ledger.sampling.max_new_tokens

    @property
    def unit(self) -> Unit:
        """What an update takes: whole groups or single responses."""
        return self._ledger.unit

    @property
    def max_staleness(self) -> int | None:
        """The gate's bound; None: no gate."""
        return self._ledger.max_staleness

    # ---- workers and groups

    def running(self, worker: int) -> KeysView[int]:
        """Requests that `worker` runs or queues, in order of their start."""
        return self._ledger.running[worker].keys()

    def num_running(self, worker: int) -> int:
        """How many these are."""
        return len(self._ledger.running[worker])

    def members(self, group: int) -> Sequence[int]:
        """The request ids of a group, ascending, without the discarded ones."""
        return self._ledger.groups.members[group]

    def unfinished(self, group: int) -> int:
        """Members that have no reward yet."""
        return self._ledger.groups.unscored.get(group, 0)

    def prompt(self, group: int) -> Prompt:
        """What the group answers."""
        return self._ledger.groups.prompts[group]

    # ---- requests

    def _row(self, request_id: int) -> int:
        return request_id - self._ledger.first_id

    def group_of(self, request_id: int) -> int:
        """The group of a request."""
        return int(self._ledger.columns.group[self._row(request_id)])

    def state(self, request_id: int) -> State:
        """Where it stands. A refreshed request is RUNNING until its worker has let go of it."""
        return State(self._ledger.columns.state[self._row(request_id)])

    def length(self, request_id: int) -> int:
        """Tokens after the prompt, as far as they have been reported."""
        return int(self._ledger.columns.length[self._row(request_id)])

    def worker(self, request_id: int) -> int:
        """Where it runs, or ran last; -1: nowhere, or it waits."""
        return int(self._ledger.columns.worker[self._row(request_id)])

    def first_version(self, request_id: int) -> int:
        """The oldest version among its tokens; -1: it has none."""
        return int(self._ledger.columns.first_version[self._row(request_id)])

    def visit(self, request_id: int) -> int:
        """How often its row had been admitted before."""
        return int(self._ledger.columns.visit[self._row(request_id)])

    def sample_index(self, request_id: int) -> int:
        """Its number in the group as admitted."""
        return int(self._ledger.columns.sample_index[self._row(request_id)])

    def reward(self, request_id: int) -> float:
        """Of a SCORED one; nan without a usable reward."""
        return float(self._ledger.columns.reward[self._row(request_id)])

    def reward_status(self, request_id: int) -> RewardStatus:
        """Why it has no usable reward, or "ok"."""
        return self._ledger.columns.reward_status[self._row(request_id)] or "ok"

    def refreshes(self, request_id: int) -> int:
        """How often its tokens were dropped."""
        return int(self._ledger.columns.refreshes[self._row(request_id)])

    def has_draft(self, request_id: int) -> bool:
        """Whether dropped tokens of it will be its draft."""
        return request_id in self._ledger.drafts

    # ---- many at once: for Admit and Harvest

    def lengths_of(self, ids: Sequence[int]) -> IntArray:
        """`length` of each, (n,)."""
        return self._ledger.columns.length[self._rows(ids)].astype(np.int64)

    def groups_of(self, ids: Sequence[int]) -> IntArray:
        """`group_of` each, (n,)."""
        return self._ledger.columns.group[self._rows(ids)]

    def first_versions_of(self, ids: Sequence[int]) -> IntArray:
        """`first_version` of each, (n,)."""
        return self._ledger.columns.first_version[self._rows(ids)].astype(np.int64)

    def rewards_of(self, ids: Sequence[int]) -> FloatArray:
        """`reward` of each, (n,)."""
        return self._ledger.columns.reward[self._rows(ids)]

    def _rows(self, ids: Sequence[int]) -> IntArray:
        return np.asarray(ids, np.int64) - self._ledger.first_id

    def gate(self, ids: Sequence[int]) -> Gate:
        """What the gate would do about the rest if an update took `ids` now, and what that update must wait for.
        O(alive): ask at a harvest only.
        """
        return self._ledger.gate(ids)

    def oldest_first(self, ids: Sequence[int]) -> list[int]:
        """Ordered by first version, then id; those without tokens last. O(n log n)."""
        first = self.first_versions_of(ids)
        first[first < 0] = np.iinfo(np.int64).max
        chosen = np.asarray(ids, np.int64)
        order: list[int] = chosen[np.lexsort((chosen, first))].tolist()
        return order
