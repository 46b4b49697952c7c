"""The staleness gate: which requests an update may not leave behind as they are. Pure functions on columns.

A request that holds tokens of version f can be trained on until version f + max_staleness. An update takes B responses,
so of those left behind by the update v -> v+1 at most k B may have f + max_staleness <= v + k, for every k: else some
cannot all be taken in time, whatever the order (earliest-deadline feasibility). The k-th update from now is the
last that may take them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stretto.records import BoolArray, IntArray


@dataclass(slots=True)
class Gate:
    """What an update with certain responses would have to do about the rest; ids ascending."""

    in_the_way: list[int] = field(default_factory=list)  # to be refreshed or dropped
    blocked: list[int] = field(
        default_factory=list
    )  # of those, the ones that must end before: the update waits


def in_the_way(
    deadline: IntArray, tokens: IntArray, unit: IntArray, *, batch: int, max_staleness: int
) -> BoolArray:
    """Which of n requests must let go of their tokens, (n,).

    `deadline` (n,) is the k of each, first version + `max_staleness` - v; anything above `max_staleness` for what holds
    no tokens. `unit` (n,) numbers what is only taken together: the group where an update takes whole groups, whose
    deadline is its oldest member's and whose places in a batch are all its members; else the request itself.
    For the smallest k that has too many, those with the fewest tokens are chosen, the newest first among equals; then
    on to the next k. `batch` is B. What is left always fits. Where units have one size and each unit one deadline
    (single responses always) no choice loses fewer tokens; else one may be chosen that a larger one chosen after it
    makes needless.
    """
    chosen = np.zeros(deadline.size, np.bool_)
    horizon = min(max_staleness, deadline.size // batch)  # beyond it even all of them are few enough
    if deadline.size == 0 or deadline.min() > horizon:
        return chosen
    _, which, size = np.unique(unit, return_inverse=True, return_counts=True)
    room = batch * np.arange(horizon + 1)
    left = np.minimum(deadline, max_staleness + 1)
    while True:
        first = np.full(size.size, max_staleness + 1)
        np.minimum.at(first, which, left)
        due = np.bincount(np.clip(first, 0, horizon + 1), weights=size, minlength=horizon + 2)
        excess = np.cumsum(due[: horizon + 1]) - room
        violated = np.flatnonzero(excess > 0)
        if violated.size == 0:
            return chosen
        k = int(violated[0])
        late = left <= k
        lost = np.bincount(which, weights=tokens * late, minlength=size.size)
        candidates = np.flatnonzero(first <= k)
        order = candidates[np.lexsort((-candidates, lost[candidates]))]
        enough = int(np.searchsorted(np.cumsum(size[order]), excess[k])) + 1
        out = np.zeros(size.size, np.bool_)
        out[order[:enough]] = True
        late &= out[which]
        chosen |= late
        left[late] = max_staleness + 1
