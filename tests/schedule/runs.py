"""Runs of any schedule in the simulated world, and what must be true of all of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from stretto.config import ScheduleConfig
from stretto.config.checks import USED_BY
from stretto.config.schedules import Kind
from stretto.records import Decision, Event, Request, Rollout, State, WorkerDown
from stretto.schedule import ledger_options
from stretto.view import LedgerView
from tests.world import Rows, World, long_tailed


def of(kind: Kind, **knobs: Any) -> ScheduleConfig:
    """A configuration without the knobs that the kind has not."""
    return ScheduleConfig(
        kind=kind, **{key: value for key, value in knobs.items() if kind in USED_BY.get(key, (kind,))}
    )


def decisions(world: World) -> list[Decision]:
    """A list that fills with everything the world's schedule decides."""
    made: list[Decision] = []
    decide = world.controller.schedule.decide

    def note(view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        new = decide(view, events)
        made.extend(copy.copy(d) for d in new)
        return new

    world.controller.schedule.decide = note  # type: ignore[method-assign]
    return made


def updates(world: World) -> list[list[Rollout]]:
    """What each update was made of, its parts together."""
    found: dict[int, list[Rollout]] = {}
    for batch in world.batches:
        found.setdefault(batch.version, []).extend(batch.rollouts)
    assert sorted(found) == list(range(len(found)))
    return [found[version] for version in sorted(found)]


def tokens(rollouts: Sequence[Rollout]) -> dict[tuple[str, int, int], int]:
    """Length by prompt, visit, sample: in this world all of a response that its key determines."""
    return {(r.prompt.uid, r.visit, r.sample_index): r.token_ids.size for r in rollouts}


def by_order(lengths: Sequence[int]) -> Callable[[Request], int]:
    """Request i has the i-th of these lengths, again and again."""
    return lambda request: lengths[request.id % len(lengths)]


def check_consumed(world: Checked) -> None:
    """Each response at most once, whole updates, none too old."""
    config = world.config
    every = [r for batch in world.batches for r in batch.rollouts]
    assert len({r.request_id for r in every}) == len(every)
    assert all(r.outcome == State.CONSUMED for r in every)
    parts = [b.version for b in world.batches if b.final]
    assert parts == sorted(set(parts)), "one final part each"
    sizes = {len(update) for update in updates(world)}
    if config.tokens_per_update is None and config.off_policy_strategy != "drop":
        assert sizes == {config.prompts * config.samples}
    bound = ledger_options(config)["max_staleness"]
    assert bound is None or max(s for b in world.batches for s in b.staleness) <= bound
    assert all(r.token_ids.size == min(world.length_of(r), 300) for r in every)


class Checked(World):
    """A world that remembers its configuration and how long each response is to be; nobody starts without a slot."""

    def __init__(self, config: ScheduleConfig, *, length: Callable[[Request], int], **world: Any) -> None:
        self.config = config
        self._lengths: dict[int, int] = {}

        def noted(request: Request) -> int:
            found = length(request)
            assert self._lengths.setdefault(request.key, found) == found
            return found

        super().__init__(config, length=noted, max_new_tokens=300, **world)
        start = self.ledger.start

        def start_in_slots(ids: Sequence[int], worker: int, max_new: int | None = None) -> list[Request]:
            requests = start(ids, worker, max_new)
            assert len(self.ledger.running[worker]) <= self.ledger.slots[worker]
            return requests

        self.ledger.start = start_in_slots  # type: ignore[method-assign]

    def length_of(self, rollout: Rollout) -> int:
        return self._lengths[rollout.key]


def any_world(kind: Kind, seed: int) -> Checked:
    """A world with knobs, workers and sometimes a worker's loss drawn from `seed`."""
    draw = random.Random(seed)
    samples = draw.randint(1, 4)
    unit = draw.choice(["group", "response"])
    config = of(
        kind,
        prompts=draw.randint(1, 5),
        samples=samples,
        unit=unit,
        max_staleness=draw.choice([0, 0, 1, 2, None]),
        off_policy_strategy=draw.choice(["refresh", "refresh", "wait", "drop"]),
        refresh_budget=draw.choice([None, 0, 1]),
        running=draw.choice(["continue", "recompute"]),
        load_prompts=draw.randint(1, 4),
        tokens_per_update=draw.choice([None, None, draw.randint(1, 300)]),
        concurrency=draw.choice([None, draw.randint(1, 40)]),
        refill=draw.random() < 0.6,
        long_share=draw.choice([0.2, 0.5]),
        long_workers=draw.choice([None, 1, 2]),
        max_prompts_ratio=draw.choice([1.0, 1.25, 2.0]),
        max_num_return_sequences=draw.choice([None, 6]),
    )
    if config.unit == "group" and samples > 1 and draw.random() < 0.3:
        config = config.model_copy(update={"drop_zero_variance": True})
    workers = draw.randint(1, 3)
    world = Checked(
        config,
        length=long_tailed(seed, cap=400),
        workers=workers,
        slots=draw.randint(1, 6),
        reward_seconds=draw.choice([0.0, 0.3, 5.0]),
        rows=16,
    )
    if workers > 1 and draw.random() < 0.5:
        world.runtime.post(WorkerDown(1), delay=draw.uniform(0.1, 5.0))
    return world


def rows(world: World) -> Rows:
    assert isinstance(world.controller.prompts, Rows)
    return world.controller.prompts


def resumed(config: ScheduleConfig, at: int, steps: int, **world: Any) -> tuple[World, World]:
    """A run of `at` updates, and another that goes on from its last boundary to `steps`."""
    before, after = World(config, **world), World(config, **world)
    saved: list[Any] = []
    updated = before.updated

    def save(event: Any) -> None:
        updated(event)
        if event.version == at:
            schedule = before.controller.schedule.state_dict()
            ledger = before.ledger
            saved.extend([ledger.state_dict(), ledger.in_flight(), schedule, rows(before).taken])

    before.updated = save  # type: ignore[method-assign]
    before.run(at)
    state, in_flight, schedule, taken = saved
    unanswered = after.ledger.load_state_dict(state, in_flight)
    after.controller.schedule.load_state_dict(schedule)
    rows(after).taken = taken
    after.version = at
    for engine in after.engines:
        engine.version = at
    after.submit(unanswered)
    return before, after.run(steps)
