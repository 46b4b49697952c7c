"""What the ledger keeps of each request: growable numpy columns, and the tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.alternatives import Alternatives
from stretto.records import (
    BoolArray,
    FinishReason,
    FloatArray,
    IntArray,
    Prompt,
    Rollout,
    State,
)

RESULTS = (
    "length",
    "turn",
    "turn_start",
    "first_version",
    "drafted",
    "accepted",
    "decode_steps",
    "finished_at",
    "reward",
    "finish_reason",
    "reward_status",
    "reward_parts",
)
"""Columns that say what was generated, and what it was worth."""

NO_IDS: IntArray = np.zeros(0, np.int64)


def unknown_ids(count: int) -> IntArray:
    """Token ids that nobody knows, (count,): a simulated engine goes on from their number."""
    return _NO_IDS_KNOWN[:count]


def is_unknown(ids: IntArray) -> bool:
    """Whether these are `unknown_ids`."""
    return ids.size > 0 and ids.strides == (0,)


def unknown_arrays(count: int, version: int) -> tuple[IntArray, FloatArray, FloatArray, IntArray, BoolArray]:
    """What `Tokens.arrays` gives, of as many tokens as nobody knows; read-only."""
    part = slice(count)
    logprobs = _NO_LOGPROBS_KNOWN[part]
    return _NO_IDS_KNOWN[part], logprobs, logprobs, _constant(version)[part], _ALL_TRAINED[part]


@lru_cache(maxsize=64)
def _constant(value: Any) -> npt.NDArray[Any]:
    """As many as one likes of one number, without the memory."""
    return np.broadcast_to(np.asarray(value), (1 << 40,))


_NO_IDS_KNOWN: IntArray = _constant(0)
_NO_LOGPROBS_KNOWN: FloatArray = np.broadcast_to(np.float64(0.0), (1 << 40,))
_ALL_TRAINED: BoolArray = np.broadcast_to(np.bool_(True), (1 << 40,))
STATES = tuple(State)
"""By number: faster than `State(number)`."""
NOT_ENDED = FinishReason.NONE


class Cells:
    """The columns of numbers once more, for one value at a time: that takes a third of the time that an array takes."""

    group: memoryview[int]
    turn_start: memoryview[int]
    key: memoryview[int]
    reward: memoryview[float]
    state: memoryview[int]
    worker: memoryview[int]
    attempt: memoryview[int]
    started_at: memoryview[float]
    finished_at: memoryview[float]
    length: memoryview[int]
    first_version: memoryview[int]
    refreshes: memoryview[int]
    keep: memoryview[bool]
    refreshing: memoryview[bool]

    def look_at(self, table: npt.NDArray[Any]) -> None:
        """From now on be the columns of this table."""
        for name in self.__annotations__:
            setattr(self, name, memoryview(table[name]))  # type: ignore[arg-type]


class Columns:
    """One row per request. All arrays have the same capacity, of which the first `size` rows are in use.

    Those of numbers are the fields of one structured array, so that a whole row is read at once.
    """

    group: npt.NDArray[np.int64]
    sample_index: npt.NDArray[np.int32]
    visit: npt.NDArray[np.int32]
    key: npt.NDArray[np.uint64]
    turn_start: npt.NDArray[np.int32]
    turn: npt.NDArray[np.int32]
    reward: FloatArray
    reward_parts: npt.NDArray[Any]
    reward_status: npt.NDArray[Any]
    finish_reason: npt.NDArray[Any]
    state: npt.NDArray[np.int8]
    worker: npt.NDArray[np.int32]
    attempt: npt.NDArray[np.int32]
    admitted_step: npt.NDArray[np.int32]
    started_at: FloatArray
    finished_at: FloatArray
    drafted: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.int32]
    decode_steps: npt.NDArray[np.int32]
    discard_reason: npt.NDArray[Any]
    refreshes: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]  # tokens after the prompt
    first_version: npt.NDArray[np.int32]  # -1: no tokens
    keep: BoolArray  # whether its tokens are kept when its worker lets go of it
    refreshing: BoolArray  # running still, but what comes of it is not wanted

    # dtype, value of a new row; `rollouts` takes them in this order
    _kinds: Mapping[str, tuple[Any, Any]] = {
        "group": (np.int64, -1),
        "sample_index": (np.int32, 0),
        "visit": (np.int32, 0),
        "key": (np.uint64, 0),
        "turn_start": (np.int32, 0),
        "turn": (np.int32, 0),
        "reward": (np.float64, np.nan),
        "state": (np.int8, State.PENDING),
        "worker": (np.int32, -1),
        "attempt": (np.int32, 0),
        "admitted_step": (np.int32, 0),
        "started_at": (np.float64, np.nan),
        "finished_at": (np.float64, np.nan),
        "drafted": (np.int32, 0),
        "accepted": (np.int32, 0),
        "decode_steps": (np.int32, 0),
        "refreshes": (np.int32, 0),
        "length": (np.int32, 0),
        "first_version": (np.int32, -1),
        "keep": (np.bool_, True),
        "refreshing": (np.bool_, False),
        "reward_parts": (object, None),
        "reward_status": (object, None),
        "finish_reason": (object, None),
        "discard_reason": (object, None),
    }

    def __init__(self) -> None:
        self.size = 0
        self.cells = Cells()
        self._reserve(1024)

    def _reserve(self, capacity: int) -> None:
        numbers = [(name, dtype) for name, (dtype, _) in self._kinds.items() if dtype is not object]
        table = np.empty(capacity, np.dtype(numbers, align=True))
        for name, (dtype, value) in self._kinds.items():
            column = np.empty(capacity, object) if dtype is object else table[name]
            column[self.size :] = value
            if self.size:
                column[: self.size] = getattr(self, name)[: self.size]
            setattr(self, name, column)
        self._table = table
        self.cells.look_at(table)

    def grow(self, count: int) -> int:
        """Add `count` rows with default values; returns the first one's index."""
        first = self.size
        if first + count > len(self.state):
            self._reserve(max(2 * len(self.state), first + count))
        self.size += count
        return first

    def admit(self, group: int, visits: Sequence[int], samples: int, step: int, keys: Sequence[int]) -> int:
        """Add the groups from `group` on, `samples` rows with their keys each; returns the first row's index."""
        first, count = self.grow(len(keys)), len(visits)
        rows = slice(first, self.size)
        self.group[rows] = np.repeat(np.arange(group, group + count), samples)
        self.sample_index[rows] = np.tile(np.arange(samples), count)
        self.visit[rows] = np.repeat(np.asarray(visits, np.int32), samples)
        self.admitted_step[rows] = step
        self.key[rows] = np.array(keys, np.uint64)
        return first

    def clear(self, row: int) -> None:
        """Back to a row that has generated nothing."""
        for name in RESULTS:
            getattr(self, name)[row] = self._kinds[name][1]

    def rollouts(
        self,
        first_id: int,
        ids: Sequence[int],
        prompts: Mapping[int, Prompt],
        tokens: Mapping[int, Tokens],
        drafts: Mapping[int, IntArray],
    ) -> list[Rollout]:
        """The requests `ids` (n,), row 0 being `first_id`, with their tokens as records; `prompts` by group."""
        rows: Iterable[tuple[Any, ...]]
        if len(ids) == 1:  # much faster than indexing with an array
            at = ids[0] - first_id
            parts, status = self.reward_parts[at], self.reward_status[at]
            rows = [(*self._table.item(at), parts, status, self.finish_reason[at], self.discard_reason[at])]
        else:
            places = np.asarray(ids, np.int64) - first_id
            rows = zip(*[getattr(self, name)[places].tolist() for name in self._kinds], strict=True)
        found = []
        # fmt: off
        for request_id, (
            group, sample, visit, key, turn_start, turn, reward, state, worker, attempt, admitted, started_at,
            finished_at, drafted, accepted, steps, refreshes, length, version, _, _, parts, status, reason, why,
        ) in zip(ids, rows, strict=True):
            said = tokens.get(request_id)
            arrays = unknown_arrays(length, version) if said is None else said.arrays()
            token_ids, logprobs, raw_logprobs, versions, mask = arrays
            rollout = Rollout(  # by position, which takes a fifth of the time that names take
                request_id, group, prompts[group], sample, visit, key,
                token_ids, logprobs, raw_logprobs, versions, mask, turn_start, turn,
                reward, parts or {}, status or "ok", reason or NOT_ENDED, STATES[state],
                worker, attempt, admitted, started_at, finished_at, drafted, accepted, steps,
                said.top() if said is not None else None, why or "", refreshes, drafts.get(request_id, NO_IDS),
            )
            found.append(rollout)
        # fmt: on
        return found

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
            "refreshes": rollout.refreshes,
            "length": len(rollout.token_ids),
            "turn": rollout.turn,
            "turn_start": rollout.turn_start,
            "first_version": trained.min() if trained.size else -1,
            "drafted": rollout.drafted,
            "accepted": rollout.accepted,
            "decode_steps": rollout.decode_steps,
            "started_at": rollout.started_at,
            "finished_at": rollout.finished_at,
            "reward": rollout.reward,
            "finish_reason": rollout.finish_reason,
            "reward_status": rollout.reward_status,
            "reward_parts": rollout.reward_parts,
        }
        for name, value in values.items():
            getattr(self, name)[row] = value


