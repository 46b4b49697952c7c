"""What the configuration says of a schedule without having it: whether it overlaps, and what depends on timing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

import pytest

from stretto.config.checks import overlaps, timing
from stretto.config.schedules import Kind
from stretto.records import Decision, Event, Harvest, Rollout, Scored, Start, Updated
from stretto.schedule import make_schedule
from stretto.view import LedgerView
from tests.schedule.runs import of
from tests.world import World, long_tailed

KINDS = get_args(Kind)


@pytest.mark.parametrize("max_staleness", [0, 1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_it_says_of_every_schedule_whether_it_overlaps(kind: Kind, max_staleness: int | None) -> None:
    config = of(kind, max_staleness=max_staleness)
    assert overlaps(config) == make_schedule(config).overlaps


class Graded(World):
    """Rewards take their time, each its own."""

    draw = random.Random(0)

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            scored = Scored(rollout.request_id, rollout.attempt, float(rollout.key % 3))
            self.runtime.post(scored, self.draw.expovariate(0.2))


Seen = list[tuple[float, Decision]]


def run(kind: Kind, seed: int, max_staleness: int, drop: bool) -> Seen:
    """What is started and harvested, and when: in seconds of the engine's since the update before."""
    config = of(
        kind, prompts=4, samples=2, max_staleness=max_staleness, drop_zero_variance=drop, chunk_size=20
    )
    world = Graded(config, length=long_tailed(5, cap=200), slots=4, rows=32, checked=False)
    world.draw = random.Random(seed)
    seen: Seen = []
    updated = 0.0
    decide = world.controller.schedule.decide

    def note(view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        nonlocal updated
        updated = view.now if any(isinstance(e, Updated) for e in events) else updated
        made = decide(view, events)
        for d in made:
            if isinstance(d, Start):
                seen.append((round(view.now - updated, 9), Start(list(d.ids), d.worker)))
            if isinstance(d, Harvest):  # it waits for rewards; the ledger sorts what one update takes
                seen.append((0.0, Harvest(sorted(d.ids), d.final)))
        return made

    world.controller.schedule.decide = note  # type: ignore[method-assign]
    world.run(4)
    return seen


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_repeated_where_nothing_is_said_to_depend_on_timing(
    kind: Kind, max_staleness: int, drop: bool
) -> None:
    """With one engine in this process, where rewards are what takes another time each time."""
    runs = [run(kind, seed, max_staleness, drop) for seed in range(4)]
    repeated = all(seen == runs[0] for seen in runs)
    config = of(kind, max_staleness=max_staleness, drop_zero_variance=drop)
    assert repeated == (not timing(config, processes=False))
