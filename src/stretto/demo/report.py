"""What the demo's model does before any reinforcement learning: accuracy, entropy, lengths, writers.

Sampled at temperature 1, the temperature of training, with transformers' own `generate`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from stretto.tasks.knights import KnightsAndKnaves

PROBLEMS = 400
BATCH = 100
MAX_NEW_TOKENS = 576
SAMPLING_SEED = 0


def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> tuple[list[list[int]], list[float]]:
    """A response per prompt at temperature 1, with end-of-sequence, and all their tokens' entropies."""
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        **encoded,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=MAX_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(output.logits, dim=1)  # (B, T, V)
    log_probs = torch.log_softmax(logits, dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    responses: list[list[int]] = []
    kept: list[float] = []
    start = encoded["input_ids"].shape[1]
    for row, ids in enumerate(output.sequences[:, start:].tolist()):
        length = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        responses.append(ids[:length])
        kept += entropies[row, :length].tolist()
    return responses, kept


def quantiles(lengths: list[int]) -> dict[str, float]:
    """Response lengths in tokens, end-of-sequence included."""
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return {
        "mean": float(np.mean(lengths)),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": float(max(lengths)),
        "p99_over_p50": p99 / p50,
    }


@torch.no_grad()
def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Sampled behaviour on the held-out problems of the task's default seed."""
    model.eval()
    torch.manual_seed(SAMPLING_SEED)
    task = KnightsAndKnaves(test_size=PROBLEMS)
    rows = task.rows("test")
    responses: list[list[int]] = []
    entropies: list[float] = []
    for start in range(0, len(rows), BATCH):
        prompts = [row["prompt"] for row in rows[start : start + BATCH]]
        new_responses, new_entropies = sample(model, tokenizer, prompts)
        responses += new_responses
        entropies += new_entropies
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = np.array([task.score(text, row) for text, row in zip(texts, rows, strict=True)])
    lengths = [len(response) for response in responses]
    writers = np.array([(text.split() or [""])[0] for text in texts])
    people = np.array([row["people"] for row in rows])
    return {
        "problems": len(rows),
        "temperature": 1.0,
        "accuracy": float(rewards.mean()),
        "token_entropy_nats": float(np.mean(entropies)),
        "response_length": quantiles(lengths),
        "unfinished": float(np.mean([response[-1] != tokenizer.eos_token_id for response in responses])),
        "writers": {
            str(writer): {
                "share": float((writers == writer).mean()),
                "accuracy": float(rewards[writers == writer].mean()),
                "response_length": quantiles(
                    [n for n, w in zip(lengths, writers, strict=True) if w == writer]
                ),
                "accuracy_by_people": {
                    int(n): float(rewards[(writers == writer) & (people == n)].mean())
                    for n in sorted(set(people[writers == writer].tolist()))
                },
            }
            for writer in sorted(set(writers.tolist()))
        },
    }
