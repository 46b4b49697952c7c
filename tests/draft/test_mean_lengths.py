from __future__ import annotations

import pytest

from stretto.draft import mean_lengths
from stretto.draft.mean_lengths import MeanLengths
from tests.draft.engine import drafter, rollout


def test_is_of_the_newest_visit() -> None:
    lengths = MeanLengths()
    assert lengths.mean("a") is None
    lengths.add("a", 1, [2, 4])
    lengths.add("a", 1, [9])
    assert lengths.mean("a") == 5.0
    lengths.add("a", 2, [7])
    lengths.add("a", 1, [100])
    assert lengths.mean("a") == 7.0


def test_of_ever_new_prompts_those_answered_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_lengths, "PROMPTS", 10)
    lengths = MeanLengths()
    for number in range(100):
        lengths.add("again", 1, [4])
        lengths.add(str(number), 1, [number])
    assert len(lengths._prompts) == 10
    assert lengths.mean("99") == 99.0
    assert lengths.mean("90") is None
    assert lengths.mean("again") == 4.0


def test_a_drafter_forgets_prompts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_lengths, "PROMPTS", 3)
    it = drafter()
    for number in range(8):
        it.remember([rollout([1, 2], prompt=(number,))])
    assert len(it._lengths._prompts) == 3
