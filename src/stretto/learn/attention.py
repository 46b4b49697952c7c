"""Attention for training: every sequence of a packed micro-batch attends causally to itself alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from stretto.records import IntArray

MAX_PADDING = 0.05
"""Share of padding that a bucket of sequences of unlike length may have. Padding exists in attention only. One
call per sequence would be exact too, but on many short sequences two threads spend most of it waiting."""


class PackedCausalAttention:
    """`stretto.model.Attend` over `sequences`: arrays of row indices, which may share rows (a group's prompt).

    Sequences of similar length are gathered into rectangles, padded on the right: under a causal mask no real
    token sees the padding, so no other mask is needed and fused kernels apply. A shared row gets the same output
    in each of its sequences; the first one's is kept. Gradients reach its keys and values from all of them.
    """

    def __init__(self, sequences: Sequence[IntArray], num_tokens: int, device: torch.device) -> None:
        self.shapes: list[tuple[int, int]] = []  # (sequences, length) of each rectangle
        gather: list[IntArray] = []
        scatter = np.full(num_tokens, -1, dtype=np.int64)
        offset = 0
        for bucket in _buckets([len(s) for s in sequences]):
            longest = len(sequences[bucket[0]])
            self.shapes.append((len(bucket), longest))
            for i in bucket:
                rows = sequences[i]
                gather.append(np.pad(rows, (0, longest - len(rows)), mode="edge"))
                first = scatter[rows] < 0
                scatter[rows[first]] = offset + np.flatnonzero(first)
                offset += longest
        if (scatter < 0).any():
            raise ValueError(f"row {int(np.argmin(scatter))} belongs to no sequence")
        self.padding = 1.0 - sum(len(s) for s in sequences) / offset
        self._gather = torch.from_numpy(np.concatenate(gather)).to(device)
        self._scatter = torch.from_numpy(scatter).to(device)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`query` (1, H, T, D), `key` and `value` (1, Hkv, T, D) -> (1, T, H, D)."""
        heads, head_dim = query.shape[1], query.shape[3]
        if key.shape[1] != heads and query.is_cuda:
            # The fused CUDA kernel for float32 knows no grouped heads; the fallback would hold all scores.
            key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        sizes = [count * length for count, length in self.shapes]
        gathered = [
            x[0].transpose(0, 1).index_select(0, self._gather).split(sizes) for x in (query, key, value)
        ]
        outputs = []
        for shape, *parts in zip(self.shapes, *gathered, strict=True):
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in parts)
            output = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != heads
            )
            outputs.append(output.transpose(1, 2).reshape(-1, heads, head_dim))
        return torch.cat(outputs).index_select(0, self._scatter)[None]


def _buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences in buckets, longest first, each with at most `MAX_PADDING` padding."""
    buckets: list[list[int]] = []
    filled = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if buckets:
            padded = lengths[buckets[-1][0]] * (len(buckets[-1]) + 1)
            if filled + lengths[i] >= padded * (1.0 - MAX_PADDING):
                buckets[-1].append(i)
                filled += lengths[i]
                continue
        buckets.append([i])
        filled = lengths[i]
    return buckets
