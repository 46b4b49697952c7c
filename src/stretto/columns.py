"""What the ledger keeps of each request: growable numpy columns, and the tokens."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.records import (
    BoolArray,
    FinishReason,
    FloatArray,
    IntArray,
    Prompt,
    Request,
    Rollout,
    SamplingParams,
    State,
)


class Columns:
    """One row per request. All arrays have the same capacity, of which the first `size` rows are in use."""

    state: npt.NDArray[np.int8]
    group: npt.NDArray[np.int64]
    sample_index: npt.NDArray[np.int32]
    visit: npt.NDArray[np.int32]
    admitted_step: npt.NDArray[np.int32]
    key: npt.NDArray[np.uint64]
    worker: npt.NDArray[np.int32]
    attempt: npt.NDArray[np.int32]
    keep: BoolArray  # whether its tokens are kept when its worker lets go of it
    length: npt.NDArray[np.int32]  # tokens after the prompt
    turn: npt.NDArray[np.int32]
    turn_start: npt.NDArray[np.int32]
    first_version: npt.NDArray[np.int32]  # -1: no tokens
    drafted: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.int32]
    started_at: FloatArray
    finished_at: FloatArray
    reward: FloatArray
    finish_reason: npt.NDArray[Any]
    reward_status: npt.NDArray[Any]
    reward_parts: npt.NDArray[Any]

    _kinds: Mapping[str, tuple[Any, Any]] = {  # dtype, value of a new row
        "state": (np.int8, State.PENDING),
        "group": (np.int64, -1),
        "sample_index": (np.int32, 0),
        "visit": (np.int32, 0),
        "admitted_step": (np.int32, 0),
        "key": (np.uint64, 0),
        "worker": (np.int32, -1),
        "attempt": (np.int32, 0),
        "keep": (np.bool_, True),
        "length": (np.int32, 0),
        "turn": (np.int32, 0),
        "turn_start": (np.int32, 0),
        "first_version": (np.int32, -1),
        "drafted": (np.int32, 0),
        "accepted": (np.int32, 0),
        "started_at": (np.float64, np.nan),
        "finished_at": (np.float64, np.nan),
        "reward": (np.float64, np.nan),
        "finish_reason": (object, None),
        "reward_status": (object, None),
        "reward_parts": (object, None),
    }

    def __init__(self) -> None:
        self.size = 0
        self._reserve(1024)

    def _reserve(self, capacity: int) -> None:
        for name, (dtype, value) in self._kinds.items():
            column = np.full(capacity, value, dtype)
            if self.size:
                column[: self.size] = getattr(self, name)[: self.size]
            setattr(self, name, column)

    def grow(self, count: int) -> int:
        """Add `count` rows with default values; returns the first one's index."""
        first = self.size
        if first + count > len(self.state):
            self._reserve(max(2 * len(self.state), first + count))
        self.size += count
        return first

    def admit(self, group: int, visit: int, step: int, keys: Sequence[int]) -> int:
        """Add a group's rows, one for each key; returns the first one's index."""
        first = self.grow(len(keys))
        rows = slice(first, self.size)
        self.group[rows] = group
        self.sample_index[rows] = np.arange(len(keys))
        self.visit[rows] = visit
        self.admitted_step[rows] = step
        self.key[rows] = np.array(keys, np.uint64)
        return first

    def request(
        self, row: int, request_id: int, prompt: Prompt, tokens: Tokens | None, sampling: SamplingParams
    ) -> Request:
        """A row as the command to generate it, from the tokens that it has."""
        return Request(
            id=request_id,
            attempt=int(self.attempt[row]),
            group=int(self.group[row]),
            prompt_ids=prompt.token_ids,
            # A simulated engine leaves tokens out; that there are so many is what it needs to go on.
            token_ids=tokens.token_ids() if tokens else np.zeros(self.length[row], np.int64),
            turn_start=int(self.turn_start[row]),
            key=int(self.key[row]),
            sampling=sampling,
        )

    def rollout(self, row: int, request_id: int, prompt: Prompt, tokens: Tokens) -> Rollout:
        """A row with its tokens as a record."""
        token_ids, logprobs, raw_logprobs, versions, loss_mask = tokens.arrays()
        return Rollout(
            request_id=request_id,
            group_id=int(self.group[row]),
            prompt=prompt,
            sample_index=int(self.sample_index[row]),
            visit=int(self.visit[row]),
            key=int(self.key[row]),
            token_ids=token_ids,
            logprobs=logprobs,
            raw_logprobs=raw_logprobs,
            versions=versions,
            loss_mask=loss_mask,
            turn_start=int(self.turn_start[row]),
            turn=int(self.turn[row]),
            reward=float(self.reward[row]),
            reward_parts=self.reward_parts[row] or {},
            reward_status=self.reward_status[row] or "ok",
            finish_reason=FinishReason(self.finish_reason[row] or ""),
            outcome=State(self.state[row]),
            worker=int(self.worker[row]),
            attempt=int(self.attempt[row]),
            admitted_step=int(self.admitted_step[row]),
            started_at=float(self.started_at[row]),
            finished_at=float(self.finished_at[row]),
            drafted=int(self.drafted[row]),
            accepted=int(self.accepted[row]),
        )

    def restore(self, row: int, rollout: Rollout, state: State) -> None:
        """Fill a row from a rollout that was in flight when a checkpoint was made."""
        trained = rollout.versions[rollout.loss_mask]
        values = {
            "state": state,
            "group": rollout.group_id,
            "sample_index": rollout.sample_index,
            "visit": rollout.visit,
            "admitted_step": rollout.admitted_step,
            "key": rollout.key,
            "attempt": rollout.attempt,
            "length": len(rollout.token_ids),
            "turn": rollout.turn,
            "turn_start": rollout.turn_start,
            "first_version": trained.min() if trained.size else -1,
            "drafted": rollout.drafted,
            "accepted": rollout.accepted,
            "started_at": rollout.started_at,
            "finished_at": rollout.finished_at,
            "reward": rollout.reward,
            "finish_reason": rollout.finish_reason,
            "reward_status": rollout.reward_status,
            "reward_parts": rollout.reward_parts,
        }
        for name, value in values.items():
            getattr(self, name)[row] = value


