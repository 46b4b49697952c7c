"""What a schedule may see of the ledger: everything, nothing to write."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stretto.columns import STATES
from stretto.gate import Gate
from stretto.records import FloatArray, IntArray, Prompt, RewardStatus, State

if TYPE_CHECKING:
    from stretto.buffer import Ledger
    from stretto.staleness import Unit


class LedgerView:
    """Read-only windows on the ledger. What is not said to cost more is O(1); iterate only over
    what an event concerns.

    `slots` are those of the workers that are up, `loaded` the version of a worker's weights, `places` its place
    among them, which who is started instead of a lost one keeps; `waiting` what may be
    started (PENDING, PARKED), oldest first; `scored` what has a reward and no update has consumed, in order of scoring;
    `ready_groups` those whose members are all SCORED, in order of completion; `alive_groups` those with requests that
    have neither been consumed nor discarded, in order of admission.
    """

    __slots__ = ("_ledger", "alive_groups", "loaded", "places", "ready_groups", "scored", "slots", "waiting")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Windows stay open: a schedule looks through them at every turn.
        self.slots: Mapping[int, int] = ledger.slots
        self.loaded: Mapping[int, int] = ledger.loaded
        self.places: Mapping[int, int] = ledger.places
        self.waiting: KeysView[int] = ledger.waiting.keys()
        self.scored: KeysView[int] = ledger.scored.keys()
        self.ready_groups: KeysView[int] = ledger.groups.ready.keys()
        self.alive_groups: KeysView[int] = ledger.groups.unscored.keys()

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
    def alive(self) -> int:
        """Requests that have neither been consumed nor discarded."""
        return self._ledger.alive

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

    def line(self) -> list[int]:
        """The workers that are up, in order of their places. O(n log n)."""
        return sorted(self.places, key=self.places.__getitem__)

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
        return self._ledger.cells.group[request_id - self._ledger.first_id]

    def state(self, request_id: int) -> State:
        """Where it stands. A refreshed request is RUNNING until its worker has let go of it."""
        return STATES[self._ledger.cells.state[self._row(request_id)]]

    def length(self, request_id: int) -> int:
        """Tokens after the prompt, as far as they have been reported."""
        return self._ledger.cells.length[request_id - self._ledger.first_id]

    def worker(self, request_id: int) -> int:
        """Where it runs, or ran last; -1: nowhere, or it waits."""
        return self._ledger.cells.worker[request_id - self._ledger.first_id]

    def first_version(self, request_id: int) -> int:
        """The oldest version among its tokens; -1: it has none."""
        return self._ledger.cells.first_version[request_id - self._ledger.first_id]

    def visit(self, request_id: int) -> int:
        """How often its row had been admitted before."""
        return int(self._ledger.columns.visit[self._row(request_id)])

    def sample_index(self, request_id: int) -> int:
        """Its number in the group as admitted."""
        return int(self._ledger.columns.sample_index[self._row(request_id)])

    def reward(self, request_id: int) -> float:
        """Of a SCORED one; nan without a usable reward."""
        return self._ledger.cells.reward[self._row(request_id)]

    def reward_status(self, request_id: int) -> RewardStatus:
        """Why it has no usable reward, or "ok"."""
        return self._ledger.columns.reward_status[self._row(request_id)] or "ok"

    def refreshes(self, request_id: int) -> int:
        """How often its tokens were dropped."""
        return self._ledger.cells.refreshes[request_id - self._ledger.first_id]

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
