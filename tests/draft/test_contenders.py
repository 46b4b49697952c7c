"""Estimates of which token wins, against sampling with the same noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stretto.alternatives import Alternatives
from stretto.draft.contenders import UNIGRAM, frozen_contenders, room_for_contenders
from stretto.history.frozen import Frozen, freeze
from stretto.history.index import LARGEST_TOKEN
from stretto.history.mixtures import WHOLE, join_rows, rows_of
from stretto.sampling import SamplingColumns, gumbel, sample

START = LARGEST_TOKEN
KEYS = 4000


def history(*texts: list[tuple[int, dict[int, float]]]) -> Frozen:
    """Of responses whose tokens were drawn from these probabilities."""
    parts, tokens = [], []
    for text in texts:
        ids = np.array([START, *(token for token, _ in text)], np.int32)
        top = Alternatives.none(ids.size, 8)
        for place, (_, row) in enumerate(text, 1):
            for k, (token, p) in enumerate(row.items()):
                top.token_ids[place, k], top.logprobs[place, k] = token, math.log(p)
        drawn = [1.0, *(row[token] for token, row in text)]
        parts.append(rows_of(ids, np.array(drawn, np.float32), top))
        tokens.append(ids)
    offsets = np.cumsum([0, *map(len, tokens)])
    return freeze(np.concatenate(tokens), offsets, None, join_rows(parts))


def chances(frozen: Frozen, state: int, length: int, key: int, position: int = 0) -> dict[int, float]:
    found = room_for_contenders()
    count, left = frozen_contenders(frozen, (0, 0), state, length, np.uint64(key), position, found)
    chance = {int(found.tokens[i]): float(found.estimates[i]) for i in range(count)}
    assert left == pytest.approx(max(0.0, 1.0 - sum(chance.values())), abs=1e-12)
    return chance


def behind(frozen: Frozen, token: int) -> int:
    """The state of the string of one token."""
    edges = range(int(frozen.first[0]), int(frozen.first[1]))
    return next(int(frozen.target[edge]) for edge in edges if frozen.token[edge] == token)


def noise(key: int, tokens: list[int], position: int = 0) -> np.ndarray:
    return gumbel(np.array([key], np.uint64), np.array([position]), np.array(tokens))


ROW = {3: 0.5, 4: 0.3, 5: 0.2}


def test_where_all_is_known_the_first_contender_is_what_sampling_draws() -> None:
    frozen = history([(3, ROW)])
    state = behind(frozen, START)
    logits = np.full((1, 8), -np.inf)
    logits[0, list(ROW)] = np.log(list(ROW.values()))
    how = SamplingColumns(np.ones(1), np.zeros(1, np.int64), np.ones(1), np.zeros(1))
    same = 0
    for key in range(500):
        drawn = sample(logits, np.array([key], np.uint64), np.zeros(1, np.int64), how).token_ids[0]
        chance = chances(frozen, state, 1, key)
        assert sum(chance.values()) == pytest.approx(1.0, abs=1e-3)
        same += max(chance, key=chance.__getitem__) == drawn
    assert same >= 499  # shares are rounded to 1 / WHOLE: two scores may be as near as that


def test_a_token_alone_wins_by_its_own_noise() -> None:
    frozen = history([(3, {3: 0.25})])
    p = round(0.25 * WHOLE) / WHOLE
    for key in range(50):
        (chance,) = chances(frozen, behind(frozen, START), 1, key).values()
        assert chance == pytest.approx(math.exp(-((1 - p) / p) * math.exp(-noise(key, [3])[0])), rel=1e-6)


@pytest.mark.parametrize(("length", "scale", "weight"), [(1, 0.25, 1.0), (4, 1.0, 0.8)])
def test_estimates_are_frequencies_where_probabilities_moved(
    length: int, scale: float, weight: float
) -> None:
    """Logarithms of all probabilities move by Gumbel noise. By 4,000 keys; the standard error of each frequency is
    below 0.008, so that 5 of them miss once in 10^6 runs.
    """
    # What precedes is not the beginning of the response where `length` is 4, and says as much as it may.
    frozen = history([(3, ROW)])
    random = np.random.default_rng(0)
    tokens = list(ROW)
    estimated, won = np.zeros(3), np.zeros(3)
    for key in range(KEYS):
        chance = chances(frozen, behind(frozen, START), length, key)
        moved = np.log(list(ROW.values())) + noise(key, tokens) + scale * random.gumbel(size=3)
        won[int(np.argmax(moved))] += 1 / KEYS
        if length == 1:
            estimated += np.array([chance[v] for v in tokens]) / KEYS
        else:  # the mean of all rows is the same one again
            estimated += np.array([chance[v] for v in tokens]) / (weight + (1 - weight) * UNIGRAM) / KEYS
    assert estimated == pytest.approx(won, abs=5 * 0.008)


def test_the_rest_wins_as_often_as_its_probability_says() -> None:
    """Two tokens are known, 0.4 is left. By 4,000 keys, as above."""
    frozen = history([(3, {3: 0.6})])
    left = 0.0
    for key in range(KEYS):
        left += (1.0 - sum(chances(frozen, behind(frozen, START), 1, key).values())) / KEYS
    assert left == pytest.approx(0.4, abs=5 * 0.008)


def test_tokens_that_history_did_not_take_may_win() -> None:
    frozen = history([(3, ROW)])
    keys = [key for key in range(200) if np.argmax(np.log(list(ROW.values())) + noise(key, list(ROW))) == 2]
    assert keys
    for key in keys:
        chance = chances(frozen, behind(frozen, START), 1, key)
        assert max(chance, key=chance.__getitem__) == 5


def test_without_a_match_the_mean_of_all_rows_is_asked() -> None:
    frozen = history([(3, ROW), (6, {6: 0.9})])
    chance = chances(frozen, 0, 0, 7)
    assert chance.keys() == {3, 4, 5, 6}
    assert 0.0 < sum(chance.values()) <= UNIGRAM


def test_short_matches_are_trusted_less_than_the_beginning_of_the_response() -> None:
    frozen = history([(3, {3: 1.0})])
    state = behind(frozen, START)
    assert chances(frozen, state, 1, 0)[3] == pytest.approx(1.0, abs=1e-3)
    assert chances(frozen, state, 1, 0, position=5)[3] == pytest.approx(0.5 + 0.5 * UNIGRAM, abs=1e-3)
