"""Requests with a bound on their age: who has to let go of tokens that nobody could train on in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from stretto.columns import NO_IDS
from stretto.gate import Gate, in_the_way
from stretto.records import IntArray
from stretto.requests import RUNNING, SCORED, Requests

Unit = Literal["group", "response"]
Strategy = Literal["refresh", "wait", "drop"]


class BoundedRequests(Requests):
    """`Requests` whose tokens are at most `max_staleness` versions old when they are trained on; None: any."""

    def __init__(
        self,
        unit: Unit,
        max_staleness: int | None,
        strategy: Strategy,
        batch: int,
        refresh_budget: int,
        now: Callable[[], float],
    ) -> None:
        super().__init__(now)
        self.unit, self.max_staleness, self.strategy = unit, max_staleness, strategy
        self.batch, self.refresh_budget = batch, refresh_budget

    def gate(self, ids: Sequence[int]) -> Gate:
        """What the gate would do about the rest if an update took `ids` now. O(alive)."""
        rows = self._in_the_way(ids)
        c = self.columns
        if self.strategy == "wait":
            unscored = [self.groups.unscored[group] > 0 for group in c.group[rows].tolist()]
            helps = np.array(unscored, np.bool_) if self.unit == "group" else c.state[rows] != SCORED
            blocked = rows[helps]
        else:
            unfinished = c.state[rows] != SCORED  # one whose rewards come late would never be trained on
            spent = c.refreshes[rows] >= self.refresh_budget
            blocked = rows[unfinished & spent] if self.strategy == "refresh" else rows[:0]
        return Gate((rows + self.first_id).tolist(), (blocked + self.first_id).tolist())

    def _in_the_way(self, ids: Sequence[int]) -> IntArray:
        if self.max_staleness is None:
            return NO_IDS
        c = self.columns
        rows = self._alive_rows()
        rows = rows[~np.isin(rows, np.asarray(ids, np.int64) - self.first_id)]
        first = c.first_version[rows].astype(np.int64)
        running = c.state[rows] == RUNNING
        loaded = np.full(max(self.loaded, default=0) + 1, self.version)
        loaded[list(self.loaded)] = list(self.loaded.values())
        new = np.flatnonzero(running & (first < 0))  # their first tokens may be on their way
        first[new] = loaded[c.worker[rows[new]]]
        nothing = (first < 0) | (running & ~c.keep[rows])
        deadline = np.where(nothing, self.max_staleness + 1, first + self.max_staleness - self.version)
        unit = c.group[rows] if self.unit == "group" else rows
        found = in_the_way(
            deadline,
            c.length[rows].astype(np.int64),
            unit,
            batch=self.batch,
            max_staleness=self.max_staleness,
        )
        return rows[found]

    def _refresh_overdue(self) -> None:
        """After an update: nobody can train any more on what was sampled by too old weights while it was made."""
        if self.max_staleness is None:
            return
        rows = self._alive_rows()
        first = self.columns.first_version[rows]
        late = (first >= 0) & (first < self.version - self.max_staleness) & ~self.columns.refreshing[rows]
        self._let_go(rows[late].tolist())

    def _let_go(self, rows: Sequence[int]) -> None:
        """Refresh requests because of their age, or discard them where that is the strategy."""
        if self.strategy == "drop":
            c = self.columns
            ids = [row + self.first_id for row in rows]
            if self.unit == "group":
                groups = dict.fromkeys(c.group[rows].tolist())
                ids = [i for group in groups for i in self.groups.members[group]]
            self.discard(ids, "stale")
            return
        for row in reversed(rows):
            self.counters["forced_refreshes"] += 1
            self._refresh(row + self.first_id)

    def _apply_gate(self, gate: Gate) -> None:
        """The update takes place: what is in the way lets go of its tokens, and what was told to drop them must not end
        under the old weights any more.
        """
        if self.max_staleness is None:
            return
        rows = self._alive_rows()
        c = self.columns
        c.refreshing[rows[(c.state[rows] == RUNNING) & ~c.keep[rows]]] = True
        self._let_go([request_id - self.first_id for request_id in gate.in_the_way])
