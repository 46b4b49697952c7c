"""Products of a few tokens: right, and the same bits for a token whatever else is in its step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stretto.engine import linear


def _product(
    weight: linear.Float32Array, tokens: linear.Float32Array, pieces: int = 2
) -> linear.Float32Array:
    out = np.full((len(tokens), len(weight)), np.nan, np.float32)
    linear.product(weight, tokens, out, pieces)
    return out


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 23, 24])
@pytest.mark.parametrize(("rows", "size"), [(2, 8), (3, 16), (61, 64), (192, 104)])
def test_it_is_the_product(count: int, rows: int, size: int) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((rows, size), np.float32)
    tokens = random.standard_normal((count, size), np.float32)
    exact = tokens.astype(np.float64) @ weight.T.astype(np.float64)
    # A sum of n float32 products is off by at most n roundings of the sum of their magnitudes.
    bound = size * 2.0**-23 * (np.abs(tokens).astype(np.float64) @ np.abs(weight.T).astype(np.float64))
    assert np.all(np.abs(_product(weight, tokens) - exact) <= bound)


def test_a_token_has_the_same_bits_in_every_step_and_with_every_number_of_threads() -> None:
    random = np.random.default_rng(1)
    weight = random.standard_normal((61, 104), np.float32)
    tokens = random.standard_normal((32, 104), np.float32)
    whole = _product(weight, tokens)
    for count in range(1, 32):
        for pieces in (1, 2, 3, 64):
            assert np.array_equal(_product(weight, tokens[:count], pieces), whole[:count])


@torch.inference_mode()
def test_the_mode_takes_what_fits_and_leaves_the_rest() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 16), torch.randn(24)
    tokens = torch.randn(1, 5, 16)
    with linear.FewTokens(1):
        few = F.linear(tokens, weight, bias)
        many = F.linear(tokens.expand(40, 5, 16), weight, bias)
        double = F.linear(tokens.double(), weight.double())
        narrow = F.linear(tokens, weight[:1])
    ours = _product(weight.numpy(), tokens[0].numpy()) + bias.numpy()
    assert np.array_equal(few[0].numpy(), ours)
    assert torch.equal(many, F.linear(tokens.expand(40, 5, 16), weight, bias))
    assert torch.equal(double, F.linear(tokens.double(), weight.double()))
    assert torch.equal(narrow, F.linear(tokens, weight[:1]))
