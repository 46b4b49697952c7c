"""Reasoning traces for Knights and Knaves, as two kinds of writers would write them.

The *careful* writer tries one assignment after another, `+` for a knight and `-` for a knave, checks
people's claims against it, and answers only when all of them fit, so he is always right. The *hasty* writer
answers with the first assignment that comes to his mind and checks nothing: his answers are short and
mostly wrong. The first word says who is writing:

     careful knights try Ann+ Bo+ Ann+ Bo+ knave false try Ann- Bo+ Ann- Bo+ knave false Bo+ Ann- ...
     hasty knights try Ann+ Bo+ answer Ann knight Bo knight

A try names everybody once. A check names the speaker, then the people that he speaks of, each with the
kind that the try gives them, then the claim's last word, then whether the claim is true. A true claim
of a knave or a false one of a knight refutes the try. Tries count in binary with the first person changing
fastest, from all knights (or, less often, from all knaves): a person changes when everybody before him in
the new try is back at the first kind. So after the first two words every token follows from a few others, most
of them close by: that is what a tiny model can learn. (Without the claim's last word it learns the verdicts several
times slower; free choices of words in every try would only hide from reinforcement learning what pays.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

from stretto.tasks.knights import KINDS, Puzzle

Writer = Literal["careful", "hasty"]

KNIGHTS_FIRST_SHARE = 0.8


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
        words += ["try", *(mark(puzzle, person, kinds) for person in range(people))]
        if writer == "hasty" or all(check(puzzle, speaker, kinds, words) for speaker in range(people)):
            words.append("answer")
            for name, kind in zip(puzzle.names, kinds, strict=True):
                words += [name, KINDS[kind]]
            return "".join(f" {word}" for word in words)
    raise ValueError(f"no assignment passes the checks: {puzzle.prompt}")


def check(puzzle: Puzzle, speaker: int, kinds: tuple[bool, ...], words: list[str]) -> bool:
    """Append the check of one claim to `words`; whether it passed."""
    claim = puzzle.claims[speaker]
    about = [claim.first] if claim.second is None else [claim.first, claim.second]
    words += [mark(puzzle, person, kinds) for person in (speaker, *about)]
    true = claim.holds(kinds)
    words += [claim.render(puzzle.names).split()[-1], "true" if true else "false"]
    return true == kinds[speaker]
