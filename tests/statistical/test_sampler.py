"""The sampler draws from the exact distribution: chi-square tests with fixed seeds.

Each case compares 200,000 draws with exact probabilities and fails below p = 1e-5. A right sampler would fail with
a new seed once in about 5,000 runs of all cases together; the seeds are fixed, so it never does by chance.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from stretto import sampling_torch
from stretto.records import FloatArray, Purpose
from stretto.sampling import SamplingColumns, request_key, sample

DRAWS = 200_000
VOCABULARY = 16
CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
]


def exact(logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float) -> FloatArray:
    """Probabilities by the definition: temperature, min-p, top-k, top-p, each followed by normalisation."""
    p = np.exp(logits / temperature)
    p /= p.sum()
    p[p < min_p * p.max()] = 0.0
    order = np.lexsort((np.arange(p.size), -p))
    if top_k:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    if top_p < 1.0:
        needed = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        p[order[needed:]] = 0.0
    result: FloatArray = p / p.sum()
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("where", ["compiled", "torch"])
def test_draws_follow_the_exact_probabilities(case: dict[str, float], where: str) -> None:
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **case}
    logits = np.random.default_rng(4).normal(0.0, 1.5, VOCABULARY)
    keys = np.array([request_key(5, Purpose.TRAIN, "prompt", 0, i, 0) for i in range(2000)], np.uint64)
    keys, positions = np.repeat(keys, DRAWS // 2000), np.tile(np.arange(DRAWS // 2000), 2000)
    how = SamplingColumns(
        np.full(DRAWS, settings["temperature"]),
        np.full(DRAWS, int(settings["top_k"])),
        np.full(DRAWS, settings["top_p"]),
        np.full(DRAWS, settings["min_p"]),
    )
    rows = np.broadcast_to(logits, (DRAWS, VOCABULARY)).copy()
    if where == "compiled":
        drawn = sample(rows, keys, positions, how)
    else:
        drawn = sampling_torch.sample_on_device(torch.from_numpy(rows), keys, positions, how)
    expected = exact(
        logits, settings["temperature"], int(settings["top_k"]), settings["top_p"], settings["min_p"]
    )
    counts = np.bincount(drawn.token_ids, minlength=VOCABULARY)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], DRAWS * expected[possible]).pvalue > 1e-5
    assert np.abs(np.exp(drawn.logprobs) - expected[drawn.token_ids]).max() < 1e-12
