"""From a prompt's stored responses to its automaton, in a thread of its own, and what an occurrence weighs there.

An occurrence, a token of a stored response, weighs w * x:

    count        w = 1, x = 1
    reward       w = exp(clip(a, -2, 2)), a = (r - mean) / std over the rewards of the visit's responses, x = 1;
                 a = 0 where the std is 0 or the response has no finite reward
    recency      w = 0.5 ** (the prompt's stored visits that are newer), x = 1
    probability  w = 1, x = the token's behaviour probability; the mean is weight / count

RhymeRL (2508.18588) prefers branches by the rewards of their responses without saying how they are aggregated; the
exponential of the normalised reward keeps every weight positive, so negative rewards and groups that all failed need
no case of their own, and it is at most 7.4 times another's either way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Literal

import numpy as np

from stretto.history.automaton import TokenArray, WeightArray
from stretto.history.frozen import Frozen, freeze
from stretto.history.mixtures import ANYWHERE, LONGEST, Rows, join_rows
from stretto.records import FloatArray

Weight = Literal["count", "reward", "recency", "probability"]

LARGEST_ADVANTAGE = 2.0


@dataclass(frozen=True, slots=True)
class Text:
    """One stored response."""

    tokens: TokenArray
    probabilities: WeightArray | None  # of its tokens; only where they are the weight
    reward: float
    rows: Rows | None  # what its tokens were drawn from; only where alternatives are used

    @property
    def nbytes(self) -> int:
        kept = (self.tokens, self.probabilities, self.rows)
        return sum(array.nbytes for array in kept if array is not None)


Visits = list[tuple[int, list[Text]]]
"""Oldest first."""
Built = tuple[Frozen, float]
"""And the seconds it took."""
Jobs = SimpleQueue[tuple["Future[Built]", Callable[[], Built]] | None]


class Builder:
    """Builds automata one after the other, in a thread that begins with the first and ends with this object."""

    def __init__(self, weight: Weight, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._weight: Weight = weight
        self._clock = clock
        self._queue: Jobs | None = None

    def submit(self, visits: Visits) -> Future[Built]:
        """Have these visits' automaton built; they must not change any more. The future may be cancelled."""
        if self._queue is None:
            self._queue = SimpleQueue()
            Thread(target=_work, args=(self._queue,), name="history-index", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        future: Future[Built] = Future()
        self._queue.put((future, _job(self._weight, visits, self._clock)))
        return future

    def build(self, visits: Visits) -> Built:
        """Here and now."""
        return _build(self._weight, visits, self._clock)


def _job(weight: Weight, visits: Visits, clock: Callable[[], float]) -> Callable[[], Built]:
    return lambda: _build(weight, visits, clock)


def _work(jobs: Jobs) -> None:
    """The thread: knows the queue only, so that a builder that nobody uses any more can go."""
    while (job := jobs.get()) is not None:
        future, build = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(build())
        except Exception as error:  # noqa: BLE001 -- whoever asked learns of it from the future
            future.set_exception(error)


def _build(weight: Weight, visits: Visits, clock: Callable[[], float]) -> Built:
    started = clock()
    texts = [text for _, visit in visits for text in visit]
    tokens = np.concatenate([text.tokens for text in texts])
    offsets = np.cumsum([0, *(len(text.tokens) for text in texts)])
    rows = [text.rows for text in texts if text.rows is not None]
    frozen = freeze(tokens, offsets, _values(weight, visits), join_rows(rows) if rows else None)
    return frozen, clock() - started


def _values(weight: Weight, visits: Visits) -> FloatArray | None:
    """What each token of the visits' responses weighs, (N,); None if each weighs 1."""
    if weight == "count":
        return None
    texts = [text for _, visit in visits for text in visit]
    if weight == "probability":
        known = [text.probabilities for text in texts if text.probabilities is not None]
        return np.concatenate(known).astype(np.float64)
    if weight == "recency":
        each = [
            0.5**newer
            for newer, (_, kept) in zip(range(len(visits))[::-1], visits, strict=True)
            for _ in kept
        ]
    else:
        each = [w for _, kept in visits for w in reward_weights([t.reward for t in kept]).tolist()]
    return np.repeat(np.array(each), [len(text.tokens) for text in texts])


def reward_weights(rewards: Sequence[float]) -> FloatArray:
    """exp of the normalised reward, cut at +-2, of each response of a visit; (K,). 1 where there is none."""
    values = np.array(rewards, np.float64)
    finite = np.isfinite(values)
    advantages = np.zeros(len(values))
    if finite.any() and (std := values[finite].std()) > 0:
        advantages[finite] = (values[finite] - values[finite].mean()) / std
    return np.exp(np.clip(advantages, -LARGEST_ADVANTAGE, LARGEST_ADVANTAGE))


def largest_bytes(tokens: int, weight: Weight, mixed: bool) -> int:
    """What the automaton of so many tokens takes at most, in bytes; `mixed`: with rows.

    By the bounds on its states and edges, which texts stay below by a third and more.
    """
    states, edges = 2 * tokens + 1, 3 * tokens
    per_state = 16 + 4 * (weight != "count") + (4 + 6 * LONGEST) * mixed
    return states * per_state + 4 + edges * 8 + 6 * ANYWHERE * mixed
