from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.learn.losses import importance_weights, kl_to_reference, policy_loss, token_weights

OWNERS = np.array([0, 0, 0, 4, 4, 9])


def test_token_weights_are_equal() -> None:
    assert token_weights(OWNERS, "token", 100).tolist() == [1 / 6] * 6


def test_sequence_weights_give_each_response_the_same() -> None:
    assert token_weights(OWNERS, "sequence", 100).tolist() == [1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6, 1 / 3]


def test_constant_weights_depend_on_no_length() -> None:
    assert token_weights(OWNERS, "constant", 100).tolist() == [1 / 300] * 6


def test_no_tokens_no_weights() -> None:
    assert token_weights(np.zeros(0, dtype=np.int64), "sequence", 5).size == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope", "clipped"),
    [
        (1.25, 1.0, True, False),  # above 1.2, below 1.3
        (1.35, 1.0, False, True),
        (0.85, -1.0, True, False),
        (0.75, -1.0, False, True),
        (1.35, -1.0, True, False),  # the pessimistic side is never clipped
        (0.75, 1.0, True, False),
        (0.5, 0.0, False, False),
    ],
)
def test_clip_is_asymmetric_and_pessimistic(
    ratio: float, advantage: float, slope: bool, clipped: bool
) -> None:
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, cut = policy_loss(
        logprobs,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-ratio * advantage if slope else 0.0, abs=1e-12)
    assert bool(cut) is clipped
    bound = min(max(ratio, 0.8), 1.3)
    assert loss.item() == pytest.approx(-min(ratio * advantage, bound * advantage))


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    old = torch.log(torch.tensor([0.5, 0.2, 0.9])).requires_grad_()
    weights, capped = importance_weights(old, torch.log(torch.tensor([0.25, 0.4, 0.3])), cap=2.5)
    assert weights.tolist() == pytest.approx([2.0, 0.5, 2.5])
    assert capped.tolist() == [False, False, True]
    assert not weights.requires_grad


@given(st.lists(st.floats(-8, 0), min_size=2, max_size=8), st.integers(0, 2**31))
def test_kl_estimate_is_unbiased_and_not_negative(scores: list[float], seed: int) -> None:
    policy = torch.log_softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
    noise = torch.randn(len(scores), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    reference = torch.log_softmax(policy + noise, dim=0)
    estimates = kl_to_reference(policy, reference)
    assert (estimates >= -1e-15).all()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimates).sum(), exact, rtol=1e-9, atol=1e-12)
