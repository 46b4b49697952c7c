"""Random rollouts, and models and learners to try them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from stretto.config import LearnerConfig, SamplingConfig
from stretto.learn.learner import Learner
from stretto.records import Event, IntArray, Prompt, Rollout, UpdateBatch
from tests.models import VOCABULARY, tiny_model


def rollout(
    prompt_ids: Sequence[int] | IntArray,
    token_ids: Sequence[int] | IntArray,
    *,
    group: int = 0,
    request: int = 0,
    reward: float = 1.0,
    version: int = 0,
    **fields: Any,
) -> Rollout:
    n = len(token_ids)
    values: dict[str, Any] = {
        "logprobs": np.full(n, -1.0),
        "raw_logprobs": np.full(n, -1.0),
        "versions": np.full(n, version),
        "loss_mask": np.ones(n, dtype=np.bool_),
        **fields,
    }
    prompt = Prompt(group, f"uid{group}", 0, np.asarray(prompt_ids, dtype=np.int64), {})
    return Rollout(
        request_id=request,
        group_id=group,
        prompt=prompt,
        sample_index=0,
        visit=0,
        key=request,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        reward=reward,
        **values,
    )


def random_batch(
    seed: int,
    *,
    groups: int = 3,
    samples: int = 4,
    version: int = 0,
    longest: int = 14,
    environment: bool = True,
) -> UpdateBatch:
    """Responses of 1 to `longest` tokens, some with environment tokens in the middle; behaviour off by about 0.3."""
    rng = np.random.default_rng(seed)
    rollouts: list[Rollout] = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 9))
        for sample in range(samples):
            n = int(rng.integers(1, longest + 1))
            mask = np.ones(n, dtype=np.bool_)
            if environment and sample == 0 and n > 4:
                mask[2:4] = False
            logprobs = np.where(mask, -3.4 + 0.3 * rng.standard_normal(n), 0.0)
            rollouts.append(
                rollout(
                    prompt,
                    rng.integers(0, VOCABULARY, n),
                    group=group,
                    request=len(rollouts),
                    reward=float(sample % 2) + 0.1 * sample,
                    logprobs=logprobs,
                    raw_logprobs=logprobs - 0.01 * mask,
                    versions=np.full(n, version),
                    loss_mask=mask,
                )
            )
    return UpdateBatch(version, rollouts)


def exact_model(family: str, *, attention: str = "stretto") -> PreTrainedModel:
    """A tiny float64 model whose norms compute in float64 too; transformers' go through float32, where a last bit of
    the sum over a shared prompt makes 1e-8.
    """
    model = tiny_model(family, attention=attention)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
    return model


def _rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    gemma = not hasattr(module, "variance_epsilon")
    weight = 1.0 + module.weight if gemma else module.weight
    return torch.rms_norm(hidden, weight.shape, weight, module.eps if gemma else module.variance_epsilon)


def plain_logprobs(model: PreTrainedModel, one: Rollout, temperature: float) -> torch.Tensor:
    """All log-probs (N, vocabulary) after the prompt, by the model's own forward pass on this sequence alone."""
    ids = torch.from_numpy(np.concatenate([one.prompt.token_ids, one.token_ids]))[None]
    scores = model(input_ids=ids, use_cache=False).logits[0, len(one.prompt.token_ids) - 1 : -1]
    return torch.log_softmax(scores / temperature, dim=-1)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def learner(
    model: PreTrainedModel, *, post: Callable[[Event], None] = lambda _: None, **settings: Any
) -> Learner:
    """A learner with settings of `LearnerConfig` and of its own by name."""
    names = ("lora", "weights", "deterministic", "seed", "total_steps", "shards")
    own = {"total_steps": 10, **{name: settings.pop(name) for name in names if name in settings}}
    sampling = {"temperature": 0.9, "max_new_tokens": 20} | settings.pop("sampling", {})
    config = LearnerConfig.model_validate({"learning_rate": 0.01} | settings)
    return Learner(model, config, sampling=SamplingConfig.model_validate(sampling), post=post, **own)
