"""A live automaton knows every string of its group's texts, how often each occurs, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.history.automaton import EDGES, LINKS, STATES, LivePool, find_live, find_text, match_live

LARGEST = 2**31 - 1
TOKENS = st.sampled_from([0, 64, LARGEST])  # 0 and 64 share a bucket
Text = tuple[int, ...]


def occurrences(texts: list[Text], string: Text) -> int:
    n = len(string)
    return sum(text[i : i + n] == string for text in texts for i in range(len(text) - n + 1))


def strings(texts: list[Text]) -> set[Text]:
    return {text[i:j] for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}


def longest_match(texts: list[Text], text: Text) -> Text:
    """The longest suffix of `text` that occurs in `texts` with a token after it."""
    followed = strings([other[:-1] for other in texts])
    return next((text[i:] for i in range(len(text)) if text[i:] in followed), ())


class Group:
    """A live group beside the plain texts that it should hold."""

    def __init__(self, pool: LivePool, members: int) -> None:
        self.handle = pool.open()
        self.texts: list[Text] = [()] * members
        self.last = [pool.root(self.handle)] * members

    def check(self, pool: LivePool) -> None:
        arrays = pool.arrays
        seen: dict[Text, int] = {}
        unexplored: list[tuple[Text, int]] = [((), pool.root(self.handle))]
        while unexplored:
            string, state = unexplored.pop()
            for token in (0, 64, LARGEST):
                edge = find_live(arrays, self.handle, state, token)
                if edge >= 0:
                    seen[(*string, token)] = int(arrays.target[edge])
                    unexplored.append(((*string, token), int(arrays.target[edge])))
        assert set(seen) == strings(self.texts)
        for string in [*seen, (0, 0, 64), (64, LARGEST), (64,), ()]:
            found = find_text(arrays, self.handle, np.array(string, np.int64))
            assert found == (seen.get(string, -1) if string else pool.root(self.handle))
        for string, state in seen.items():
            assert arrays.counts[state] == occurrences(self.texts, string)
            assert arrays.length[state] >= len(string) > arrays.length[arrays.link[state]]
        assert arrays.counts[pool.root(self.handle)] == sum(map(len, self.texts))
        for text, last in zip(self.texts, self.last, strict=True):
            assert last == (seen[text] if text else pool.root(self.handle))
            assert arrays.length[last] == len(text)
            match = longest_match(self.texts, text)
            state = match_live(arrays, last)
            assert state == (seen[match] if match else pool.root(self.handle))
            assert arrays.length[state] == len(match)


def extend(pool: LivePool, pieces: list[tuple[Group, int, Text]]) -> None:
    last = np.array([group.last[member] for group, member, _ in pieces], np.int64)
    pool.extend(
        np.array([group.handle for group, _, _ in pieces], np.int64),
        last,
        np.array([len(piece) for _, _, piece in pieces], np.int64),
        np.array([token for _, _, piece in pieces for token in piece], np.int64),
    )
    for (group, member, piece), state in zip(pieces, last.tolist(), strict=True):
        group.texts[member] += piece
        group.last[member] = state


PIECE = st.tuples(st.integers(0, 1), st.integers(0, 2), st.lists(TOKENS, max_size=4).map(tuple))


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.lists(PIECE, max_size=6, unique_by=lambda piece: piece[:2]),
            st.none() | st.integers(0, 1),
        ),
        max_size=6,
    )
)
def test_interleaved_texts_are_counted_and_matched_exactly_at_every_moment(
    steps: list[tuple[list[tuple[int, int, Text]], int | None]],
) -> None:
    pool = LivePool()
    groups = [Group(pool, 3), Group(pool, 3)]
    for pieces, replaced in steps:
        extend(pool, [(groups[g], member, piece) for g, member, piece in pieces])
        if replaced is not None:
            pool.close(groups[replaced].handle)
            groups[replaced] = Group(pool, 3)
        for group in groups:
            group.check(pool)


def test_a_released_group_leaves_its_states_and_edges_to_the_next() -> None:
    pool = LivePool()
    text = tuple(np.random.default_rng(1).choice([0, 64, LARGEST], 40).tolist())
    used = []
    for _ in range(3):
        group = Group(pool, 2)
        extend(pool, [(group, 0, text), (group, 1, text[::-1])])
        group.check(pool)
        pool.close(group.handle)
        used.append((int(pool.arrays.top[STATES]), int(pool.arrays.top[EDGES])))
    assert used[0] == used[1] == used[2]
    assert pool.metrics()["tokens"] == pool.metrics()["groups"] == 0


def test_growing_keeps_what_was_there() -> None:
    pool = LivePool()
    small = [Group(pool, 1) for _ in range(20)]
    for group in small:
        extend(pool, [(group, 0, (0, 64, 0, 64))])
    before = pool.metrics()["bytes"]
    large = Group(pool, 1)
    text = tuple(np.random.default_rng(2).integers(0, 50, 4000).tolist())
    for start in range(0, 4000, 500):
        extend(pool, [(large, 0, text[start : start + 500])])
    assert pool.metrics()["bytes"] > before
    for group in small:
        group.check(pool)
    for at in range(0, 4000, 200):
        state = pool.root(large.handle)
        for token in text[at : at + 2]:
            edge = find_live(pool.arrays, large.handle, state, token)
            state = int(pool.arrays.target[edge])
        assert pool.arrays.counts[state] == occurrences([text], text[at : at + 2])


def test_one_token_repeated() -> None:
    pool = LivePool()
    group = Group(pool, 2)
    for _ in range(LINKS // 2):
        extend(pool, [(group, 0, (64,)), (group, 1, (64, 64))])
        group.check(pool)


def test_a_loop_costs_the_same_round_after_round() -> None:
    """Each token is counted at a bounded number of states, however many suffixes the text has by then."""
    pool = LivePool()
    group = Group(pool, 1)
    work = []
    for _ in range(4):
        before = float(pool.arrays.counts[: pool.arrays.top[STATES]].sum())
        extend(pool, [(group, 0, (64,) * 500)])
        work.append(float(pool.arrays.counts[: pool.arrays.top[STATES]].sum()) - before)
    assert work[1:] == [500.0 * (LINKS + 1)] * 3
    assert pool.arrays.counts[pool.root(group.handle)] == 2000
    newest = group.last[0]
    for _ in range(LINKS):  # a match at the end of the text is followed as often as it should be
        assert pool.arrays.counts[newest] == 2001 - pool.arrays.length[newest]
        newest = int(pool.arrays.link[newest])
    pool.close(group.handle)
    assert pool.metrics()["tokens"] == 0


def test_closed_groups_and_wrong_counts_are_refused_before_anything_changes() -> None:
    pool = LivePool()
    group, closed = Group(pool, 1), Group(pool, 1)
    pool.close(closed.handle)
    with pytest.raises(KeyError):
        pool.close(closed.handle)
    with pytest.raises(KeyError):
        pool.root(closed.handle)
    with pytest.raises(KeyError):
        extend(pool, [(group, 0, (0,)), (closed, 0, (0,))])
    with pytest.raises(ValueError, match="counts add up to 2, but there are 1 tokens"):
        pool.extend(np.array([group.handle]), np.array(group.last), np.array([2]), np.array([0]))
    group.check(pool)
    assert pool.metrics()["tokens"] == 0
