"""Worlds whose workers come and go."""

from __future__ import annotations

import random
from typing import Any

from stretto.fleet.simulated import SimulatedFleet
from tests.schedule.runs import Checked
from tests.world import World


def come_and_go(world: World, seed: int, seconds: float = 100.0) -> World:
    """Half of the workers come late, half go down at some time and come back."""
    draw = random.Random(seed)
    arrivals: list[tuple[float, int]] = []
    failures: list[tuple[float, int]] = []
    for worker in range(len(world.engines)):
        when = draw.uniform(0.0, seconds)
        if draw.random() < 0.5:
            arrivals.append((0.1 * when, worker))
        if draw.random() < 0.5:
            failures.append((when, worker))
            arrivals.append((when + draw.uniform(0.0, 0.5 * seconds), worker))
    world.controller.fleet = SimulatedFleet(
        world.runtime,
        world.engines,
        arrivals=arrivals,
        failures=failures,
        report_seconds=draw.choice([None, 0.5]),
    )
    return world


def bounded(world: World, batches: int = 30_000) -> World:
    """Fails where events go on without an end."""
    apply, seen = world.ledger.apply, [0]

    def counted(events: Any) -> Any:
        seen[0] += 1
        assert seen[0] < batches, "there is no end to it"
        return apply(events)

    world.ledger.apply = counted  # type: ignore[method-assign]
    return world


def check_ended(world: Checked, bound: int | None) -> None:
    """What was consumed was whole, once, its own length, and not too old."""
    every = [r for batch in world.batches for r in batch.rollouts]
    assert len({r.request_id for r in every}) == len(every)
    assert [b.version for b in world.batches if b.final] == list(range(sum(b.final for b in world.batches)))
    length = world.ledger.view.length
    assert all(length(r.request_id) == min(world.length_of(r), 300) for r in every)
    assert bound is None or max(s for b in world.batches for s in b.staleness) <= bound


def idle(world: World) -> float:
    """Slot idle ratio of the whole run."""
    figures = [engine.metrics() for engine in world.engines]
    busy, available = (
        sum(f[name] for f in figures) for name in ("busy_slot_seconds", "available_slot_seconds")
    )
    return 1.0 - busy / available
