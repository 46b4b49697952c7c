from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.simulated import SimulatedEngine
from stretto.records import Admit, Discard, Harvest, Request, Start
from tests.schedule.runs import any_world, by_order, check_consumed, decisions, of, resumed, tokens, updates
from tests.world import World, long_tailed


@settings(max_examples=20)
@given(seed=st.integers(0, 100_000))
def test_every_response_is_consumed_once_and_on_policy(seed: int) -> None:
    world = any_world("tail_batching", seed)
    world.run(4)
    check_consumed(world)


def rounds(world: World, steps: int) -> list[dict[str, float]]:
    """What the schedule says of each round."""
    found: list[dict[str, float]] = []
    updated = world.updated

    def note(event: object) -> None:
        updated(event)  # type: ignore[arg-type]
        found.append(world.controller.schedule.metrics())

    world.updated = note  # type: ignore[method-assign]
    world.run(steps)
    return found


def test_short_and_long_round_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 of 3 prompts, 2 of 3 responses. Prompt 0 has a response that would take long, prompt 1 two of them."""
    lengths = [5, 90, 6, 80, 70, 7, 8, 9, 60]
    config = of("tail_batching", prompts=2, samples=2, max_prompts_ratio=1.5, max_num_return_sequences=3)
    world = World(config, length=by_order(lengths), slots=16, reward_seconds=0)
    made = decisions(world)
    drafts: dict[int, tuple[int, int]] = {}
    submit = SimulatedEngine.submit

    def note(engine: SimulatedEngine, requests: list[Request]) -> None:
        drafts.update({r.id: (len(r.token_ids), len(r.draft_ids)) for r in requests})
        submit(engine, requests)

    monkeypatch.setattr(SimulatedEngine, "submit", note)
    world.run(1)
    assert made == [
        Admit(3, 3),
        Start(list(range(9)), 0),
        Discard([1], "overlaunch"),  # 0 and 2 are the first two of prompt 0
        Discard([8], "overlaunch"),
        Discard([5], "overlaunch"),  # of prompt 1, left behind: the last one, though it alone has ended
        Harvest([0, 2, 6, 7]),
    ]
    assert world.controller.schedule.metrics() == {"schedule/long_round": 0, "schedule/long_prompts_left": 1}
    del made[:]
    world.run(2)  # the queue has one prompt: another short round
    assert made[1:3] == [Admit(3, 3), Start(list(range(9, 18)), 0)]
    del made[:]
    world.run(3)  # it has two: a long round of these
    assert [d for d in made if isinstance(d, Start)] == [Start([3, 4, 12, 13], 0)]
    assert not [d for d in made if isinstance(d, (Admit, Discard))]
    assert made[-1] == Harvest([3, 4, 12, 13])
    assert drafts[3][0] == 0
    assert drafts[3][1] >= 7
    assert [r.token_ids.size for r in updates(world)[2]] == [80, 70, 80, 70]


def test_four_short_rounds_and_a_long_one() -> None:
    world = World(of("tail_batching", prompts=8, samples=4), length=long_tailed(1), slots=64, rows=1000)
    found = rounds(world, 20)
    assert [f["schedule/long_round"] for f in found] == [0, 0, 0, 0, 1] * 4
    assert [f["schedule/long_prompts_left"] for f in found] == [2, 2, 2, 2, 0] * 4
    assert {len(u) for u in updates(world)} == {32}
    assert all(s == 0 for b in world.batches for s in b.staleness)
    assert world.ledger.counters["discarded/overlaunch"] == 16 * 10 * 1  # of every prompt one
    short = [max(r.token_ids.size for r in u) for u in updates(world)[:4]]
    assert max(short) < min(max(r.token_ids.size for r in u) for u in updates(world)[4::5])


def test_the_kept_ones_are_synchronous_responses_and_a_prompt_has_as_many_as_it_should() -> None:
    knobs = {"prompts": 4, "samples": 4}
    world = World(of("tail_batching", **knobs), length=long_tailed(2), workers=2, slots=9).run(10)
    same = World(of("synchronous", **knobs), length=long_tailed(2)).run(10)
    ours, theirs = (tokens([r for u in updates(w) for r in u]) for w in (world, same))
    assert all(theirs[key] == length for key, length in ours.items() if key in theirs)
    prompts = {key[:2] for key in ours}
    assert len(ours) == 4 * len(prompts)
    assert prompts == {key[:2] for key in theirs}


def test_without_overlaunch_it_is_synchronous() -> None:
    knobs = {"prompts": 3, "samples": 2}
    config = of("tail_batching", **knobs, max_prompts_ratio=1.0, max_num_return_sequences=2)
    world = World(config, length=long_tailed(3), slots=5).run(6)
    same = World(of("synchronous", **knobs), length=long_tailed(3)).run(6)
    assert [tokens(u) for u in updates(world)] == [tokens(u) for u in updates(same)]
    assert world.ledger.counters["refreshes"] == 0


def test_it_keeps_the_fastest_of_a_short_round() -> None:
    world = World(of("tail_batching", prompts=6, samples=4), length=long_tailed(4), slots=200).run(4)
    lost = [r.token_ids.size for r in world.ledger.take_finished() if r.discard_reason == "overlaunch"]
    assert not lost, "logged at the updates"
    whole = World(of("synchronous", prompts=6, samples=5), length=long_tailed(4), slots=200).run(4)
    mean = {
        w: sum(r.token_ids.size for u in updates(w) for r in u) / sum(map(len, updates(w)))
        for w in (world, whole)
    }
    assert mean[world] < 0.8 * mean[whole]


def test_useless_groups_are_replaced_from_the_queue_or_the_data() -> None:
    config = of("tail_batching", prompts=4, samples=2, drop_zero_variance=True)
    world = World(
        config,
        length=long_tailed(5),
        slots=12,
        reward=lambda r: float(r.sample_index) if r.prompt.row % 3 else 1.0,
    )
    found = rounds(world, 12)
    assert {f["schedule/long_round"] for f in found} == {0, 1}
    assert {r.prompt.row % 3 for b in world.batches for r in b.rollouts} == {1, 2}
    assert {len(u) for u in updates(world)} == {8}


def test_updates_by_token_budget() -> None:
    config = of("tail_batching", prompts=4, samples=2, tokens_per_update=300)
    world = World(config, length=long_tailed(6), slots=12)
    found = rounds(world, 12)
    totals = [sum(r.token_ids.size for r in u) for u in updates(world)]
    assert min(totals) >= 300
    for f, update, total in zip(found, updates(world), totals, strict=True):
        if not f["schedule/long_round"]:
            groups: dict[int, int] = {}
            for r in update:
                groups[r.group_id] = groups.get(r.group_id, 0) + r.token_ids.size
            assert total - max(groups.values()) < 300


def test_goes_on_after_a_resume() -> None:
    world: dict[str, Any] = {"length": long_tailed(7), "workers": 2, "slots": 5}
    before, after = resumed(of("tail_batching", prompts=4, samples=2), 4, 5, **world)
    assert after.controller.schedule.metrics()["schedule/long_round"] == 1
    whole = World(of("tail_batching", prompts=4, samples=2), **world).run(5)
    assert tokens(after.batches[-1].rollouts) == tokens(whole.batches[-1].rollouts)
    assert [tokens(b.rollouts) for b in before.batches] == [tokens(b.rollouts) for b in whole.batches[:4]]
