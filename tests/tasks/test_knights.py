from __future__ import annotations

import itertools
import random

import pytest

from stretto.tasks.knights import NAMES, Claim, KnightsAndKnaves, Puzzle, parse_answer, solutions
from stretto.tasks.knights_traces import tries, write_trace


def some_puzzles(count: int, seed: int = 3) -> list[Puzzle]:
    return KnightsAndKnaves(seed=seed).puzzles("train", count)


def test_claims_mean_what_they_say() -> None:
    knight, knave = True, False
    assert Claim("is", 0, None, True).holds([knight, knave])
    assert not Claim("is", 1, None, True).holds([knight, knave])
    assert Claim("alike", 0, 1, True).holds([knave, knave])
    assert Claim("different", 0, 1, True).holds([knave, knight])
    assert Claim("both", 0, 1, False).holds([knave, knave])
    assert not Claim("both", 0, 1, True).holds([knave, knight])
    assert Claim("either", 0, 1, True).holds([knave, knight])
    assert not Claim("either", 0, 1, False).holds([knight, knight])


def test_prompt_and_answer_text() -> None:
    claims = (Claim("is", 1, None, False), Claim("either", 0, 1, True))
    puzzle = Puzzle(("Ann", "Bo"), claims, (False, True))
    assert puzzle.prompt == "Puzzle : Ann says Bo is a knave . Bo says Ann or Bo is a knight . Solution :"
    assert puzzle.answer == "Ann knave Bo knight"
    assert solutions(claims) == [(False, True)]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_puzzle_has_one_solution_by_brute_force(seed: int) -> None:
    for puzzle in some_puzzles(200, seed):
        people = len(puzzle.names)
        consistent = [
            kinds
            for kinds in itertools.product([True, False], repeat=people)
            if all(puzzle.claims[i].holds(kinds) == kinds[i] for i in range(people))
        ]
        assert consistent == [puzzle.solution]


def test_nobody_speaks_of_himself_alone() -> None:
    for puzzle in some_puzzles(200):
        for speaker, claim in enumerate(puzzle.claims):
            assert claim.second is not None or claim.first != speaker


def test_rows_are_deterministic_and_prefix_stable() -> None:
    rows = KnightsAndKnaves(size=50, seed=4).rows("train")
    assert rows == KnightsAndKnaves(size=50, seed=4).rows("train")
    assert rows[:20] == KnightsAndKnaves(size=20, seed=4).rows("train")
    assert rows != KnightsAndKnaves(size=50, seed=5).rows("train")
    assert len({row["prompt"] for row in rows}) == 50
    assert set(rows[0]) == {"prompt", "answer", "people"}


def test_splits_are_disjoint_over_all_seeds() -> None:
    train, test = set(), set()
    for seed in range(3):
        task = KnightsAndKnaves(size=300, test_size=300, seed=seed)
        train |= {row["prompt"] for row in task.rows("train")}
        test |= {row["prompt"] for row in task.rows("test")}
    assert len(train) > 800
    assert len(test) > 800
    assert not train & test


def test_every_stretch_of_rows_has_the_mix_of_people() -> None:
    task = KnightsAndKnaves(people_weights={2: 1.0, 3: 1.0, 5: 2.0})
    people = [task.people(index) for index in range(400)]
    for start in range(0, 400, 40):
        counts = [people[start : start + 40].count(n) for n in (2, 3, 5)]
        assert all(abs(count - share) <= 2 for count, share in zip(counts, (10, 10, 20), strict=True))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="people_weights"):
        KnightsAndKnaves(people_weights={1: 1.0})
    with pytest.raises(ValueError, match="people_weights"):
        KnightsAndKnaves(people_weights={2: 0.0})
    with pytest.raises(ValueError, match="people_weights"):
        KnightsAndKnaves(people_weights={len(NAMES) + 1: 1.0})
    with pytest.raises(ValueError, match="split"):
        KnightsAndKnaves().rows("validation")


def test_careful_traces_are_always_right_and_hasty_ones_sometimes() -> None:
    task = KnightsAndKnaves()
    rng = random.Random(0)
    scores: dict[str, list[float]] = {"careful": [], "hasty": []}
    for puzzle in some_puzzles(400):
        row = {"answer": puzzle.answer}
        scores["careful"].append(task.score(write_trace(puzzle, "careful", rng), row))
        scores["hasty"].append(task.score(write_trace(puzzle, "hasty", rng), row))
    assert min(scores["careful"]) == 1.0
    assert 0.05 < sum(scores["hasty"]) / 400 < 0.25


def test_tries_change_the_first_person_fastest() -> None:
    assert list(tries(2, True)) == [(True, True), (False, True), (True, False), (False, False)]
    assert list(tries(2, False))[:2] == [(False, False), (True, False)]
    assert len(set(tries(5, True))) == 32


def test_trace_text() -> None:
    claims = (Claim("is", 1, None, False), Claim("either", 0, 1, True))
    puzzle = Puzzle(("Ann", "Bo"), claims, (False, True))
    traces = {write_trace(puzzle, "careful", random.Random(seed)) for seed in range(50)}
    assert (
        " careful knights try Ann+ Bo+ Ann+ Bo+ knave false try Ann- Bo+ Ann- Bo+ knave false"
        " Bo+ Ann- Bo+ knight true answer Ann knave Bo knight"
    ) in traces
    assert {trace.split()[1] for trace in traces} == {"knights", "knaves"}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" answer Ann knave Bo knight", 1.0),
        ("answer Bo knight Ann knave \n", 1.0),
        (" careful try Ann- Bo+ answer Ann knave Bo knight", 1.0),
        (" answer Ann knight Bo knight", 0.0),
        (" answer Ann knave", 0.0),
        (" answer Ann knave Bo knight Cy knight", 0.0),
        (" answer Ann knave Bo knight Bo knight", 0.0),
        (" answer Ann knave Bo knight Ann knight", 0.0),
        (" answer Ann knave Bo knight answer Ann knave Bo knight", 0.0),
        (" answer Ann knight Bo knight answer Ann knave Bo knight", 0.0),
        (" answer Ann knave Bo knight try", 0.0),
        (" Ann knave Bo knight", 0.0),
        (" answer Ann- Bo+", 0.0),
        (" answer", 0.0),
        ("", 0.0),
    ],
)
def test_verifier_is_strict(completion: str, score: float) -> None:
    assert KnightsAndKnaves().score(completion, {"answer": "Ann knave Bo knight"}) == score


def test_parse_answer_rejects_a_person_named_twice() -> None:
    assert parse_answer("answer Ann knave Bo knight") == {"Ann": "knave", "Bo": "knight"}
    assert parse_answer("answer Ann knave Ann knave") is None
