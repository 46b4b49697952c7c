"""What a trainer's reward functions say, overheard: their values go to the history, and pass unchanged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
from torch import nn

from stretto.errors import StrettoError
from stretto.records import Rollout


class RewardWatch:
    """Keeps what the watched functions say about the completions that are expected to be graded next."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # of the functions, by their place in the trainer's list
        self._values: dict[int, Any] = {}
        self._expected = 0  # completions; 0: what is graded now is not for the history
        self._complete: Callable[[], None] = _nothing

    @property
    def watches(self) -> bool:
        """Whether there are any functions."""
        return bool(self._names)

    def wrap(self, reward_funcs: Any) -> Any:
        """What `HistoryRollout.rewards` returns."""
        if self._names:
            raise StrettoError(
                "HistoryRollout.rewards was called before: give it all reward functions together"
            )
        several = isinstance(reward_funcs, list)
        functions = reward_funcs if several else [reward_funcs]
        for func in functions:
            if not (callable(func) or isinstance(func, str)):
                raise StrettoError(
                    f"HistoryRollout.rewards: {type(func).__name__} is no reward function; give it one, or a list of "
                    "them, as GRPOTrainer takes them"
                )
        watched = [self._watched(i, func) for i, func in enumerate(functions)]
        if not self._names:
            raise StrettoError(
                "HistoryRollout.rewards: none of these is a function that could be listened to"
            )
        return watched if several else watched[0]

    def expect(self, completions: int, complete: Callable[[], None]) -> None:
        """So many are graded next; `complete` is called when all functions have. 0: others, not to be noted."""
        self._values, self._expected, self._complete = {}, completions, complete

    def give(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> None:
        """Set the rewards of the completions that were expected: the weighted sum of what was said about each."""
        for index, values in sorted(self._values.items()):
            for rollout, value in zip(rollouts, values, strict=True):
                if value is None or not np.isfinite(value):
                    continue
                before = 0.0 if np.isnan(rollout.reward) else rollout.reward
                rollout.reward = before + weights[index] * float(value)
                rollout.reward_parts = {**rollout.reward_parts, self._names[index]: float(value)}
        self.expect(0, _nothing)

    def _watched(self, index: int, func: Any) -> Any:
        if isinstance(func, (str, nn.Module)):
            return func
        inner = func
        while isinstance(inner, functools.partial):
            inner = inner.func
        self._names[index] = name = getattr(inner, "__name__", type(inner).__name__)

        async def awaited(*args: Any, **columns: Any) -> Any:
            return self._noted(index, await func(*args, **columns))

        def called(*args: Any, **columns: Any) -> Any:
            return self._noted(index, func(*args, **columns))

        # As TRL finds out whether it has to await what a function returns.
        waits = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__)
        reward: Any = awaited if waits else called
        reward.__name__ = reward.__qualname__ = name
        return reward

    def _noted(self, index: int, values: Any) -> Any:
        """What a function returned; that it is no list of so many rewards, the trainer says in its own words."""
        if isinstance(values, Iterator):  # which can be gone through once
            values = list(values)
        if isinstance(values, Sized) and len(values) == self._expected:
            self._values[index] = values
            if len(self._values) == len(self._names):
                self._complete()
        return values


def _nothing() -> None:
    """Nobody waits for this."""
