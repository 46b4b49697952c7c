from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from stretto.draft import openings
from stretto.draft.drafter import HistoryDrafter
from stretto.records import prompt_uid
from tests.draft.engine import drafter, propose, request, rollout, step

PROMPTS = [(5, 6, 7), (5, 6, 8), (5, 6, 9), (5, 6, 10)]
SLOTS = [0, 1, 2, 3]


def begun(most: int, monkeypatch: pytest.MonkeyPatch) -> HistoryDrafter:
    """A drafter with a request for each prompt, all of which have answered before; a step opens `most` bytes."""
    monkeypatch.setattr(openings, "OPENED", most)
    it = drafter(sources=["history"])
    for prompt in PROMPTS:
        it.remember([rollout([1, 2, 3, 4, 1, 2, 4, 4], prompt=prompt)])
    for slot, prompt in enumerate(PROMPTS):
        it.begin(slot, request(slot, slot, prompt))
    return it


def test_a_step_opens_what_it_may_and_the_first_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    it = begun(1, monkeypatch)
    drafted = [(propose(it, SLOTS, [known] * 4).counts > 0).tolist() for known in range(4)]
    assert drafted == [[place <= known for place in range(4)] for known in range(4)]


def test_after_one_that_is_too_much_none_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """But siblings of what is open go on."""
    it = begun(1, monkeypatch)
    it.end(3, None)
    it.begin(3, request(3, 0, PROMPTS[0]))
    it.index.wait([prompt_uid(np.array(PROMPTS[0]))])
    monkeypatch.setattr(openings, "OPENED", it.index.opening(prompt_uid(np.array(PROMPTS[0]))) + 1)
    waited: list[str] = []
    wait = it.index.wait

    def listening(uids: Iterable[str]) -> None:
        waited.extend(uids)
        wait(uids)

    monkeypatch.setattr(it.index, "wait", listening)
    assert (propose(it, SLOTS, [0] * 4).counts > 0).tolist() == [True, False, False, True]
    assert waited == [prompt_uid(np.array(prompt)) for prompt in PROMPTS[:2]]


def test_those_of_one_prompt_are_opened_together(monkeypatch: pytest.MonkeyPatch) -> None:
    it = begun(1, monkeypatch)
    it.end(3, None)
    it.end(2, None)
    it.begin(2, request(2, 0, PROMPTS[0]))
    assert (propose(it, [0, 1, 2], [0] * 3).counts > 0).tolist() == [True, False, True]
    assert (propose(it, [0, 1, 2], [0] * 3).counts > 0).tolist() == [True, True, True]


def test_what_was_said_before_is_followed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all are open, drafts are those of requests whose histories were open from the start."""
    late, soon = begun(1, monkeypatch), begun(1 << 30, monkeypatch)
    propose(soon, SLOTS, [0] * 4)
    for it in (late, soon):
        monkeypatch.setattr(openings, "OPENED", 1)
        for known in range(3):
            step(it, SLOTS, [known] * 4, [[token] for token in (1, 2, 3, 2)])
    soon.load_state_dict(late.state_dict())  # it has learned more
    a, b = (propose(it, SLOTS, [3] * 4) for it in (late, soon))
    assert a.counts.all()
    assert np.array_equal(a.token_ids, b.token_ids)
    assert np.array_equal(a.counts, b.counts)


def test_who_ends_unopened_is_not_opened_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    it = begun(1, monkeypatch)
    for slot in SLOTS:
        it.end(slot, None)
    assert not it._openings.due
    it.begin(0, request(9, 9, (1, 1)))
    assert propose(it, [0], [0]).counts.tolist() == [0]
    assert it._openings.handles.tolist() == [-1] * 4


def test_a_pause_does_not_keep_them_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the first prompts' histories is worth checking, so that sources are asked ever less often."""
    monkeypatch.setattr(openings, "OPENED", 1)
    it = drafter(sources=["history"], pause=8)
    known: list[tuple[int, ...]] = [(5, place) for place in range(3)]
    for prompt in known:
        it.remember([rollout([7], prompt=prompt)])
    it.remember([rollout([1, 2, 3], prompt=PROMPTS[0])])
    for slot, prompt in enumerate([*known, PROMPTS[0]]):
        it.begin(slot, request(slot, slot, prompt))
    for step_number in range(4):
        propose(it, SLOTS, [step_number] * 4, room=0)
    assert not it._openings.due


def test_once_settled_all_histories_can_be_opened_at_once() -> None:
    it = drafter(sources=["history"])
    for prompt in PROMPTS:
        it.remember([rollout([1, 2, 3, 4] * 200, prompt=prompt)])
    it.settle()
    assert all(it.index.opening(prompt_uid(np.array(prompt))) for prompt in PROMPTS)