class Tokens:
    """The tokens of one response with their log-probs; versions and loss mask as runs.

    Compact arrays that append in amortised O(1), because an engine step adds one token to each of many.
    """

    __slots__ = ("ids", "logprobs", "raw_logprobs", "runs")

    def __init__(self) -> None:
        self.ids = array("q")
        self.logprobs = array("d")
        self.raw_logprobs = array("d")
        self.runs: list[tuple[int, bool, int]] = []  # (version, trained, number of tokens)

    @classmethod
    def of(cls, rollout: Rollout) -> Tokens:
        """The tokens of a rollout that was kept."""
        tokens = cls()
        tokens.ids.extend(rollout.token_ids.tolist())
        tokens.logprobs.extend(rollout.logprobs.tolist())
        tokens.raw_logprobs.extend(rollout.raw_logprobs.tolist())
        for version, trained in zip(rollout.versions.tolist(), rollout.loss_mask.tolist(), strict=True):
            tokens._add_run(version, trained, 1)
        return tokens

    def extend(
        self, ids: Sequence[int], logprobs: Sequence[float], raw_logprobs: Sequence[float], version: int
    ) -> None:
        """Append sampled tokens."""
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.raw_logprobs.extend(raw_logprobs)
        self._add_run(version, True, len(ids))

    def observe(self, ids: Sequence[int]) -> None:
        """Append the environment's tokens: loss mask 0, log-probs 0, the version of the turn before them."""
        zeros = [0.0] * len(ids)
        self.ids.extend(ids)
        self.logprobs.extend(zeros)
        self.raw_logprobs.extend(zeros)
        self._add_run(self.runs[-1][0] if self.runs else -1, False, len(ids))

    def _add_run(self, version: int, trained: bool, count: int) -> None:
        if self.runs and self.runs[-1][:2] == (version, trained):
            count += self.runs.pop()[2]
        self.runs.append((version, trained, count))

    def token_ids(self) -> IntArray:
        """(N,) int64."""
        return np.array(self.ids, np.int64)

    def arrays(self) -> tuple[IntArray, FloatArray, FloatArray, IntArray, BoolArray]:
        """Token ids, log-probs, raw log-probs, versions, loss mask; each (N,)."""
        counts = [count for _, _, count in self.runs]
        versions = np.repeat(np.array([v for v, _, _ in self.runs], np.int64), counts)
        mask = np.repeat(np.array([t for _, t, _ in self.runs], np.bool_), counts)
        return self.token_ids(), np.array(self.logprobs), np.array(self.raw_logprobs), versions, mask
