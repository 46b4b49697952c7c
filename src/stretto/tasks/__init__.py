"""Tasks: prompts in, scores out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

Row = Mapping[str, Any]
"""One data row: `prompt` (text or a list of chat messages) and whatever columns its reward needs."""


@runtime_checkable
class Task(Protocol):
    """What a task is: rows with a `prompt`, and a verifier.

    The task is pickled into the worker processes, where `score` (plain or async) and `observe` run.
    """

    def rows(self, split: str) -> Sequence[Row]:
        """The rows of "train" or "test", always the same ones in the same order; [] where there are none."""

    def score(self, completion: str, row: Row) -> float:
        """What `completion` is worth, usually 0 to 1."""


@runtime_checkable
class MultiTurnTask(Task, Protocol):
    """A task whose environment answers between the model's turns."""

    def observe(self, completion: str, row: Row, turn: int) -> str | None:
        """The environment's text after the model's `turn`-th turn (from 0), or None: the response is finished.

        `completion` is everything after the prompt so far, environment turns included.
        """
