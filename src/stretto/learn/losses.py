"""The terms of the policy loss, per token, and the weights that add them up.

Every term is multiplied by a per-token weight that was computed from the whole update batch beforehand, and
summed. So the gradient does not depend on how the batch is split into micro-batches.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from stretto.records import FloatArray, IntArray

Normalization = Literal["token", "sequence", "constant"]


def token_weights(rollout: IntArray, normalization: Normalization, max_new_tokens: int) -> FloatArray:
    """Weights (n,) of n trained tokens, `rollout` (n,) saying whose they are.

    - "token": 1 / n; every token counts the same (DAPO, 2503.14476, section 3.3).
    - "sequence": 1 / (its response's tokens x responses); the mean of the responses' means (GRPO, 2402.03300, eq. 3).
    - "constant": 1 / (`max_new_tokens` x responses); no weight depends on a length (Dr. GRPO, 2503.20783, section 3.1).
    """
    if rollout.size == 0:
        return np.zeros(0, dtype=np.float64)
    _, owner, lengths = np.unique(rollout, return_inverse=True, return_counts=True)
    if normalization == "token":
        return np.full(rollout.size, 1.0 / rollout.size)
    if normalization == "sequence":
        return np.asarray(1.0 / (lengths[owner] * lengths.size), dtype=np.float64)
    return np.full(rollout.size, 1.0 / (max_new_tokens * lengths.size))


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate loss of each token, and whether the clip cut its gradient off; all (n,).

    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) with ratio = exp(logprobs - old_logprobs): PPO
    (1707.06347, eq. 7); unequal bounds are DAPO's clip-higher (2503.14476, section 3.1).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_high = (advantages > 0) & (ratio > 1.0 + clip_high)
    too_low = (advantages < 0) & (ratio < 1.0 - clip_low)
    return loss, too_high | too_low


def importance_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance weights min(exp(old - behaviour), cap) and whether the cap acted; (n,), no gradient.

    They correct for tokens sampled by another policy than the one the ratio starts from: decoupled PPO
    (2505.24298, section 5.2) with the truncation of Ionides (2008).
    """
    weights = torch.exp(old_logprobs.detach() - behaviour_logprobs)
    return weights.clamp(max=cap), weights > cap


def kl_to_reference(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate (n,) of KL(policy || reference) at sampled tokens, never negative.

    The k3 estimator r - 1 - log r with r = reference / policy (Schulman, "Approximating KL divergence", 2020).
    """
    log_ratio = reference_logprobs - logprobs
    return torch.exp(log_ratio) - 1.0 - log_ratio
