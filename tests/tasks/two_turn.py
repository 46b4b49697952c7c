"""A task of two turns: guess a number, read the hint, guess again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class TwoTurn:
    """The row's `number` is to be guessed; after the first turn the environment says which way it lies.

    Worth 1 if the last number written is right, 0.5 if only the first turn's was, else 0.
    """

    HINTS = (" higher ", " lower ", " right ")

    def __init__(self, size: int = 4) -> None:
        self.size = size

    def rows(self, split: str) -> list[dict[str, Any]]:
        offset = {"train": 0, "test": self.size}[split]
        return [{"prompt": f"guess {i + offset}", "number": i % 10} for i in range(self.size)]

    def observe(self, completion: str, row: Mapping[str, Any], turn: int) -> str | None:
        if turn > 0:
            return None
        guesses = re.findall(r"\d", completion)
        guess = int(guesses[-1]) if guesses else -1
        return self.HINTS[2 if guess == row["number"] else int(guess > row["number"])]

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        hint = next((hint for hint in self.HINTS if hint in completion), None)
        if hint is None:
            return 0.0
        first, second = completion.split(hint, 1)
        right = str(row["number"])
        return 1.0 if second.strip().endswith(right) else 0.5 if first.strip().endswith(right) else 0.0
