"""Random worlds without a violation; `make study-simulation` runs many more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from stretto.config import ScheduleConfig
from stretto.config.checks import USED_BY
from tests.simulation.bugs import BUGS, attempt_not_counted
from tests.simulation.scenario import KINDS, KNOBS, draw
from tests.simulation.world import Violation, simulate

SEEDS = 300
WITHIN = 250  # seeds in which each planted bug is found


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_no_invariant_is_violated(first: int) -> None:
    for seed in range(first, first + 50):
        outcome = simulate(seed)
        assert outcome.updates > 0
        assert outcome.consumed > 0


def test_a_seed_says_all() -> None:
    assert [draw(seed) for seed in range(20)] == [draw(seed) for seed in range(20)]
    assert [simulate(seed) for seed in range(5)] == [simulate(seed) for seed in range(5)]


def test_all_kinds_and_knobs_are_drawn() -> None:
    """What a new schedule or knob needs to be simulated: a line in KNOBS."""
    assert set(KNOBS) | {"kind"} == set(ScheduleConfig.model_fields)
    assert set(USED_BY) <= set(KNOBS)
    kinds = Counter(draw(seed).config.kind for seed in range(SEEDS))
    assert set(kinds) == set(KINDS)


def search(seeds: int) -> None:
    for seed in range(seeds):
        simulate(seed)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By seeds that have no violation without it, and by the check that is there for it."""
    bug(monkeypatch)
    with pytest.raises(Violation, match=rf"^seed \d+: \w+: .*({BUGS[bug]})"):
        search(WITHIN)


def test_a_violation_tells_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt_not_counted(monkeypatch)
    with pytest.raises(Violation) as found:
        search(WITHIN)
    text = str(found.value)
    assert "'kind': " in text
    assert "Start(ids=" in text
    assert "Progress(worker=" in text
