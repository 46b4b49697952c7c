from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.simulated import SimulatedEngine
from stretto.records import Admit, Admitted, Event, Harvest, Publish, Request, Start, Stop
from tests.schedule.runs import any_world, by_order, check_consumed, decisions, of, resumed, tokens, updates
from tests.world import World, long_tailed


@settings(max_examples=20)
@given(seed=st.integers(0, 100_000))
def test_every_response_is_consumed_once_and_not_too_old(seed: int) -> None:
    world = any_world("concurrency", seed)
    world.run(4)
    check_consumed(world)


def test_state_machine_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool of 3, groups of one: 0 and 2 end first; 1 and 3 go on after the update, before 4 begins."""
    config = of("concurrency", prompts=2, samples=1, concurrency=3, max_staleness=None)
    world = World(config, length=by_order([4, 30, 9, 25, 25, 25]), slots=8, reward_seconds=0)
    made = decisions(world)
    resumed_with: list[tuple[int, int]] = []
    submit = SimulatedEngine.submit

    def note(engine: SimulatedEngine, requests: list[Request]) -> None:
        resumed_with.extend((r.id, len(r.token_ids)) for r in requests)
        submit(engine, requests)

    monkeypatch.setattr(SimulatedEngine, "submit", note)
    world.run(1)
    assert made[:2] == [Admit(3, 1), Start([0, 1, 2], 0)]
    assert [d for d in made if isinstance(d, Admit)] == [Admit(3, 1), Admit(1, 1), Admit(1, 1)]
    stop = made.index(Stop([1, 3], keep=True))
    assert made[stop + 1 :] == [Harvest([0, 2])]
    assert world.controller.schedule.metrics() == {"schedule/carried_over": 2}
    del made[:], resumed_with[:]
    world.run(2)
    assert made[0] == Publish([0], "continue")
    (start,) = [d for d in made[:3] if isinstance(d, Start)]
    assert (sorted(start.ids[:2]), start.ids[2:]) == ([1, 3], [4])
    assert dict(resumed_with)[1] >= 9  # tokens kept
    assert world.ledger.counters["discarded_tokens"] == 0
    assert world.batches[1].staleness == [1, 1]


def test_the_pool_is_never_larger_and_always_full_while_generating() -> None:
    config = of("concurrency", prompts=3, samples=4, concurrency=10, max_staleness=2)
    world = World(config, length=long_tailed(1), workers=3, slots=6)
    running: list[int] = []
    decide = world.controller.schedule.decide

    def note(view, events):  # type: ignore[no-untyped-def]
        if not view.updating and set(view.loaded.values()) == {view.version} and len(view.slots) == 3:
            running.append(sum(view.num_running(w) for w in view.slots))
        return decide(view, events)

    world.controller.schedule.decide = note  # type: ignore[method-assign]
    world.run(20)
    assert max(running) == 10
    # Below it only at the events that are about to be answered, and when weights have just come.
    assert sum(n < 8 for n in running) < 0.1 * len(running)


def test_without_refilling_it_lets_in_new_prompts_at_updates_only() -> None:
    """APRIL: 6 prompts for an update of 4."""
    config = of("concurrency", prompts=4, samples=2, concurrency=12, refill=False, max_staleness=None)
    world = World(config, length=long_tailed(2), slots=16)
    seen: list[tuple[int, int]] = []
    apply = world.ledger.apply

    def note(events: list[Event]):  # type: ignore[no-untyped-def]
        seen.extend((world.ledger.version, e.count) for e in events if isinstance(e, Admitted))
        return apply(events)

    world.ledger.apply = note  # type: ignore[method-assign, assignment]
    world.run(12)
    versions = [version for version, _ in seen]
    assert versions == sorted(set(versions)), "once per update at most"
    assert seen[0] == (0, 12)
    assert all(count <= 12 for _, count in seen)
    assert {len(u) for u in updates(world)} == {8}


def test_what_was_begun_is_trained_on_in_full() -> None:
    config = of("concurrency", prompts=2, samples=3, max_staleness=None)
    world = World(config, length=long_tailed(3), slots=20).run(30)
    same = World(of("synchronous", prompts=2, samples=3), length=long_tailed(3)).run(30)
    ours, theirs = (tokens([r for u in updates(w) for r in u]) for w in (world, same))
    common = ours.keys() & theirs.keys()
    assert len(common) > 0.8 * len(theirs)
    assert all(ours[key] == theirs[key] for key in common)
    assert world.ledger.counters["refreshes"] == 0


@pytest.mark.parametrize("reward_seconds", [0.0, 5.0])
def test_on_policy_with_many_more_slots_than_an_update_takes(reward_seconds: float) -> None:
    """Nobody is let in while an update waits for a straggler: else ever more would end that no update can take."""
    config = of("concurrency", prompts=4, samples=1, max_staleness=0)
    world = World(config, length=long_tailed(1150), workers=3, slots=4, reward_seconds=reward_seconds)
    alive = []
    for steps in range(1, 30):
        world.run(steps)
        alive.append(world.ledger.alive)
    assert max(alive[15:]) <= max(alive[:15]) + 10
    assert world.ledger.counters["forced_refreshes"] > 0


@pytest.mark.parametrize("knobs", [{}, {"concurrency": 32}, {"unit": "response"}, {"max_staleness": 2}])
def test_late_rewards_do_not_let_in_ever_more(knobs: dict[str, Any]) -> None:
    """Rewards take 60 s, and a response 2 s: thousands would have ended before the first is answered."""
    config = of("concurrency", **{"prompts": 4, "samples": 4, "max_staleness": None, **knobs})
    world = World(config, length=long_tailed(6), slots=32, reward_seconds=60.0)
    most = 0
    apply = world.ledger.apply

    def note(events: list[Event]):  # type: ignore[no-untyped-def]
        nonlocal most
        ended = apply(events)
        most = max(most, world.ledger.alive - len(world.ledger.scored))
        return ended

    world.ledger.apply = note  # type: ignore[method-assign, assignment]
    world.run(8)
    assert 32 < most < 32 + 2 * 16  # what is scored may be refreshed


def test_zero_variance_groups_are_not_counted() -> None:
    config = of("concurrency", prompts=2, samples=2, max_staleness=0, drop_zero_variance=True)
    world = World(
        config,
        length=long_tailed(4),
        slots=6,
        reward_seconds=3.0,
        reward=lambda r: float(r.sample_index) if r.prompt.row % 3 else 1.0,
    ).run(6)
    assert {r.prompt.row % 3 for b in world.batches for r in b.rollouts} == {1, 2}
    assert [len(b.rollouts) for b in world.batches] == [4] * 6


def test_goes_on_after_a_resume() -> None:
    config = of("concurrency", prompts=2, samples=2, max_staleness=2)
    before, after = resumed(config, 4, 8, length=long_tailed(2), workers=2, slots=3)
    ids = [r.request_id for w in (before, after) for b in w.batches for r in b.rollouts]
    assert len(ids) == len(set(ids)) == 8 * 4
