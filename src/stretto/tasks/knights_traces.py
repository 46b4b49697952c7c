"""Reasoning traces for Knights and Knaves, as two kinds of writers would write them.

Both writers try one assignment after another, `+` for a knight and `-` for a knave, and check claims
against it. The *careful* writer checks every person's claim and answers only when all of them fit, so
he is always right. The *hasty* writer checks the first person's claim only and answers with the first
assignment that passes: his answers are short and mostly wrong. The first word says who is writing:

     careful knights try Ann+ Bo+ : Ann+ Bo+ no try Ann- Bo+ : Ann- Bo+ ok Bo+ Ann- Bo+ no ...
     hasty knights try Ann+ Bo+ : Ann+ Bo+ no try Ann- Bo+ : Ann- Bo+ ok answer Ann knave Bo knight

A check names the speaker, then the people that he speaks of, each with the kind that the try gives
them, then the verdict: `ok` if the claim is true and the speaker a knight or if neither, else `no` or
`wrong`. Tries count in binary with the first person changing fastest, from all knights (or, less often,
from all knaves): a person changes when everybody before him in the new try is back at the first kind.
So every token follows from a few earlier ones, which is what a tiny model can learn.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

from stretto.tasks.knights import KINDS, Puzzle

Writer = Literal["careful", "hasty"]

KNIGHTS_FIRST_SHARE = 0.8
WRONG_SHARE = 0.15  # of the rejections written `wrong` instead of `no`: the traces' only free choice of words


def tries(people: int, first: bool) -> Iterator[tuple[bool, ...]]:
    """All assignments in the writers' order, starting with everybody of kind `first`."""
    for kinds in itertools.product((first, not first), repeat=people):
        yield kinds[::-1]


def mark(puzzle: Puzzle, person: int, kinds: tuple[bool, ...]) -> str:
    return puzzle.names[person] + ("+" if kinds[person] else "-")


def write_trace(puzzle: Puzzle, writer: Writer, rng: random.Random) -> str:
    """One response, with the leading space that separates it from the prompt and without end-of-sequence."""
    people = len(puzzle.names)
    first = rng.random() < KNIGHTS_FIRST_SHARE
    words = [writer, f"{KINDS[first]}s"]
    for kinds in tries(people, first):
        words += ["try", *(mark(puzzle, person, kinds) for person in range(people)), ":"]
        checked = range(people if writer == "careful" else 1)
        if all(check(puzzle, speaker, kinds, words, rng) for speaker in checked):
            words.append("answer")
            for name, kind in zip(puzzle.names, kinds, strict=True):
                words += [name, KINDS[kind]]
            return "".join(f" {word}" for word in words)
    raise ValueError(f"no assignment passes the checks: {puzzle.prompt}")


def check(
    puzzle: Puzzle, speaker: int, kinds: tuple[bool, ...], words: list[str], rng: random.Random
) -> bool:
    """Append the check of one claim to `words`; whether it passed."""
    claim = puzzle.claims[speaker]
    about = [claim.first] if claim.second is None else [claim.first, claim.second]
    words += [mark(puzzle, person, kinds) for person in (speaker, *about)]
    passed = claim.holds(kinds) == kinds[speaker]
    words.append("ok" if passed else "wrong" if rng.random() < WRONG_SHARE else "no")
    return passed
