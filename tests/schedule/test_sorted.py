from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stretto.config import ScheduleConfig
from stretto.engine.simulated import SimulatedEngine
from stretto.records import Admit, Harvest, Publish, Request, Start
from tests.schedule.runs import any_world, by_order, check_consumed, decisions, of, resumed, tokens, updates
from tests.world import World, long_tailed


@settings(max_examples=20)
@given(seed=st.integers(0, 100_000))
def test_every_response_is_consumed_once_and_not_too_old(seed: int) -> None:
    world = any_world("sorted", seed)
    world.run(4)
    check_consumed(world)


def test_on_policy_state_machine_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = of("sorted", prompts=2, samples=1, unit="response", load_prompts=2, max_staleness=0)
    world = World(config, length=by_order([10, 3, 5, 20]), slots=2, reward_seconds=0)
    made = decisions(world)
    started: list[tuple[int, int, int]] = []
    submit = SimulatedEngine.submit

    def note(engine: SimulatedEngine, requests: list[Request]) -> None:
        started.extend((r.id, len(r.token_ids), len(r.draft_ids)) for r in requests)
        submit(engine, requests)

    monkeypatch.setattr(SimulatedEngine, "submit", note)
    world.run(2)
    kinds = [d for d in made if isinstance(d, (Admit, Harvest, Publish))]
    assert kinds == [Admit(4, 1), Harvest([1, 2]), Publish([0], "recompute"), Harvest([0, 3])]
    first, after = started[:4], started[4:]
    assert [i for i, _, _ in first] == [0, 1, 2, 3]  # 2 in 1's place at once, 3 in 2's, while 0 goes on
    assert [(i, n) for i, n, _ in after] == [(0, 0), (3, 0)]  # from their prompts again, the older one first
    assert [5 <= draft <= 9 for _, _, draft in after] == [True, False]  # with what they had as draft
    assert all(s == 0 for b in world.batches for s in b.staleness)


def test_partial_keeps_tokens_and_goes_on_during_the_update() -> None:
    config = of("sorted", prompts=2, samples=1, unit="response", load_prompts=2, max_staleness=1)
    world = World(config, length=by_order([150, 3, 5, 100]), slots=2, train_seconds=0.5, reward_seconds=0)
    made = decisions(world)
    world.run(2)
    at = made.index(Harvest([1, 2]))
    assert made[at - 2 : at] == [Start([2], 0), Start([3], 0)]
    assert made[at + 1 : at + 3] == [Publish([0], "recompute"), Harvest([3, 0])]  # the shorter first
    assert world.ledger.counters["discarded_tokens"] == 0
    assert world.batches[1].staleness == [1, 1]


@pytest.mark.parametrize("eta", [0, 1, 3, None])
@pytest.mark.parametrize("unit", ["group", "response"])
def test_a_load_is_synchronous_responses(unit: str, eta: int | None) -> None:
    knobs = {"prompts": 3, "samples": 4}
    config = of("sorted", **knobs, unit=unit, load_prompts=5, max_staleness=eta)
    world = World(config, length=long_tailed(4), workers=2, slots=7).run(10)
    same = World(of("synchronous", **knobs), length=long_tailed(4)).run(10)
    for load in (slice(0, 5), slice(5, 10)):
        ours, theirs = ([r for u in updates(w)[load] for r in u] for w in (world, same))
        assert tokens(ours) == tokens(theirs)


def test_updates_of_a_load_get_longer_and_the_last_drains() -> None:
    config = of("sorted", prompts=8, samples=2, unit="response", load_prompts=4, max_staleness=0)
    world = World(config, length=long_tailed(9), slots=64)
    figures: list[dict[str, float]] = []
    updated = world.updated

    def note(event: object) -> None:
        updated(event)  # type: ignore[arg-type]
        figures.append(world.controller.schedule.metrics())

    world.updated = note  # type: ignore[method-assign]
    world.run(8)
    assert [f["schedule/harvest_of_load"] for f in figures] == [1, 2, 3, 4] * 2
    means = [f["schedule/harvest_length_mean"] for f in figures]
    assert means[:4] == sorted(means[:4])
    assert means[4:] == sorted(means[4:])
    longest = [max(r.token_ids.size for r in update) for update in updates(world)]
    shortest = [min(r.token_ids.size for r in update) for update in updates(world)]
    assert all(a <= b for a, b in zip(longest[:3], shortest[1:4], strict=True))  # all started together
    assert world.controller.schedule.metrics() == {}


