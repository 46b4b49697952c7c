"""A request as the messages about it tell, and whether all can be trained on in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from stretto.buffer import Ledger
from stretto.records import Rollout, State


@dataclass(slots=True)
class Entry:
    """A request."""

    id: int
    group: int
    row: int
    visit: int
    sample: int
    admitted: int  # version
    state: State = State.PENDING
    attempt: int = 0
    worker: int = -1
    length: int = 0
    oldest: int = -1
    refreshes: int = 0
    leaving: str = (
        ""  # what happens when its worker lets go: "keep", "drop"; "lost": dropped even if it ends before
    )
    reward: float = 0.0
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)

    def lose(self) -> None:
        """Its tokens are taken away."""
        self.refreshes += self.length > 0
        if self.length and self.draft[: self.length] != self.tokens:
            self.draft = self.tokens
        self.tokens, self.versions, self.length, self.oldest = [], [], 0, -1
        self.leaving = ""

    def release(self) -> None:
        """Its worker has let go of it."""
        if self.leaving in ("drop", "lost"):
            self.lose()
        self.state = State.PARKED if self.length else State.PENDING
        self.worker, self.leaving = -1, ""

    def copy(self) -> Entry:
        other = copy(self)
        other.tokens, other.versions = self.tokens.copy(), self.versions.copy()
        return other


def check_rollout(entry: Entry, rollout: Rollout, *, tokens: bool) -> None:
    """What the learner gets is the request's; with `tokens` these too, whose log-probs say which weights and place."""
    same = (rollout.group_id, rollout.prompt.row, rollout.visit, rollout.sample_index, rollout.attempt)
    assert same == (entry.group, entry.row, entry.visit, entry.sample, entry.attempt), f"request {entry.id}"
    none = rollout.reward != rollout.reward and entry.reward != entry.reward
    assert none or rollout.reward == entry.reward, f"request {entry.id}: reward"
    mask, logprobs, raw = rollout.loss_mask, rollout.logprobs, rollout.raw_logprobs
    columns = (rollout.token_ids, logprobs, raw, rollout.versions, mask)
    assert [len(column) for column in columns] == [entry.length] * 5, (
        f"request {entry.id}: lengths of columns"
    )
    assert rollout.oldest_version == entry.oldest
    if tokens:
        assert rollout.token_ids.tolist() == entry.tokens, f"request {entry.id}: tokens"
        assert rollout.versions.tolist() == entry.versions, f"request {entry.id}: versions"
        assert (logprobs[mask] == -1.0 - rollout.versions[mask]).all(), "log-probs of other weights"
        assert (raw[mask] == -1.0 - np.flatnonzero(mask)).all(), "log-probs of other places"


def infeasible(ledger: Ledger, entries: Iterable[Entry], version: int, loaded: Mapping[int, int]) -> bool:
    """Whether some of these cannot all be trained on in time, when the update after `version` takes none of them.

    The k-th update from then on is the last for what is due at k; it and those before it take k batches.
    """
    bound, group = ledger.max_staleness, ledger.unit == "group"
    assert bound is not None
    units: dict[int, tuple[int, int]] = {}  # what is only taken together -> when it is due, places in a batch
    for entry in entries:
        oldest = entry.oldest
        if entry.leaving in ("drop", "lost"):
            oldest = -1
        elif oldest < 0 and entry.state == State.RUNNING:
            oldest = loaded.get(entry.worker, version)  # its first tokens may be on their way
        due = oldest + bound - version if oldest >= 0 else bound + 1
        unit = entry.group if group else entry.id
        least, size = units.get(unit, (due, 0))
        units[unit] = (min(least, due), size + 1)
    return any(
        sum(size for due, size in units.values() if due <= k) > k * ledger.batch for k in range(bound + 1)
    )
