"""Knights and Knaves: a generator and a verifier.

On an island every inhabitant is a knight, whose claims are all true, or a knave, whose claims are all
false. Each of `n` people makes one claim about the others (or about himself and another); the claims
admit exactly one assignment of kinds, and that assignment is the answer. A prompt reads

    Puzzle : Ann says Bo is a knave . Bo says Ann and Bo are alike . Solution :

and a completion is right when it ends in `answer Ann knight Bo knave` with every person named once.

Most puzzles have two or three people and a few have five. A solver that tries assignments one by one
needs up to `2**n` tries, so the lengths of its answers have the long tail that reasoning models show.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["is", "alike", "different", "both", "either"]
Split = Literal["train", "test"]

NAMES = ("Ann", "Bo", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal")
KINDS = ("knave", "knight")  # indexed by a truth value: True is a knight
PEOPLE_WEIGHTS: Mapping[int, float] = {2: 0.38, 3: 0.35, 4: 0.20, 5: 0.07}
PAIR_FORMS: tuple[Form, ...] = ("alike", "different", "both", "either")
SINGLE_SHARE = 0.4  # of the claims that speak about one person only
TEST_SHARE = 4  # one puzzle in this many belongs to the test split
GOLDEN = 0.6180339887498949

ANSWER = re.compile(r"(?:^|\s)answer((?:\s+[A-Z][a-z]*\s+(?:knight|knave))+)\s*$")


@dataclass(frozen=True)
class Claim:
    """What one person says. `first` and `second` are indices of people; `second` is None for form `is`."""

    form: Form
    first: int
    second: int | None
    knight: bool  # the kind that the claim speaks of; unused by `alike` and `different`

    def holds(self, kinds: Sequence[bool]) -> bool:
        """Whether the claim is true when person `i` is a knight exactly if `kinds[i]`."""
        if self.second is None:
            return kinds[self.first] == self.knight
        first, second = kinds[self.first], kinds[self.second]
        if self.form == "alike":
            return first == second
        if self.form == "different":
            return first != second
        if self.form == "both":
            return first == self.knight and second == self.knight
        return first == self.knight or second == self.knight

    def render(self, names: Sequence[str]) -> str:
        kind = KINDS[self.knight]
        if self.second is None:
            return f"{names[self.first]} is a {kind}"
        first, second = names[self.first], names[self.second]
        if self.form == "both":
            return f"{first} and {second} are {kind}s"
        if self.form == "either":
            return f"{first} or {second} is a {kind}"
        return f"{first} and {second} are {self.form}"


@dataclass(frozen=True)
class Puzzle:
    """Person `i` is called `names[i]`, makes `claims[i]` and is a knight exactly if `solution[i]`."""

    names: tuple[str, ...]
    claims: tuple[Claim, ...]
    solution: tuple[bool, ...]

    @property
    def prompt(self) -> str:
        pairs = zip(self.names, self.claims, strict=True)
        said = (f"{name} says {claim.render(self.names)} ." for name, claim in pairs)
        return f"Puzzle : {' '.join(said)} Solution :"

    @property
    def answer(self) -> str:
        return " ".join(f"{name} {KINDS[kind]}" for name, kind in zip(self.names, self.solution, strict=True))

    @property
    def split(self) -> Split:
        """The split that owns this puzzle, whatever seed drew it: so no two splits can ever share one."""
        digest = hashlib.sha256(self.prompt.encode()).digest()
        return "test" if digest[0] % TEST_SHARE == 0 else "train"


def consistent(claims: Sequence[Claim], kinds: Sequence[bool]) -> bool:
    """Whether knights speak the truth and knaves lie under `kinds`."""
    return all(claim.holds(kinds) == kind for claim, kind in zip(claims, kinds, strict=True))


def solutions(claims: Sequence[Claim]) -> list[tuple[bool, ...]]:
    """Every consistent assignment, by trying all `2**n`."""
    tries = itertools.product((False, True), repeat=len(claims))
    return [kinds for kinds in tries if consistent(claims, kinds)]


def draw_claim(rng: random.Random, speaker: int, people: int) -> Claim:
    """A claim of `speaker`. Nobody speaks of himself alone: that is either empty or a paradox."""
    if rng.random() < SINGLE_SHARE:
        other = rng.choice([person for person in range(people) if person != speaker])
        return Claim("is", other, None, rng.random() < 0.5)
    first, second = rng.sample(range(people), 2)
    return Claim(rng.choice(PAIR_FORMS), first, second, rng.random() < 0.5)


def draw_puzzle(rng: random.Random, people: int, split: Split) -> Puzzle:
    """The first puzzle from `rng` with one solution that belongs to `split`."""
    while True:
        names = tuple(rng.sample(NAMES, people))
        claims = tuple(draw_claim(rng, speaker, people) for speaker in range(people))
        found = solutions(claims)
        if len(found) == 1:
            puzzle = Puzzle(names, claims, found[0])
            if puzzle.split == split:
                return puzzle


def parse_answer(completion: str) -> dict[str, str] | None:
    """The kinds that a completion ends in, by name; None unless it states one answer, each person once."""
    match = ANSWER.search(completion)
    if match is None or len(re.findall(r"\banswer\b", completion)) != 1:
        return None
    words = match.group(1).split()
    kinds = dict(zip(words[::2], words[1::2], strict=True))
    return kinds if 2 * len(kinds) == len(words) else None


class KnightsAndKnaves:
    """A task: `rows(split)` gives prompts with their answers, `score` judges a completion.

    `size` and `test_size` are the numbers of rows of the two splits. Rows are a pure function of the
    arguments; the same seed gives the same rows, and row `i` does not depend on how many there are.
    """

    def __init__(
        self,
        *,
        size: int = 96,
        test_size: int = 400,
        seed: int = 0,
        people_weights: Mapping[int, float] = PEOPLE_WEIGHTS,
    ) -> None:
        most = len(NAMES)
        if not people_weights or not all(2 <= n <= most for n in people_weights):
            raise ValueError(f"people_weights: people must lie in 2..{most}, got {dict(people_weights)}")
        if min(people_weights.values()) < 0 or sum(people_weights.values()) <= 0:
            raise ValueError(f"people_weights: need weights >= 0, not all 0, got {dict(people_weights)}")
        self.sizes: dict[str, int] = {"train": size, "test": test_size}
        self.seed = seed
        self.people_weights = dict(sorted(people_weights.items()))

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The rows of "train" or "test": `prompt`, `answer`, `people`, all prompts different."""
        if split not in ("train", "test"):
            raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
        puzzles = self.puzzles("test" if split == "test" else "train", self.sizes[split])
        return [
            {"prompt": puzzle.prompt, "answer": puzzle.answer, "people": len(puzzle.names)}
            for puzzle in puzzles
        ]

    def puzzles(self, split: Split, count: int) -> list[Puzzle]:
        """The first `count` puzzles of a split, all different."""
        seen: set[str] = set()
        puzzles: list[Puzzle] = []
        for index in range(count):
            rng = random.Random(f"{self.seed}/{split}/{index}")
            people = self.people(index)
            puzzle = draw_puzzle(rng, people, split)
            while puzzle.prompt in seen:
                puzzle = draw_puzzle(rng, people, split)
            seen.add(puzzle.prompt)
            puzzles.append(puzzle)
        return puzzles

    def people(self, index: int) -> int:
        """How many people row `index` has: by the golden ratio, so that every stretch of rows has the mix."""
        position = (index + 1) * GOLDEN % 1.0 * sum(self.people_weights.values())
        for people, weight in self.people_weights.items():
            position -= weight
            if position < 0:
                return people
        return max(self.people_weights)

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """1.0 if the completion ends in exactly the row's answer (people in any order), else 0.0."""
        words = str(row["answer"]).split()
        expected = dict(zip(words[::2], words[1::2], strict=True))
        return float(parse_answer(completion) == expected)
