"""A reward for real runs, in a module that loads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vowels(completion: str, row: Mapping[str, Any]) -> float:
    """Differs between any two responses, however short."""
    return sum(completion.count(vowel) for vowel in "aeiou") / (1 + len(completion))
