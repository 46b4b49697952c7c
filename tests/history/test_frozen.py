"""A frozen automaton knows what its texts hold, in order of weight; an arena changes none of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.history.frozen import Arena, Frozen, advance, find_frozen, freeze
from tests.draft.trees import advance_texts

LARGEST = 2**31 - 1
TOKENS = st.sampled_from([0, 1, LARGEST])
Text = tuple[int, ...]
TEXTS = st.lists(st.lists(TOKENS, max_size=9).map(tuple), max_size=5)


def frozen_of(texts: list[Text], values: list[float] | None = None) -> Frozen:
    tokens = np.array([token for text in texts for token in text], np.int32)
    offsets = np.cumsum([0, *map(len, texts)])
    return freeze(tokens, offsets, None if values is None else np.array(values, np.float64))


def ends(texts: list[Text], string: Text) -> list[int]:
    """Where `string` ends, in positions of all texts' tokens."""
    found: list[int] = []
    start = 0
    for text in texts:
        stops = range(max(1, len(string)), len(text) + 1)
        found += [start + stop - 1 for stop in stops if text[stop - len(string) : stop] == string]
        start += len(text)
    return found


def strings(texts: list[Text]) -> set[Text]:
    return {text[i:j] for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}


def paths(frozen: Frozen, state_base: int = 0, edge_base: int = 0) -> dict[Text, int]:
    """The state of every string that the automaton spells."""
    known: dict[Text, int] = {(): 0}
    unexplored: list[Text] = [()]
    while unexplored:
        string = unexplored.pop()
        at = state_base + known[string]
        for edge in range(edge_base + int(frozen.first[at]), edge_base + int(frozen.first[at + 1])):
            longer = (*string, int(frozen.token[edge]))
            known[longer] = int(frozen.target[edge])
            unexplored.append(longer)
    return known


@settings(max_examples=150)
@given(TEXTS, st.data())
def test_counts_weights_links_and_edge_order_equal_brute_force(
    texts: list[Text], data: st.DataObject
) -> None:
    total = sum(map(len, texts))
    values = data.draw(st.none() | st.lists(st.integers(0, 3).map(float), min_size=total, max_size=total))
    frozen = frozen_of(texts, values)
    states = paths(frozen)
    assert set(states) == strings(texts) | {()}
    for string, state in states.items():
        found = ends(texts, string)
        assert frozen.counts[state] == len(found)
        assert frozen.weight[state] == (len(found) if values is None else sum(values[i] for i in found))
        longest = int(frozen.length[state])
        shortest = 0 if state == 0 else int(frozen.length[frozen.link[state]]) + 1
        assert shortest <= len(string) <= longest
    assert frozen.link[0] == -1
    for state in range(frozen.states):
        edges = range(int(frozen.first[state]), int(frozen.first[state + 1]))
        order = [(-frozen.weight[frozen.target[e]] if state else 0, frozen.token[e]) for e in edges]
        assert order == sorted(order)
    assert (frozen.weight is frozen.counts) == (values is None)


@settings(max_examples=150)
@given(TEXTS, st.lists(st.sampled_from([0, 1, LARGEST, 7]), max_size=20))
def test_advance_keeps_the_longest_match_of_any_text(texts: list[Text], query: list[int]) -> None:
    frozen = frozen_of(texts)
    states, known = paths(frozen), strings(texts)
    state = length = 0
    for i in range(len(query)):
        state, length = advance(frozen, 0, 0, state, length, query[i])
        suffixes = [tuple(query[start : i + 1]) for start in range(i + 1)]
        longest: Text = next((suffix for suffix in suffixes if suffix in known), ())
        assert (state, length) == (states[longest], len(longest))


def test_states_with_many_edges_are_in_order_too() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 200, 3000)
    texts: list[Text] = [(0, token) for token in tokens.tolist()]
    frozen = frozen_of(texts)
    state = int(frozen.target[find_frozen(frozen, 0, 0, 0, 0)])
    edges = slice(int(frozen.first[state]), int(frozen.first[state + 1]))
    ids, numbers = np.unique(tokens, return_counts=True)
    order = np.lexsort((ids, -numbers))
    assert frozen.token[edges].tolist() == ids[order].tolist()
    assert frozen.counts[frozen.target[edges]].tolist() == numbers[order].tolist()
    assert len(set(numbers.tolist())) < len(numbers)  # ties there are


