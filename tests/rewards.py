"""Rewards for real runs, in a module that loads at once: each run's reward worker imports it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def vowels(completion: str, row: Mapping[str, Any]) -> float:
    """Differs between any two responses, however short."""
    return sum(completion.count(vowel) for vowel in "aeiou") / (1 + len(completion))


def later_is_better(completion: str, row: Mapping[str, Any]) -> float:
    return time.time()


def earlier_is_better(completion: str, row: Mapping[str, Any]) -> float:
    return -time.time()


def failing(completions: list[str], **columns: Any) -> list[float]:
    raise RuntimeError("no such luck")


def brief(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / (1 + len(completion)) for completion in completions]
