"""What an earlier attempt said is drafted for as long as the response agrees with it, and is history afterwards."""

from __future__ import annotations

import numpy as np

from stretto.draft import MAX_NODES, SOURCES
from stretto.draft.budget import Fixed, Goodput
from stretto.draft.cost import CostModel
from stretto.draft.dropped import AGREES
from stretto.records import Request
from tests.draft.engine import drafter, propose, request, rollout, step, write

TEXT = [*range(10, 30), *range(40, 120)]


def refreshed(id: int, tokens: list[int], said: list[int] | None = None, group: int = 0) -> Request:
    found = request(id, group=group, tokens=said or ())
    found.draft_ids = np.array(tokens, np.int64)
    return found


def test_a_path_as_long_as_a_tree_may_be_and_no_longer_than_the_rest() -> None:
    it = drafter(max_nodes=8)
    it.begin(0, refreshed(0, TEXT))
    drafts = propose(it, [0], [0], room=999)
    assert drafts.token_ids.tolist() == TEXT[:MAX_NODES]
    assert drafts.parents.tolist() == list(range(-1, MAX_NODES - 1))
    assert drafts.depth.tolist() == list(range(1, MAX_NODES + 1))
    assert {SOURCES[s] for s in drafts.sources} == {"dropped"}
    assert propose(it, [0], [0], room=5).token_ids.tolist() == TEXT[:5]
    write(it, 0, TEXT[:90])
    assert propose(it, [0], [90], room=999).token_ids.tolist() == TEXT[90:]
    write(it, 0, [*TEXT[90:], 1], known=90)
    assert propose(it, [0], [101]).token_ids.size == 0


def test_estimates_begin_flat_and_learn() -> None:
    it = drafter()
    it.begin(0, refreshed(0, TEXT))
    before = propose(it, [0], [0], room=999).estimates
    assert np.allclose(before, AGREES ** np.arange(1, MAX_NODES + 1), rtol=1e-12)
    for id in range(1, 40):
        it.begin(1, refreshed(id, TEXT))
        assert step(it, [1], [0], [TEXT]) == [9]  # as deep as the test's room
        it.end(1, None)
    after = propose(it, [0], [0], room=999).estimates
    assert (after > before).all()
    for id in range(40, 120):
        it.begin(1, refreshed(id, TEXT))
        step(it, [1], [0], [[0]])
        it.end(1, None)
    assert (propose(it, [0], [0], room=999).estimates < before).all()


def test_after_the_first_difference_it_is_history() -> None:
    it = drafter()
    it.begin(0, refreshed(0, TEXT))
    write(it, 0, [*TEXT[:7], 5])
    assert DROPPED not in propose(it, [0], [8]).sources
    write(it, 0, TEXT[8:12], known=8)
    drafts = propose(it, [0], [12])
    assert drafts.token_ids.tolist() == TEXT[12:20]
    assert {SOURCES[s] for s in drafts.sources} == {"siblings"}


def test_a_resumed_response_goes_on_comparing() -> None:
    it = drafter(slots=3)
    it.begin(0, refreshed(0, TEXT, TEXT[:30]))
    it.begin(1, refreshed(1, TEXT, [*TEXT[:29], 0]))
    it.begin(2, refreshed(2, TEXT[:4], TEXT[:4]))
    drafts = propose(it, [0, 1, 2], [30, 30, 4], room=20)
    first = drafts.counts[0]
    assert drafts.token_ids[:first].tolist() == TEXT[30:50]
    assert set(drafts.sources[:first]) == {DROPPED}
    assert DROPPED not in drafts.sources[first:]


def test_a_slot_used_again_knows_nothing_of_what_was_dropped_there() -> None:
    it = drafter(sources=["dropped"])
    it.begin(0, refreshed(0, TEXT))
    it.end(0, None)
    it.begin(0, request(1))
    assert propose(it, [0], [0]).token_ids.size == 0


def test_trees_of_others_stand_beside_paths() -> None:
    it = drafter(slots=4, budget=Fixed(6), sources=["history", "dropped"])
    it.remember([rollout([1, 2, 3, 4])])
    for slot in (0, 2):
        it.begin(slot, request(slot))
    for slot in (1, 3):
        it.begin(slot, refreshed(slot, TEXT))
    drafts = propose(it, [3, 0, 1, 2], [0, 0, 0, 0])
    assert drafts.counts.tolist() == [6, 4, 6, 4]
    assert drafts.token_ids.tolist() == [*TEXT[:6], 1, 2, 3, 4, *TEXT[:6], 1, 2, 3, 4]
    assert [SOURCES[s] for s in drafts.sources] == 2 * [*["dropped"] * 6, *["history"] * 4]
    few = propose(it, [3, 0, 1, 2], [0, 0, 0, 0], most=7)
    assert few.token_ids.size == 7


def test_goodput_takes_long_paths_where_tokens_are_cheap_and_short_ones_where_they_are_not() -> None:
    lengths = []
    for price in (1e-4, 0.2, 5.0):
        cost = CostModel()
        cost.fit([(1, 1.0), (256, 1.0 + 255 * price)])
        it = drafter(budget=Goodput(cost))
        it.begin(0, refreshed(0, TEXT))
        lengths.append(propose(it, [0], [0], room=999).token_ids.size)
    assert lengths[0] == MAX_NODES > lengths[1] > lengths[2] == 0


DROPPED = SOURCES.index("dropped")
