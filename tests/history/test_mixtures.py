"""A state's row is the mean of what was drawn from behind its strings, the likely tokens of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.alternatives import Alternatives
from stretto.history.frozen import Arena, Frozen, advance, freeze
from stretto.history.mixtures import ANYWHERE, LEAST, LONGEST, WHOLE, join_rows, rows_of

Text = tuple[int, ...]
Row = dict[int, float]
ROUNDED = 2 / WHOLE  # of a place's share, and of the mean


def frozen(texts: Sequence[Text], rows: Sequence[Sequence[Row]]) -> Frozen:
    """The automaton of texts whose tokens were drawn from these probabilities of the likely tokens."""
    parts = []
    for text, drawn_from in zip(texts, rows, strict=True):
        width = max(map(len, drawn_from), default=0)
        top = Alternatives.none(len(text), width)
        for place, row in enumerate(drawn_from):
            for k, (token, p) in enumerate(sorted(row.items(), key=lambda item: -item[1])):
                top.token_ids[place, k], top.logprobs[place, k] = token, np.log(p)
        drawn = [row.get(token, 0.0) for token, row in zip(text, drawn_from, strict=True)]
        parts.append(rows_of(np.array(text, np.int32), np.array(drawn, np.float32), top))
    tokens = np.array([token for text in texts for token in text], np.int32)
    return freeze(tokens, np.cumsum([0, *map(len, texts)]), None, join_rows(parts))


def row_of(automaton: Frozen, string: Text, base: int = 0) -> Row | None:
    """Of the state of a string that occurs; None where it has none."""
    state = length = 0
    for token in string:
        state, length = advance(automaton, base, 0, state, length, token)
    assert length == len(string)
    at = int(automaton.row[base + state])
    if at < 0:
        return None
    found: Row = {}
    while True:
        token = int(automaton.likely[at])
        found[token if token >= 0 else ~token] = float(automaton.share[at]) / WHOLE
        if token < 0:
            return found
        at += 1


def mean(texts: Sequence[Text], rows: Sequence[Sequence[Row]], string: Text) -> Row | None:
    """By looking at every place behind `string`; behind any token for the empty one."""
    behind = [
        rows[t][end]
        for t, text in enumerate(texts)
        for end in range(max(1, len(string)), len(text))
        if text[end - len(string) : end] == string
    ]
    tokens = {token for row in behind for token in row}
    return {v: sum(row.get(v, 0.0) for row in behind) / len(behind) for v in tokens} if behind else None


PROBABILITIES = st.sampled_from([0.05, 0.1, 0.2, 0.3])


@st.composite
def drawn_texts(draw: st.DrawFn) -> tuple[list[Text], list[list[Row]]]:
    texts = draw(st.lists(st.lists(st.integers(0, 2), max_size=7).map(tuple), min_size=1, max_size=4))
    rows = [[{token: draw(PROBABILITIES), 3: draw(PROBABILITIES)} for token in text] for text in texts]
    return texts, rows


@settings(max_examples=150)
@given(drawn_texts())
def test_rows_are_the_means_of_all_places_behind_a_string(drawn: tuple[list[Text], list[list[Row]]]) -> None:
    texts, rows = drawn
    automaton = frozen(texts, rows)
    strings = {text[i:j] for text in texts for i in range(len(text) + 1) for j in range(i, len(text) + 1)}
    for string in strings:
        found, expected = row_of(automaton, string), mean(texts, rows, string)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        likely = {token for token, p in expected.items() if p > LEAST / WHOLE + ROUNDED}
        assert likely <= found.keys() <= expected.keys()
        for token, p in found.items():
            assert p == pytest.approx(expected[token], abs=ROUNDED)


def test_only_likely_tokens_are_kept_and_the_drawn_one() -> None:
    rare = 0.5 * LEAST / WHOLE
    automaton = frozen([(1, 2)], [[{1: 1.0}, {5: 0.6, 6: rare, 2: rare}]])
    assert row_of(automaton, (1,)) == pytest.approx({5: 0.6, 2: rare}, abs=ROUNDED)


def test_a_row_has_an_end() -> None:
    """Forty successors, the first ones more probable."""
    texts = [(1, 10 + v) for v in range(40)]
    rows = [[{1: 1.0}, {10 + v: 1.0 - v / 100}] for v in range(40)]
    automaton = frozen(texts, rows)
    anywhere, behind = row_of(automaton, ()), row_of(automaton, (1,))
    assert anywhere is not None
    assert behind is not None
    assert list(anywhere) == list(range(10, 10 + ANYWHERE))
    assert len(behind) == LONGEST


def test_without_alternatives_what_was_drawn_is_known() -> None:
    rows = rows_of(np.array([4, 5], np.int32), np.array([0.25, 0.75], np.float32), None)
    assert rows.token.tolist() == [4, 5]
    assert rows.share / WHOLE == pytest.approx([0.25, 0.75], abs=ROUNDED)


def test_rows_are_found_in_an_arena_wherever_they_lie() -> None:
    first = frozen([(1, 2)], [[{1: 1.0}, {2: 0.5}]])
    second = frozen([(1, 3)], [[{1: 1.0}, {3: 0.25, 4: 0.75}]])
    arena = Arena(weighted=False, mixed=True)
    handles = [arena.add(first), arena.add(second)]
    arena.remove(handles[0])
    handles[0] = arena.add(second)
    states, edges = arena.bases(np.array(handles))
    for state, edge in zip(states.tolist(), edges.tolist(), strict=True):
        at = int(arena.arrays.row[state + advance(arena.arrays, state, edge, 0, 0, 1)[0]])
        assert arena.arrays.likely[at : at + 2].tolist() == [4, ~3]
    assert arena.nbytes > sum(a.nbytes for a in first[:5])