def test_wide_states_and_a_root_whose_tokens_share_a_bucket() -> None:
    text = tuple((64 * np.random.default_rng(1).zipf(1.3, 4000).clip(1, 300)).tolist())
    frozen = frozen_of([text])
    pairs: dict[Text, int] = {}
    for i in range(len(text) - 1):
        pairs[text[i : i + 2]] = pairs.get(text[i : i + 2], 0) + 1
    assert max(np.diff(frozen.first)[1:]) > 50
    assert frozen.states < 2 * len(text)
    assert frozen.first[-1] < 3 * len(text)
    found: dict[Text, int] = {}
    for root_edge in range(int(frozen.first[1])):
        state = int(frozen.target[root_edge])
        for edge in range(int(frozen.first[state]), int(frozen.first[state + 1])):
            pair = (int(frozen.token[root_edge]), int(frozen.token[edge]))
            assert pair not in found
            found[pair] = int(frozen.counts[frozen.target[edge]])
    assert found == pairs


def test_one_token_repeated_thousands_of_times() -> None:
    n = 20_000
    frozen = frozen_of([(5,) * n, (5,) * (n // 2)])
    assert frozen.states == n + 1
    assert np.array_equal(frozen.counts[1:], [max(0, n - k) + max(0, n // 2 - k) for k in range(n)])


@pytest.mark.parametrize(("texts", "states"), [([], 1), ([()], 1), ([(), (3,)], 2), ([(3,), (3,)], 2)])
def test_hardly_anything(texts: list[Text], states: int) -> None:
    frozen = frozen_of(texts)
    assert frozen.states == states
    assert frozen.counts[0] == sum(map(len, texts))
    assert advance(frozen, 0, 0, 0, 0, 3) == ((1, 1) if states == 2 else (0, 0))


def test_at_most_56_bytes_a_token_by_counts_and_64_by_weights() -> None:
    """2 states and 3 edges a token are the automaton's bounds; two letters at random come near them."""
    tokens = np.random.default_rng(3).integers(0, 2, 5000).tolist()
    assert 50 * 5000 < frozen_of([tuple(tokens)]).nbytes < 56 * 5000
    assert frozen_of([tuple(tokens)], [0.5] * 5000).nbytes < 64 * 5000


@settings(max_examples=60)
@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=12), st.booleans())
def test_an_arena_holds_what_was_put_in(steps: list[tuple[list[Text], bool]], weighted: bool) -> None:
    arena, inside = Arena(weighted), dict[int, list[Text]]()
    for texts, take_out in steps:
        values = [0.5] * sum(map(len, texts)) if weighted else None
        handle = arena.add(frozen_of(texts, values))
        assert handle not in inside
        inside[handle] = texts
        if take_out:
            oldest = next(iter(inside))
            arena.remove(oldest)
            del inside[oldest]
        state_bases, edge_bases = arena.bases(np.array([*inside, -1]))
        assert state_bases[-1] == edge_bases[-1] == -1
        for held, state_base, edge_base in zip(inside.values(), state_bases, edge_bases, strict=False):
            states = paths(arena.arrays, int(state_base), int(edge_base))
            assert set(states) == strings(held) | {()}
            for string, state in states.items():
                count = len(ends(held, string))
                assert arena.arrays.counts[state_base + state] == count
                assert arena.arrays.weight[state_base + state] == (count / 2 if weighted else count)
    for handle in inside:
        arena.remove(handle)
    assert arena.nbytes == 0


def test_automata_in_one_arena_are_followed_apart() -> None:
    arena = Arena(weighted=False)
    texts: list[list[Text]] = [[(1, 2, 3, 4)], [(3, 4, 5), (2, 3)]]
    handles = np.array([arena.add(frozen_of(held)) for held in texts])
    bases = arena.bases(np.array([handles[1], -1, handles[0], handles[1]]))
    states, lengths = advance_texts(arena, bases, [(2, 3, 4), (1,), (2, 3, 5), ()])
    assert lengths.tolist() == [2, 0, 0, 0]
    assert states.tolist() == [paths(frozen_of(texts[1]))[3, 4], 0, 0, 0]


def test_an_empty_arena_has_no_bases() -> None:
    state_bases, edge_bases = Arena(weighted=False).bases(np.array([-1, -1]))
    assert state_bases.tolist() == edge_bases.tolist() == [-1, -1]
    with pytest.raises(KeyError):
        Arena(weighted=False).remove(0)
