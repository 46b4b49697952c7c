from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.learn.packing import pack, trained_tokens
from stretto.records import Rollout
from tests.learn.rollouts import random_batch, rollout


def test_layout_of_a_group_with_a_shared_prompt() -> None:
    rollouts = [rollout([7, 8], [1, 2, 3]), rollout([7, 8], [4, 5], request=1)]
    tokens = trained_tokens(rollouts)
    (micro,) = pack(rollouts, [0, 1], tokens, 100)
    assert micro.token_ids.tolist() == [7, 8, 1, 2, 4]
    assert micro.positions.tolist() == [0, 1, 2, 3, 2]
    assert [s.tolist() for s in micro.sequences] == [[0, 1, 2, 3], [0, 1, 4]]
    assert micro.rows.tolist() == [1, 2, 3, 1, 4]
    assert tokens.targets[micro.tokens].tolist() == [1, 2, 3, 4, 5]


def test_environment_tokens_are_read_but_not_trained() -> None:
    mask = np.array([True, False, False, True, False])
    rollouts = [rollout([7], [1, 2, 3, 4, 5], loss_mask=mask)]
    tokens = trained_tokens(rollouts)
    (micro,) = pack(rollouts, [0], tokens, 100)
    assert micro.token_ids.tolist() == [7, 1, 2, 3]
    assert micro.rows.tolist() == [0, 3]
    assert tokens.targets.tolist() == [1, 4]


def test_nothing_to_pack() -> None:
    rollouts = [rollout([7], [1], loss_mask=np.zeros(1, dtype=np.bool_)), rollout([7], [])]
    assert pack(rollouts, [0, 1], trained_tokens(rollouts), 100) == []


def test_a_longer_sequence_gets_its_own_micro_batch() -> None:
    rollouts = [rollout([1], [2] * n, group=g, request=g) for g, n in enumerate([3, 50, 3])]
    packed = pack(rollouts, [0, 1, 2], trained_tokens(rollouts), 10)
    assert [len(m.token_ids) for m in packed] == [3, 50, 3]


@given(st.integers(0, 10**6), st.integers(1, 120))
def test_every_trained_token_once_within_the_budget(seed: int, budget: int) -> None:
    rollouts: list[Rollout] = random_batch(seed).rollouts
    tokens = trained_tokens(rollouts)
    packed = pack(rollouts, range(len(rollouts)), tokens, budget)
    assert np.concatenate([m.tokens for m in packed]).tolist() == list(range(len(tokens)))
    for micro in packed:
        assert len(micro.token_ids) <= budget or len(micro.sequences) == 1
        owners = list(dict.fromkeys(tokens.rollout[micro.tokens].tolist()))
        for sequence, i in zip(micro.sequences, owners, strict=True):
            whole = np.concatenate([rollouts[i].prompt.token_ids, rollouts[i].token_ids])
            assert micro.token_ids[sequence].tolist() == whole[: len(sequence)].tolist()
            assert micro.positions[sequence].tolist() == list(range(len(sequence)))
            own = tokens.rollout[micro.tokens] == i
            following = len(rollouts[i].prompt.token_ids) + tokens.position[micro.tokens[own]]
            assert micro.rows[own].tolist() == sequence[following - 1].tolist()
