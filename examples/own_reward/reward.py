"""A reward of one's own, in TRL's form: lists come in, one number for each completion goes out."""

from __future__ import annotations


def brief(completions: list[str], answer: list[str], **columns: list[object]) -> list[float]:
    """1 for a right answer, less up to a half for the words before it; 0 for a wrong one."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        reasoning, _, given = completion.rpartition("answer")
        right = given.split() == expected.split()
        rewards.append(1.0 - min(len(reasoning.split()) / 400, 0.5) if right else 0.0)
    return rewards