def test_grouped_loading_takes_nothing_in_before_all_is_consumed() -> None:
    config = of("sorted", prompts=2, samples=3, load_prompts=3, max_staleness=2)
    world = World(config, length=long_tailed(5), slots=5)
    admitted: list[int] = []
    admit = world.ledger.admit

    def spy(prompts, samples_each):  # type: ignore[no-untyped-def]
        admitted.append(world.ledger.alive)
        return admit(prompts, samples_each)

    world.ledger.admit = spy  # type: ignore[method-assign]
    world.run(9)
    assert admitted == [0] * len(admitted)
    assert len(admitted) >= 3


def test_what_was_refreshed_starts_after_what_was_not() -> None:
    """Else the long ones, each time again, would hold the slots of the short ones that have not had their turn."""
    config = of("sorted", prompts=4, samples=1, unit="response", load_prompts=4, max_staleness=0)
    lengths = [100, 90, *[5] * 14]
    world = World(config, length=by_order(lengths), slots=3).run(4)
    assert {0, 1} <= {r.request_id for r in updates(world)[3]}
    assert world.ledger.columns.refreshes[:2].tolist() == [2, 2]  # at three harvests


def test_more_refreshes_than_the_budget_make_an_update_wait() -> None:
    lengths = [250, *[5] * 31]
    knobs = {"prompts": 8, "samples": 1, "unit": "response", "load_prompts": 4, "max_staleness": 0}
    found = {}
    for budget in (None, 1):
        world = World(of("sorted", **knobs, refresh_budget=budget), length=by_order(lengths), slots=8).run(4)
        update = next(i for i, u in enumerate(updates(world)) if any(r.request_id == 0 for r in u))
        found[budget] = (update, int(world.ledger.columns.refreshes[0]))
    assert found == {None: (3, 3), 1: (2, 2)}  # its second run had told no tokens when the update closed


def test_waiting_at_staleness_0_is_synchronous() -> None:
    knobs = {"prompts": 3, "samples": 2}
    config = of("sorted", **knobs, load_prompts=4, max_staleness=0, off_policy_strategy="wait")
    world = World(config, length=long_tailed(6), slots=32).run(8)
    same = World(of("synchronous", **knobs), length=long_tailed(6), slots=32).run(8)
    assert [tokens(u) for u in updates(world)] == [tokens(u) for u in updates(same)]
    assert world.ledger.counters["refreshes"] == 0


def test_post_hoc_sorting_generates_the_load_first() -> None:
    config = of(
        "sorted", prompts=4, samples=2, unit="response", load_prompts=3, max_staleness=2, post_hoc=True
    )
    world = World(config, length=long_tailed(3), slots=5).run(6)
    in_order = [sorted(r.token_ids.size for r in b.rollouts) for b in world.batches[:3]]
    lengths = [length for part in in_order for length in part]
    assert lengths == sorted(lengths)
    assert [max(b.staleness) for b in world.batches[:3]] == [0, 1, 2]
    with pytest.raises(ValidationError, match="post_hoc"):
        ScheduleConfig(kind="sorted", load_prompts=3, max_staleness=1, post_hoc=True)


def test_useless_groups_are_replaced_within_the_load() -> None:
    config = of("sorted", prompts=2, samples=2, load_prompts=2, max_staleness=0, drop_zero_variance=True)
    world = World(
        config,
        length=long_tailed(8),
        slots=6,
        reward=lambda r: float(r.sample_index) if r.prompt.row % 3 else 1.0,
    ).run(4)
    assert [len(b.rollouts) for b in world.batches] == [4] * 4
    assert {r.prompt.row % 3 for b in world.batches for r in b.rollouts} == {1, 2}
    assert world.ledger.counters["discarded/zero_variance"] >= 6


@pytest.mark.parametrize("eta", [0, 2])
def test_goes_on_after_a_resume(eta: int) -> None:
    config = of("sorted", prompts=2, samples=2, load_prompts=4, max_staleness=eta)
    before, after = resumed(config, 3, 8, length=long_tailed(2), workers=2, slots=3)
    ours = [r for w in (before, after) for batch in w.batches for r in batch.rollouts]
    same = World(of("synchronous", prompts=2, samples=2), length=long_tailed(2)).run(8)
    assert tokens(ours) == tokens([r for u in updates(same) for r in u])
    assert after.controller.schedule.metrics()["schedule/harvest_of_load"] == 4
