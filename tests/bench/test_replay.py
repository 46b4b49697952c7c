from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.bench.recorded import EXCERPT, read
from stretto.bench.replay import Texts, replay
from stretto.draft import Drafts, Verified, no_drafts
from stretto.draft.cost import CostModel
from stretto.records import IntArray, Request, Rollout
from tests.draft.trees import drafts

TARGETS = read(EXCERPT).thinned(8).targets


class Oracle:
    """Knows every target, and drafts its next `length` tokens; writes down what it is told."""

    def __init__(self, targets: list[Rollout], length: int) -> None:
        self.texts = {t.request_id: t.token_ids for t in targets}
        self.length = length
        self.slots: dict[int, int] = {}
        self.seen: dict[int, list[int]] = {}
        self.lengths: list[int | None] = []

    def begin(self, slot: int, request: Request) -> None:
        assert slot not in self.slots
        self.slots[slot] = request.id
        self.seen[request.id] = []

    def end(self, slot: int, length: int | None) -> None:
        del self.slots[slot]
        self.lengths.append(length)

    def propose(self, slots: IntArray, generated: IntArray, room: IntArray, tokens: int, most: int) -> Drafts:
        assert tokens == slots.size
        assert (room > self.length).all()
        pairs = zip(slots.tolist(), generated.tolist(), strict=True)
        known = [self.texts[self.slots[slot]][at : at + self.length] for slot, at in pairs]
        counts = np.array([part.size for part in known])
        place = np.concatenate([np.arange(count) for count in counts])
        nodes = place.size
        return Drafts(
            counts, np.concatenate(known), place - 1, place + 1, np.ones(nodes), np.zeros(nodes, np.int8)
        )

    def observe(self, slots: IntArray, drafts: Drafts, verified: Verified, token_ids: IntArray) -> None:
        at = 0
        for slot, count in zip(slots.tolist(), verified.emitted.tolist(), strict=True):
            self.seen[self.slots[slot]] += token_ids[at : at + count].tolist()
            at += count
        assert at == token_ids.size


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_a_drafter_that_is_always_right(length: int, slots: int) -> None:
    drafter = Oracle(TARGETS, length)
    found = replay(drafter, TARGETS, slots)
    sizes = [t.token_ids.size for t in TARGETS]
    assert drafter.seen == {t.request_id: t.token_ids.tolist() for t in TARGETS}
    assert sorted(n for n in drafter.lengths if n is not None) == sorted(sizes)
    assert found.tokens == sum(sizes)
    assert found.checks == sum(-(-size // (length + 1)) for size in sizes)
    assert found.accepted == found.drafted
    assert np.isnan(found.seconds)
    if slots == 64:
        assert found.steps == max(-(-size // (length + 1)) for size in sizes)


def test_seconds_are_those_of_the_steps() -> None:
    cost = CostModel(per_node=0.5)
    cost.fit([(1, 1.0), (100, 100.0)])
    found = replay(Oracle(TARGETS, 2), TARGETS, 4, cost)
    assert found.seconds == pytest.approx(found.checks + 1.5 * found.drafted)


@given(drafts(3, 8), st.data())
def test_walks_down_while_the_target_s_token_is_a_child(proposed: Drafts, data: st.DataObject) -> None:
    few = st.integers(0, 2)
    nodes, requests = proposed.token_ids.size, proposed.counts.size
    if not requests:
        return
    # Siblings differ: the k-th child of a node has token k.
    owner = np.repeat(np.arange(requests), proposed.counts)
    seen: dict[tuple[int, int], int] = {}
    for i in range(nodes):
        parent = int(owner[i]), int(proposed.parents[i])
        proposed.token_ids[i] = seen[parent] = seen.get(parent, -1) + 1
    chosen = [np.array(data.draw(st.lists(few, min_size=1, max_size=6))) for _ in range(requests)]
    targets = [_target(i, tokens) for i, tokens in enumerate(chosen)]
    texts = Texts(targets, requests)
    for i in range(requests):
        texts.put(i, i)
    verified, emitted = texts.verify(np.arange(requests), proposed)
    start, at = 0, 0
    for r, tokens in enumerate(chosen):
        own = slice(start, start + int(proposed.counts[r]))
        reached, accepted, count = _by_hand(proposed.token_ids[own], proposed.parents[own], tokens)
        assert verified.reached[own].tolist() == reached
        assert verified.accepted[own].tolist() == accepted
        assert verified.emitted[r] == count
        assert emitted[at : at + count].tolist() == tokens[:count].tolist()
        assert texts.ended(np.array([r])).tolist() == [count == tokens.size]
        start, at = own.stop, at + count


def _target(number: int, tokens: IntArray) -> Rollout:
    zeros = np.zeros(tokens.size)
    return Rollout(number, 0, TARGETS[0].prompt, 0, 0, 0, tokens, zeros, zeros, tokens, tokens >= 0)


def _by_hand(token_ids: IntArray, parents: IntArray, target: IntArray) -> tuple[list[bool], list[bool], int]:
    """By paths: a node is accepted if the tokens down to it begin the target."""
    paths: list[list[int]] = []
    for token, parent in zip(token_ids.tolist(), parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    text = target.tolist()
    accepted = [path == text[: len(path)] for path in paths]
    reached = [path[:-1] == text[: len(path) - 1] and len(path) <= len(text) for path in paths]
    longest = max((len(path) for path, good in zip(paths, accepted, strict=True) if good), default=0)
    return reached, accepted, min(longest + 1, len(text))


def test_no_drafts_emit_one_token_each() -> None:
    texts = Texts(TARGETS, 2)
    texts.put(0, 3)
    texts.put(1, 5)
    for place in range(2):
        _, emitted = texts.verify(np.array([0, 1]), no_drafts(2))
        assert emitted.tolist() == [TARGETS[3].token_ids[place], TARGETS[5].token_ids[place]]
