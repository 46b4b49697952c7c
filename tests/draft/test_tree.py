"""Trees are what a slow reading of the texts says: the same estimates, the best nodes, in order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.alternatives import Alternatives
from stretto.draft.calibration import Calibration
from stretto.draft.estimates import BRANCHES, advance_live
from stretto.draft.tree import HISTORY, Grown, Matches, Rules, grow, room_for
from stretto.history.automaton import LivePool
from stretto.history.frozen import Arena, freeze
from stretto.history.mixtures import join_rows, rows_of
from stretto.sampling import gumbel
from tests.draft.slow_trees import KEY, POSITION, START, Node, Sources, full_tree, noise_of
from tests.draft.trees import Text, advance_texts


def grown_tree(
    sources: Sources,
    own: Text,
    *,
    room: int = 3,
    max_nodes: int = 400,
    noise_aware: bool = False,
    floor: float = 0.0,
    calibration: Calibration | None = None,
) -> list[Node]:
    """What `grow` makes of the same; parents are checked to come before their children."""
    arena, zero = Arena(weighted=sources.probabilities is not None), np.zeros(1, np.int64)
    handle = -1
    if sources.history:
        tokens = np.array([v for text in sources.history for v in text], np.int32)
        offsets = np.cumsum([0, *map(len, sources.history)])
        values = (
            None if sources.probabilities is None else np.concatenate([*map(np.array, sources.probabilities)])
        )
        handle = arena.add(freeze(tokens, offsets, values))
    bases = arena.bases(np.array([handle]))
    state, length = advance_texts(arena, bases, [own])
    text = np.array(own, np.int64)
    pool = LivePool()
    group, last = -1, zero.copy()
    if sources.siblings:
        group = pool.open()
        for sibling in sources.siblings:
            last[0] = pool.root(group)
            pool.extend(zero + group, last, zero + len(sibling), np.array(sibling, np.int64))
        last[0] = pool.root(group)
        pool.extend(zero + group, last, zero + len(own), text)
    prompt, where, matched = -1, zero.copy(), zero.copy()
    if sources.prompt:
        prompt = pool.open()
        where[0] = pool.root(prompt)
        end = where.copy()
        pool.extend(zero + prompt, end, zero + len(sources.prompt), np.array(sources.prompt, np.int64))
        for token in own:
            where[0], matched[0] = advance_live(pool.arrays, prompt, int(where[0]), int(matched[0]), token)
    matches = Matches(*bases, state, length, zero + group, last, zero + prompt, where, matched)
    grown = room_for(1, max_nodes)
    counts = grow(
        arena.arrays,
        pool.arrays,
        matches,
        np.array([KEY], np.uint64),
        zero + POSITION,
        zero + room,
        (calibration or Calibration()).table,
        Rules(max_nodes, noise_aware, sources.probabilities is not None),
        floor,
        grown,
    )
    return nodes_of(grown, int(counts[0]))


def nodes_of(grown: Grown, count: int) -> list[Node]:
    found: list[Node] = []
    for i in range(count):
        parent = int(grown.parents[i])
        assert -1 <= parent < i
        path = (*(found[parent].path if parent >= 0 else ()), int(grown.token_ids[i]))
        assert grown.depth[i] == len(path)
        found.append(
            Node(
                path,
                float(grown.estimates[i]),
                float(grown.raw[i]),
                int(grown.sources[i]),
                int(grown.rows[i]),
            )
        )
    return found


def by_path(nodes: list[Node]) -> dict[Text, Node]:
    found = {node.path: node for node in nodes}
    assert len(found) == len(nodes)  # no two equal siblings
    return found


def assert_alike(nodes: list[Node], expected: list[Node]) -> None:
    ours, theirs = by_path(nodes), by_path(expected)
    assert ours.keys() == theirs.keys()
    for path, node in ours.items():
        assert node.estimate == pytest.approx(theirs[path].estimate, rel=1e-5, abs=1e-12), path
        assert node.raw == pytest.approx(theirs[path].raw, rel=1e-5, abs=1e-12), path


TOKENS = st.integers(0, 3)
BODY = st.lists(TOKENS, max_size=8).map(tuple)
TEXT = BODY.map(lambda body: (START, *body))


@st.composite
def histories(draw: st.DrawFn) -> Sources:
    texts = draw(st.lists(TEXT, min_size=1, max_size=4))
    if draw(st.booleans()):
        return Sources(texts)
    return Sources(texts, [[draw(st.sampled_from([0.25, 0.5, 1.0])) for _ in text] for text in texts])


EVERYTHING = st.builds(
    lambda history, siblings, prompt: history._replace(siblings=siblings, prompt=prompt),
    histories() | st.just(Sources()),
    st.lists(TEXT, max_size=3),
    BODY,
)


def learnt(seed: int) -> Calibration:
    """A calibration that has seen something, different in each row and depth."""
    random, calibration = np.random.default_rng(seed), Calibration()
    raw, rows, depth = random.random(3000), random.integers(0, 5, 3000), random.integers(1, 12, 3000)
    accepted = random.random(3000) < raw ** (1.0 + rows)
    calibration.learn(raw, rows, depth, np.ones(3000, np.bool_), accepted)
    return calibration


class TestEstimates:
    @settings(max_examples=150)
    @given(histories(), TEXT)
    def test_of_history(self, sources: Sources, own: Text) -> None:
        assert_alike(grown_tree(sources, own), full_tree(sources, own, 3, Calibration()))

    @settings(max_examples=150)
    @given(st.lists(TEXT, min_size=1, max_size=4), TEXT)
    def test_of_siblings_the_request_itself_among_them(self, siblings: list[Text], own: Text) -> None:
        sources = Sources(siblings=siblings)
        assert_alike(grown_tree(sources, own), full_tree(sources, own, 3, Calibration()))

    @settings(max_examples=100)
    @given(BODY, TEXT)
    def test_of_the_prompt(self, prompt: Text, own: Text) -> None:
        sources = Sources(prompt=prompt)
        assert_alike(grown_tree(sources, own), full_tree(sources, own, 3, Calibration()))

    @settings(max_examples=150)
    @given(EVERYTHING, TEXT, st.booleans())
    def test_the_best_of_all_sources(self, sources: Sources, own: Text, noise_aware: bool) -> None:
        calibration = learnt(0)
        ours = grown_tree(sources, own, noise_aware=noise_aware, calibration=calibration)
        assert_alike(ours, full_tree(sources, own, 3, calibration, noise_aware))

    def test_only_the_most_frequent_successors_are_looked_at(self) -> None:
        often = [token for token in range(BRANCHES + 4) for _ in range(20 - token)]
        texts = [(START, token) for token in often]
        for sources in (Sources(texts), Sources(siblings=texts)):
            found = grown_tree(sources, (START,), room=1)
            assert sorted(node.path[0] for node in found) == list(range(BRANCHES))


class TestTrees:
    @settings(max_examples=100)
    @given(
        EVERYTHING,
        TEXT,
        st.integers(0, 4),
        st.integers(1, 12),
        st.sampled_from([0.0, 0.05, 0.3]),
        st.booleans(),
    )
    def test_the_best_nodes_of_the_full_tree_in_order(
        self, sources: Sources, own: Text, room: int, most: int, floor: float, noise_aware: bool
    ) -> None:
        calibration = learnt(1)
        ours = grown_tree(
            sources,
            own,
            room=room,
            max_nodes=most,
            noise_aware=noise_aware,
            floor=floor,
            calibration=calibration,
        )
        full = by_path(full_tree(sources, own, room, calibration, noise_aware, floor))
        values = [node.estimate for node in ours]
        assert values == sorted(values, reverse=True)
        assert all(value >= floor for value in values)
        assert all(len(node.path) <= room for node in ours)
        assert len(ours) == min(most, len(full))
        best = sorted((node.estimate for node in full.values()), reverse=True)
        assert values == pytest.approx(best[: len(ours)], rel=1e-5, abs=1e-12)
        for path, node in by_path(ours).items():
            assert node.estimate == pytest.approx(full[path].estimate, rel=1e-5, abs=1e-12)

    def test_no_floor_can_be_reached(self) -> None:
        sources = Sources([(START, 1, 2), (START, 1, 3)])
        assert grown_tree(sources, (START,))
        assert grown_tree(sources, (START,), floor=math.inf) == []

    def test_noise_decides_between_equals(self) -> None:
        """Half of what may come is one token, half another: by noise one of them is nearly sure."""
        sources = Sources([(START, 1)] * 8 + [(START, 2)] * 8)
        plain, aware = (grown_tree(sources, (START,), room=1, noise_aware=aware) for aware in (False, True))
        assert plain[0].raw == plain[1].raw
        noise = [noise_of(0, 1), noise_of(0, 2)]
        p = plain[0].raw
        for node in aware:
            expected = math.exp(-((1.0 - p) / p) * math.exp(-noise[node.path[0] - 1]))
            assert node.raw == pytest.approx(expected, rel=1e-12)
        assert aware[0].path[0] == 1 + int(np.argmax(noise))

    def test_the_mean_over_the_noise_is_the_probability(self) -> None:
        """By 20,000 keys; the standard error is below 0.0036, so that 5 of them miss once in 10^6 runs."""
        p = 0.3
        noise = gumbel(np.arange(20_000, dtype=np.uint64), np.zeros(1, np.int64), np.full(1, 5))
        assert np.exp(-((1.0 - p) / p) * np.exp(-noise)).mean() == pytest.approx(p, abs=5 * 0.0036)

    def test_what_history_did_not_take_but_noise_now_does_is_drafted_and_history_goes_on_below_it(
        self,
    ) -> None:
        """Behind START came 1, then 2 and 3; 4 was as likely as 1, and elsewhere came before 5."""
        texts = [(START, 1, 2, 3), (START, 1, 4, 5)]
        rows = []
        for text in texts:
            top = Alternatives.none(len(text), 2)
            top.token_ids[:, 0], top.logprobs[:, 0] = text, math.log(0.97)
            top.token_ids[1], top.logprobs[1] = [1, 4], math.log(0.5)
            rows.append(rows_of(np.array(text, np.int32), np.full(len(text), 0.97, np.float32), top))
        offsets, tokens = np.array([0, 4, 8]), np.array([v for text in texts for v in text], np.int32)
        arena = Arena(weighted=False, mixed=True)
        bases = arena.bases(np.array([arena.add(freeze(tokens, offsets, None, join_rows(rows)))]))
        none = np.full(1, -1)
        found = {4: 0, 1: 0}
        for key in range(40):
            zero, grown = np.zeros(1, np.int64), room_for(1, 16)
            state, length = advance_texts(arena, bases, [[START]])
            matches = Matches(*bases, state, length, none, zero, none, zero, zero)
            keys, rules = np.array([key], np.uint64), Rules(16, True, False)
            table = Calibration().table
            count = grow(
                arena.arrays, LivePool().arrays, matches, keys, zero, zero + 8, table, rules, 0.0, grown
            )
            nodes = nodes_of(grown, int(count[0]))
            best = nodes[0]
            noise = gumbel(np.array([key], np.uint64), np.zeros(1, np.int64), np.array([1, 4]))
            assert best.path == (1 if noise[0] > noise[1] else 4,)
            found[best.path[0]] += 1
            assert best.source == HISTORY
            if best.path == (4,):
                assert (4, 5) in by_path(nodes)
        assert min(found.values()) > 5

    def test_what_follows_the_beginning_is_known_without_tokens(self) -> None:
        (node,) = grown_tree(Sources([(START, 3)]), (START,))
        assert (node.path, node.source) == ((3,), HISTORY)
        assert grown_tree(Sources([(START, 3)]), (START, 3)) == []