class StepTokens:
    """The tokens of an engine's step in the form in which they are dealt out fastest: lists, and bytes."""

    __slots__ = ("ids", "logprobs", "raw_logprobs", "top", "top_ids", "top_logprobs", "version", "width")

    def __init__(
        self, ids: IntArray, logprobs: FloatArray, raw: FloatArray, version: int, top: Alternatives | None
    ) -> None:
        self.ids, self.logprobs, self.raw_logprobs = ids.tolist(), logprobs.tolist(), raw.tolist()
        self.version, self.top, self.width = version, top, 0
        if top is not None:
            self.width = top.width
            self.top_ids = memoryview(np.asarray(top.token_ids, np.int32).tobytes())
            self.top_logprobs = memoryview(np.asarray(top.logprobs, np.float32).tobytes())


class Tokens:
    """The tokens of one response with their log-probs; versions and loss mask as runs.

    Compact arrays that append in amortised O(1), because an engine step adds one token to each of many.
    """

    __slots__ = ("ids", "logprobs", "raw_logprobs", "runs", "top_ids", "top_logprobs", "width")

    def __init__(self) -> None:
        self.ids = array("q")
        self.logprobs = array("d")
        self.raw_logprobs = array("d")
        self.runs: list[
            tuple[int, bool, int]
        ] = []  # (version, trained, first token), to where the next begins
        self.width = 0  # alternatives of each token, which follow one another in
        self.top_ids = array("i")
        self.top_logprobs = array("f")

    @classmethod
    def of(cls, rollout: Rollout) -> Tokens:
        """The tokens of a rollout that was kept."""
        tokens = cls()
        tokens.ids.extend(rollout.token_ids.tolist())
        tokens.logprobs.extend(rollout.logprobs.tolist())
        tokens.raw_logprobs.extend(rollout.raw_logprobs.tolist())
        runs = zip(rollout.versions.tolist(), rollout.loss_mask.tolist(), strict=True)
        for place, (version, trained) in enumerate(runs):
            tokens._begin_run(version, trained, place)
        if rollout.top is not None:
            tokens.width = rollout.top.width
            tokens._add_top(rollout.top)
        return tokens

    def extend(self, step: StepTokens, start: int, stop: int) -> None:
        """Append the sampled tokens at these places of a step, and the alternatives to them."""
        if step.width and step.width == self.width:
            part = slice(4 * step.width * start, 4 * step.width * stop)
            self.top_ids.frombytes(step.top_ids[part])
            self.top_logprobs.frombytes(step.top_logprobs[part])
        elif step.width or self.width:
            self._add_top(step.top[start:stop] if step.top is not None else Alternatives.none(stop - start))
        runs, version = self.runs, step.version
        if not runs or runs[-1][0] != version or not runs[-1][1]:
            runs.append((version, True, len(self.ids)))
        if stop - start == 1:  # `extend` takes many times as long
            self.ids.append(step.ids[start])
            self.logprobs.append(step.logprobs[start])
            self.raw_logprobs.append(step.raw_logprobs[start])
        else:
            self.ids.extend(step.ids[start:stop])
            self.logprobs.extend(step.logprobs[start:stop])
            self.raw_logprobs.extend(step.raw_logprobs[start:stop])

    def observe(self, ids: Sequence[int]) -> None:
        """Append the environment's tokens: loss mask 0, log-probs 0, the version of the turn before them."""
        zeros = [0.0] * len(ids)
        self._add_top(Alternatives.none(len(ids)))
        self._begin_run(self.runs[-1][0] if self.runs else -1, False, len(self.ids))
        self.ids.extend(ids)
        self.logprobs.extend(zeros)
        self.raw_logprobs.extend(zeros)

    def _begin_run(self, version: int, trained: bool, place: int) -> None:
        """The tokens from this place on are of this kind, as those before perhaps are."""
        if not self.runs or self.runs[-1][:2] != (version, trained):
            self.runs.append((version, trained, place))

    def _add_top(self, top: Alternatives) -> None:
        """Append alternatives; call it before the tokens are."""
        if top.width > self.width:  # none were known so far, or fewer: the run was resumed with more
            before = self.top() or Alternatives.none(len(self.ids))
            self.width = top.width
            self.top_ids, self.top_logprobs = array("i"), array("f")
            self._add_top(before)
        if top.width < self.width:
            padded = Alternatives.none(len(top.token_ids), self.width)
            padded.token_ids[:, : top.width] = top.token_ids
            padded.logprobs[:, : top.width] = top.logprobs
            top = padded
        self.top_ids.frombytes(np.asarray(top.token_ids, np.int32).tobytes())
        self.top_logprobs.frombytes(np.asarray(top.logprobs, np.float32).tobytes())

    def top(self) -> Alternatives | None:
        """The alternatives at each token, where any are kept."""
        if not self.width:
            return None
        ids, logprobs = np.array(self.top_ids, np.int32), np.array(self.top_logprobs, np.float32)
        return Alternatives(ids.reshape(-1, self.width), logprobs.reshape(-1, self.width))

    def token_ids(self) -> IntArray:
        """(N,) int64."""
        return np.array(self.ids, np.int64)

    def arrays(self) -> tuple[IntArray, FloatArray, FloatArray, IntArray, BoolArray]:
        """Token ids, log-probs, raw log-probs, versions, loss mask; each (N,)."""
        counts = np.diff([*(first for _, _, first in self.runs), len(self.ids)])
        versions = np.repeat(np.array([v for v, _, _ in self.runs], np.int64), counts)
        mask = np.repeat(np.array([t for _, t, _ in self.runs], np.bool_), counts)
        return self.token_ids(), np.array(self.logprobs), np.array(self.raw_logprobs), versions, mask
