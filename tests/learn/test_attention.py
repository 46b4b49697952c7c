from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.learn.attention import MAX_PADDING, PackedCausalAttention
from stretto.records import IntArray

CPU = torch.device("cpu")


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """(H, L, D) of one sequence, written out."""
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = (q @ k.transpose(1, 2)) * scale
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_outputs_and_gradients_with_shared_prompts(kv_heads: int) -> None:
    prompt = np.arange(3)
    sequences: list[IntArray] = [
        np.concatenate([prompt, [3, 4, 5]]),
        np.concatenate([prompt, [6]]),
        np.arange(7, 40),
        np.array([40]),
    ]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, 41, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    weight = torch.randn(1, 41, 4, 8, generator=generator, dtype=torch.float64)
    output = PackedCausalAttention(sequences, 41, CPU)(0, inputs[0], inputs[1], inputs[2], 0.3)
    found = torch.autograd.grad((output * weight).sum(), inputs)

    expected = torch.zeros_like(output)
    done: set[int] = set()
    for rows in sequences:
        q, k, v = (x[0][:, rows] for x in inputs)
        own = softmax_attention(q, k, v, 0.3).transpose(0, 1)
        for i, row in enumerate(rows.tolist()):
            if row not in done:
                expected = expected.index_put((torch.tensor([0]), torch.tensor([row])), own[i])
        done |= set(rows.tolist())
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_rows_of_no_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="row 2"):
        PackedCausalAttention([np.arange(2)], 3, CPU)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_rectangles_hold_every_sequence_with_little_padding(lengths: list[int]) -> None:
    starts = np.cumsum([0, *lengths])
    sequences: list[IntArray] = [np.arange(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    attend = PackedCausalAttention(sequences, int(starts[-1]), CPU)
    assert sum(count for count, _ in attend.shapes) == len(lengths)
    assert 0 <= attend.padding <= MAX_PADDING + 1e-12
