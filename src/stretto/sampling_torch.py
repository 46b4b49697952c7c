"""`stretto.sampling.sample` for logits that lie in a torch tensor: as arrays on a CPU, with torch operations elsewhere.

Hashes agree bit for bit with the compiled ones; logarithms may differ in their last bit from one math
library to another, which changes a token only where two scores agree in all but that bit.
"""

from __future__ import annotations

import numpy as np
import torch

from stretto import sampling
from stretto.alternatives import Alternatives
from stretto.records import FloatArray, IntArray
from stretto.sampling import KeyArray, Sampled, SamplingColumns

_BLOCK = 1 << 24  # scores held at a time: 128 MiB each for noise, scores and weights


def sample(
    logits: torch.Tensor, keys: KeyArray, positions: IntArray, how: SamplingColumns, alternatives: int = 0
) -> Sampled:
    """Draw one token per row of `logits` (R, V) of any floating dtype; see `stretto.sampling.sample`."""
    if logits.device.type == "cpu":
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return sampling.sample(wide.contiguous().numpy(), keys, positions, how, alternatives)
    return sample_on_device(logits, keys, positions, how, alternatives)


def sample_on_device(
    logits: torch.Tensor, keys: KeyArray, positions: IntArray, how: SamplingColumns, alternatives: int = 0
) -> Sampled:
    """The same with torch operations on the logits' own device; equally probable alternatives in any order."""
    count, vocabulary = logits.shape
    block = max(1, _BLOCK // vocabulary)
    parts = []
    for start in range(0, count, block):
        rows = np.arange(start, min(start + block, count))
        parts.append(
            _sample_block(logits[start : start + block], keys[rows], positions[rows], how[rows], alternatives)
        )
    columns = torch.cat(parts, dim=1).cpu().numpy()
    top, shown = Alternatives.none(count, alternatives), min(alternatives, vocabulary)
    top.token_ids[:, :shown] = columns[3 : 3 + shown].T
    top.logprobs[:, :shown] = columns[3 + shown :].T
    sampled = Sampled(columns[0].astype(np.int64), columns[1], columns[2], top)
    sampling.refuse_broken(sampled.token_ids)
    return sampled


def gumbel(keys: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Noise (R, V), float64, of all ids for int64 `keys` (the bits of the unsigned ones) and `positions` (R,)."""
    gamma = _signed(sampling.GOLDEN_GAMMA)
    stream = _mix(keys + (positions + 1) * gamma)
    ids = torch.arange(1, vocabulary + 1, device=keys.device)
    hashed = _mix(stream[:, None] + ids[None, :] * gamma)
    high, low = _shift(hashed, 32).double(), (hashed & 0xFFFFFFFF).double()
    uniform = ((high * 2.0**32 + low) + 0.5) / sampling.TWO_TO_64
    return -torch.log(-torch.log1p(-uniform.clamp(max=sampling.LARGEST_UNIFORM)))


def _sample_block(
    logits: torch.Tensor, keys: KeyArray, positions: IntArray, how: SamplingColumns, alternatives: int
) -> torch.Tensor:
    """Token ids, log-probs, raw log-probs, the alternatives' ids and log-probs as (3 + 2 * K, R) float64: ids are exact
    in it. K is at most the vocabulary's size.
    """
    device = logits.device

    def column(array: IntArray | FloatArray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    temperature = column(how.temperature)
    greedy = temperature == 0
    scores = logits.double() / torch.where(greedy, 1.0, temperature)[:, None]
    relative = scores - scores.amax(dim=1, keepdim=True)
    weights = relative.exp()
    total = weights.sum(dim=1)
    kept = total
    if (how.top_k > 0).any() or (how.top_p < 1.0).any() or (how.min_p > 0.0).any():
        weights, kept = _truncate(weights, column(how.top_k), column(how.top_p), column(how.min_p))
    noise = gumbel(column(keys.view(np.int64)), column(positions), logits.shape[1])
    noisy = torch.where(greedy[:, None], scores, scores + noise)
    noisy = noisy.masked_fill((weights == 0) & ~greedy[:, None], -torch.inf)
    token = _first(noisy == noisy.amax(dim=1, keepdim=True))
    chosen = relative.gather(1, token[:, None])[:, 0]
    logprob = torch.where(greedy, 0.0, chosen - kept.log())
    token = torch.where(total.isfinite(), token, -1)
    drawn = torch.stack([token.double(), logprob, chosen - total.log()])
    if not alternatives:
        return drawn
    point = torch.zeros_like(weights).scatter(1, token.clamp(min=0)[:, None], 1.0)
    processed = torch.where(greedy[:, None], point, weights / kept[:, None])
    largest, ids = processed.topk(min(alternatives, processed.shape[1]), dim=1)
    return torch.cat([drawn, torch.where(largest > 0, ids, -1).double().T, largest.log().T])


def _truncate(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`stretto.sampling.truncate` with torch operations."""
    weights = weights.masked_fill(weights < min_p[:, None], 0.0)
    vocabulary = weights.shape[1]
    descending = weights.sort(dim=1, descending=True).values
    mass = descending.cumsum(dim=1)
    count = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)
    goal = top_p * mass.gather(1, count[:, None] - 1)[:, 0]
    nucleus = (mass < goal[:, None]).sum(dim=1) + 1
    count = torch.where(top_p < 1.0, torch.minimum(count, nucleus), count)
    last = count[:, None] - 1
    threshold = descending.gather(1, last)
    equal = weights == threshold
    room = count - (weights > threshold).sum(dim=1)
    kept = (weights > threshold) | (equal & (equal.cumsum(dim=1) <= room[:, None]))
    return torch.where(kept, weights, 0.0), mass.gather(1, last)[:, 0]


def _first(mask: torch.Tensor) -> torch.Tensor:
    """Lowest column (R,) that is True in each row of `mask` (R, V); `argmax` promises no order among equals."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, columns, mask.shape[1] - 1).amin(dim=1)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """splitmix64's mixing function on the bits of int64: products wrap around as unsigned ones do."""
    state = (state ^ _shift(state, 30)) * _signed(sampling.MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(sampling.MIX_2)
    return state ^ _shift(state, 31)


def _shift(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 bits."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned
