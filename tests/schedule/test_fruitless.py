"""Dynamic sampling where all rewards are equal."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from stretto.config.schedules import Kind
from stretto.errors import StrettoError
from tests.schedule.runs import of
from tests.world import World, long_tailed


def world(kind: Kind, batches: int | None, every: int, train_seconds: float = 1.0, **knobs: Any) -> World:
    """All rewards are equal but those of every `every`-th group."""
    knobs = {"prompts": 4, "samples": 2, "drop_zero_variance": True, "max_num_gen_batches": batches, **knobs}
    config = of(kind, **knobs)
    return World(
        config,
        length=long_tailed(1, cap=50),
        workers=2,
        slots=8,
        checked=False,
        train_seconds=train_seconds,
        reward=lambda r: float(r.sample_index % 2 if (r.group_id + 1) % every == 0 else 0),
    )


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_run_that_learns_nothing_ends(kind: Kind) -> None:
    constant = world(kind, 3, every=10**9)
    message = r"since update 0, 1[2-9] groups were given up, since all .* 3 times what an update takes"
    with pytest.raises(StrettoError, match=message):
        constant.run(1)
    assert not constant.batches


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_is_given_up_counts_from_the_last_update(kind: Kind) -> None:
    few = world(kind, 10, every=4)  # 12 to an update
    few.run(5)
    assert few.ledger.counters["discarded/zero_variance"] > 2 * 40


def test_without_a_limit_it_goes_on() -> None:
    rare = world("synchronous", None, every=40)
    rare.run(1)
    assert rare.ledger.counters["discarded/zero_variance"] > 2 * 40


def test_while_the_learner_is_at_work_nobody_lacks_groups() -> None:
    """Two more updates' groups are ready before one is trained on, and by then 21 updates' groups were given up."""
    slow = world("async", 8, every=8, train_seconds=1000.0, max_staleness=None)
    slow.run(4)
    assert len(slow.batches) == 4
