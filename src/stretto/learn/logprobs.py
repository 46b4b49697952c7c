"""Log-probabilities of given tokens from hidden states, with the vocabulary's scores held a chunk at a time."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stretto.model import Attend, hidden_states, logits

CHUNK_SCORES = 1 << 25
"""Scores (tokens x vocabulary) held at once: 128 MiB in float32."""


class Scorer(nn.Module):
    """From packed tokens to log-probabilities in one module call, in which a sharded model gathers its weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of `targets` (n,), each predicted by one of `rows` (n,) of `token_ids` (T,) at `positions`
        (T,), and entropies (n,): see `token_logprobs`.
        """
        hidden = hidden_states(self.model, token_ids, positions, attend).index_select(0, rows)
        return token_logprobs(self.model, hidden, targets, temperature, entropy_grad=entropy_grad)


def token_logprobs(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    entropy_grad: bool = False,
    chunk_scores: int = CHUNK_SCORES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` (n,) and entropies (n,) in nats under softmax(logits / temperature).

    `hidden` is (n, hidden); results are float32, or float64 if the model is. Where more than `chunk_scores` scores
    would be needed, each chunk's are computed again in the backward pass instead of being kept.
    The entropies carry a gradient only if `entropy_grad`.
    """
    vocabulary: int = model.get_output_embeddings().weight.shape[0]
    rows = max(1, chunk_scores // vocabulary)
    if len(targets) <= rows:
        return _chunk(model, hidden, targets, temperature, entropy_grad)
    parts = []
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        if torch.is_grad_enabled():
            parts.append(
                checkpoint(
                    _chunk,
                    model,
                    h,
                    t,
                    temperature,
                    entropy_grad,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        else:
            parts.append(_chunk(model, h, t, temperature, entropy_grad))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits(model, hidden)
    if scores.dtype != torch.float64:
        scores = scores.float()
    logprobs = torch.log_softmax(scores / temperature, dim=-1)
    chosen = logprobs.gather(-1, targets[:, None]).sum(-1)  # not a view: FSDP2 hooks into what comes out
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return chosen, entropy
