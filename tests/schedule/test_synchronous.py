from __future__ import annotations

from typing import Any

import pytest

from stretto.config import ScheduleConfig
from stretto.records import Request, Rollout, State
from tests.world import World, long_tailed

ROWS = {0: 10, 1: 10, 2: 10, 3: 60}
"""Tokens of the responses to each row: the long one comes last."""


def config(**knobs: Any) -> ScheduleConfig:
    return ScheduleConfig(kind="synchronous", **{"prompts": 4, "samples": 2, **knobs})


def by_row(request: Request) -> int:
    return ROWS[request.group % 4]


def starts(world: World, steps: int) -> list[list[tuple[int, list[int]]]]:
    """For every update, the workers in order and the rows of the groups that each was given."""
    told: list[list[tuple[int, list[int]]]] = [[] for _ in range(steps)]
    start = world.ledger.start

    def spy(ids, worker, max_new=None):  # type: ignore[no-untyped-def]
        rows = dict.fromkeys(world.ledger.view.group_of(i) % 4 for i in ids)
        told[world.ledger.version].append((worker, list(rows)))
        return start(ids, worker, max_new)

    world.ledger.start = spy  # type: ignore[method-assign]
    world.run(steps)
    return told


def test_longest_first_starts_and_places_by_what_earlier_visits_were() -> None:
    first_come = World(config(), length=by_row, workers=2, slots=2, rows=4)
    longest = World(config(longest_first=True), length=by_row, workers=2, slots=2, rows=4)
    assert starts(first_come, 3) == [[(0, [0, 2]), (1, [1, 3])]] * 3
    before, *after = starts(longest, 3)
    assert before == [(0, [0, 2]), (1, [1, 3])]  # nothing is known yet
    for told in after:
        assert told[0] == (0, [3])  # alone: its 60 tokens are more than the other three have together
        assert sorted(told[1][1]) == [0, 1, 2]
    assert longest.runtime.now() < first_come.runtime.now()
    assert [[r.key for r in b.rollouts] for b in longest.batches] == [
        [r.key for r in b.rollouts] for b in first_come.batches
    ]


def test_groups_that_teach_nothing_are_given_up_and_their_places_filled() -> None:
    def reward(rollout: Rollout) -> float:
        return float(rollout.sample_index if rollout.prompt.row % 3 else 0)

    world = World(
        config(drop_zero_variance=True), length=long_tailed(3), workers=2, slots=4, rows=64, reward=reward
    ).run(6)
    for batch in world.batches:
        assert len(batch.rollouts) == 8
        assert {r.prompt.row % 3 for r in batch.rollouts} <= {1, 2}
        assert batch.staleness == [0] * 8
    columns = world.ledger.columns
    given_up = columns.state[: columns.size] == State.DISCARDED
    assert (columns.group[: columns.size][given_up] % 3 == 0).all()
    assert world.ledger.counters["discarded/zero_variance"] == int(given_up.sum())
    assert world.ledger.alive == 0
    assert int(given_up.sum()) + 6 * 8 == columns.size


def test_an_update_takes_in_prompts_until_it_has_its_tokens() -> None:
    world = World(config(tokens_per_update=100), length=lambda request: 10, rows=64).run(3)
    assert [len(b.rollouts) for b in world.batches] == [16] * 3  # 80 tokens were too few, 160 are enough
    tailed = World(config(tokens_per_update=600), length=long_tailed(5), rows=64).run(5)
    for batch in tailed.batches:
        tokens = [r.token_ids.size for r in batch.rollouts]
        assert sum(tokens) >= 600 > sum(tokens[:-8])
        assert batch.staleness == [0] * len(tokens)


@pytest.mark.parametrize("longest_first", [False, True])
def test_all_three_at_once(longest_first: bool) -> None:
    knobs = config(drop_zero_variance=True, tokens_per_update=300, longest_first=longest_first)
    world = World(
        knobs,
        length=long_tailed(8),
        workers=2,
        slots=4,
        rows=16,
        reward=lambda r: float(r.sample_index if r.prompt.row % 2 else 1),
    ).run(8)
    for batch in world.batches:
        assert sum(r.token_ids.size for r in batch.rollouts) >= 300
        assert all(r.prompt.row % 2 for r in batch.rollouts)
        assert batch.staleness == [0] * len(batch.rollouts)
    ended = sum(len(b.rollouts) for b in world.batches) + world.ledger.counters["discarded/zero_variance"]
    assert ended == world.ledger.columns.size
