"""Responses in flight draft for each other, are counted once, and are forgotten generation by generation."""

from __future__ import annotations

from stretto.draft import SOURCES
from stretto.draft.drafter import IDLE_GROUPS
from tests.draft.engine import PROMPT, drafter, propose, request, rollout, write


def test_responses_in_flight_are_followed_of_every_group() -> None:
    it = drafter()
    it.begin(0, request(0))
    it.begin(1, request(1))
    it.begin(2, request(2, group=1))
    write(it, 0, [1, 2, 3])
    drafts = propose(it, [1, 2], [0, 0])
    assert drafts.counts.tolist() == [3, 3]
    assert drafts.token_ids.tolist() == [1, 2, 3] * 2
    assert {SOURCES[s] for s in drafts.sources} == {"siblings"}


def test_what_ended_is_released() -> None:
    it = drafter(generation=50)
    for group in range(3 * IDLE_GROUPS):
        it.begin(0, request(group, group=group))
        write(it, 0, [1, 2, 3])
        it.end(0, 3)
        kept = it.metrics()
        assert kept["spec/live/groups"] <= IDLE_GROUPS + 1  # prompts, and responses in flight
        assert kept["spec/live/tokens"] <= IDLE_GROUPS * len(PROMPT) + 50 + 4
    assert it.index.metrics()["prompts"] == 0


def test_a_generation_lasts_as_long_as_its_last_request() -> None:
    """Of 8 tokens each, a response's beginning being one."""
    it = drafter(sources=["siblings"], generation=8)
    it.begin(0, request(0))
    write(it, 0, [1, 2, 3])
    it.begin(1, request(1))
    write(it, 1, [1, 2, 4, 9])
    it.end(1, 4)
    it.begin(1, request(2))  # the next generation's first
    write(it, 1, [7, 7])
    assert propose(it, [1], [2]).token_ids.size
    write(it, 0, [1, 2], known=3)
    drafts = propose(it, [0], [5])
    assert {3, 4} <= set(drafts.token_ids.tolist())
    assert 7 not in drafts.token_ids
    it.begin(2, request(3))
    assert propose(it, [2], [0]).token_ids[0] == 7
    assert it.metrics()["spec/live/groups"] == 2
    it.end(0, 5)
    assert it.metrics()["spec/live/groups"] == 1
    assert propose(it, [2], [0]).token_ids[0] == 7


def test_a_resumed_ones_text_is_counted_once() -> None:
    it = drafter(sources=["siblings"], generation=20)
    it.begin(0, request(0))
    write(it, 0, [1, 2, 3])
    for _ in range(9):
        it.end(0, None)
        it.begin(0, request(0, tokens=(1, 2, 3)))
    assert it.metrics()["spec/live/tokens"] == 4
    write(it, 0, list(range(4, 24)), known=3)
    it.end(0, None)
    it.begin(0, request(0, tokens=range(1, 24)))  # into a generation that does not have it
    assert it.metrics()["spec/live/tokens"] == 24
    assert it.metrics()["spec/live/groups"] == 1


def test_what_became_history_is_not_kept_beside_it_once_nothing_is_in_flight() -> None:
    it = drafter(sources=["siblings"])
    it.begin(0, request(0))
    it.begin(1, request(1))
    write(it, 0, [1, 2, 3])
    it.end(0, 3)
    it.remember([rollout([1, 2, 3])])
    assert it.metrics()["spec/live/tokens"] == 5  # the other one is in flight
    it.end(1, None)
    assert it.metrics()["spec/live/tokens"] == 5
    it.remember([])
    assert it.metrics()["spec/live/tokens"] == it.metrics()["spec/live/groups"] == 0
    it.begin(0, request(2))
    assert propose(it, [0], [0]).token_ids.size == 0


def test_a_sibling_that_comes_late_finds_what_was_said() -> None:
    it = drafter(sources=["siblings"])
    it.begin(0, request(0))
    write(it, 0, [1, 2, 3])
    it.end(0, 3)
    it.begin(1, request(99))
    assert propose(it, [1], [0]).token_ids.tolist() == [1, 2, 3]
