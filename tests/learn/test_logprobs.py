from __future__ import annotations

import pytest
import torch

from stretto.learn.logprobs import token_logprobs
from tests.models import VOCABULARY, tiny_model


@pytest.mark.parametrize("chunk_scores", [1, 3 * VOCABULARY, 1 << 20])
def test_chunks_equal_the_plain_log_softmax(chunk_scores: int) -> None:
    model = tiny_model("llama")
    head = model.get_output_embeddings().weight
    hidden = torch.randn(
        10, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).requires_grad_()
    targets = torch.arange(10) * 3
    logprobs, entropy = token_logprobs(
        model, hidden, targets, 0.7, entropy_grad=True, chunk_scores=chunk_scores
    )
    plain = torch.log_softmax(hidden @ head.T / 0.7, dim=-1)
    torch.testing.assert_close(logprobs, plain[torch.arange(10), targets], rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1), rtol=0, atol=1e-12)
    found = torch.autograd.grad(logprobs.sum() + 2 * entropy.sum(), [hidden, head])
    wanted = torch.autograd.grad(
        plain[torch.arange(10), targets].sum() - 2 * (plain.exp() * plain).sum(), [hidden, head]
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_gradcheck_in_chunks() -> None:
    model = tiny_model("qwen2")
    hidden = torch.randn(
        5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).requires_grad_()
    targets = torch.tensor([0, 4, 30, 4, 7])

    def both(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(model, h, targets, 1.3, entropy_grad=True, chunk_scores=2 * VOCABULARY)

    assert torch.autograd.gradcheck(both, (hidden,))


def test_entropy_without_gradient_by_default() -> None:
    model = tiny_model("gpt2")
    hidden = torch.randn(
        4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()
    logprobs, entropy = token_logprobs(model, hidden, torch.arange(4), 1.0)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_bfloat16_scores_are_normalised_in_float32() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    logprobs, entropy = token_logprobs(model, hidden, torch.arange(4), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
