"""Attention of the embedded engine: packed tokens against keys and values kept in rows.

A *row* has room for the keys and values of `length` tokens. The first `shared` positions of a request lie in a row
that it shares with all requests of the same prompt, the others in a row of its own, both from offset 0 on. So a
prompt is computed once, stored once, and read from the processor's cache by its siblings one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numba
import numpy as np
import torch
import torch.nn.functional as F

from stretto.model import Attend
from stretto.records import BoolArray, FloatArray, IntArray
from stretto.sampling import kernel

SPAN = 32  # from this many new tokens of one request on, matrix products beat the exact-length kernel


@dataclass(slots=True)
class Packing:
    """Where T packed tokens belong; a request's new tokens lie together, in order of position."""

    row: IntArray  # (T,) the request's own row
    shared_row: IntArray  # (T,) the row of its prompt
    shared: IntArray  # (T,) how many positions lie there
    position: IntArray  # (T,)
    spans: list[tuple[int, int]]  # begin and end of the runs that are at least SPAN long
    single: IntArray  # (<= T,) indices of all other tokens


class KeyValues(Attend, Protocol):
    """An `Attend` that keeps what it saw. `pack` tells it about the tokens of the next forward pass."""

    def pack(self, packing: Packing) -> None: ...


def key_values(
    layers: int,
    rows: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KeyValues:
    """Rows for the device; a CPU gives memory only to rows that are used."""
    if device.type == "cpu":
        return CpuKeyValues(layers, rows, length, kv_heads, head_dim, dtype)
    return TorchKeyValues(layers, rows, length, kv_heads, head_dim, dtype, device)


class CpuKeyValues:
    """Single tokens attend over their exact lengths in a compiled kernel; long runs use torch's attention.

    Keys lie transposed, (row, head, D, length), so that scores and outputs are both sums of contiguous vectors.
    One (token, head) is computed by one thread in a fixed order: the result depends on nothing packed beside it.
    bfloat16 models keep keys and values in float32, for which the processor has vector arithmetic.
    """

    _packing: Packing

    def __init__(
        self, layers: int, rows: int, length: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.keys = [torch.empty(rows, kv_heads, head_dim, length, dtype=self.dtype) for _ in range(layers)]
        self.values = [torch.empty(rows, kv_heads, length, head_dim, dtype=self.dtype) for _ in range(layers)]
        self._arrays = [(k.numpy(), v.numpy()) for k, v in zip(self.keys, self.values, strict=True)]

    def pack(self, packing: Packing) -> None:
        self._packing = packing
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        packing = self._packing
        q, k, v = (x[0].transpose(0, 1).to(self.dtype).contiguous() for x in (query, key, value))
        out = torch.empty_like(q)
        keys, values = self._arrays[layer]
        place = (packing.row, packing.shared_row, packing.shared, packing.position)
        _store(keys, values, *place, k.numpy(), v.numpy())
        scale_of_dtype = keys.dtype.type(scale)
        if packing.single.size:
            _attend(keys, values, *place, packing.single, q.numpy(), scale_of_dtype, out.numpy())
        for begin, end in packing.spans:
            out[begin:end] = self._attend_span(layer, begin, end, q[begin:end], scale)
        return out[None].to(query.dtype)

    def _attend_span(self, layer: int, begin: int, end: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention of one request's new tokens, (C, H, D), over all its tokens so far."""
        packing = self._packing
        stop = int(packing.position[end - 1]) + 1
        shared = min(int(packing.shared[begin]), stop)
        row, shared_row = int(packing.row[begin]), int(packing.shared_row[begin])
        keys, values = self.keys[layer], self.values[layer]
        own = stop - shared
        k = torch.cat([keys[shared_row, :, :, :shared], keys[row, :, :, :own]], dim=2).transpose(1, 2)
        v = torch.cat([values[shared_row, :, :shared], values[row, :, :own]], dim=1)
        return causal_attention(q, k, v, scale)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries (C, H, D) of the last C of n tokens over keys and values (Hkv, n, D); returns (C, H, D)."""
    new, tokens = q.shape[0], k.shape[1]
    mask = None
    if new != tokens:
        mask = torch.ones(new, tokens, dtype=torch.bool, device=q.device).tril(tokens - new)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


class TorchKeyValues:
    """The same with torch operations only, for other devices: single tokens are padded to the longest."""

    _packing: Packing

    def __init__(
        self,
        layers: int,
        rows: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (rows * length, kv_heads, head_dim)
        self.length = length
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.device = device

    def pack(self, packing: Packing) -> None:
        def on_device(array: IntArray | BoolArray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        self._packing = packing
        self._write = on_device(self._places(packing, np.arange(packing.row.size), packing.position))
        self._single = on_device(packing.single)
        position = packing.position[packing.single]
        offsets = np.arange(position.max() + 1 if position.size else 0)
        self._read = on_device(self._places(packing, packing.single[:, None], offsets[None, :]))
        self._visible = on_device(offsets[None, :] <= position[:, None])
        self._span_reads = [
            on_device(self._places(packing, np.int64(begin), np.arange(packing.position[end - 1] + 1)))
            for begin, end in packing.spans
        ]

    def _places(self, packing: Packing, token: IntArray | np.int64, position: IntArray) -> IntArray:
        """Index into the flattened rows of `position`s of the requests that the packed `token`s belong to."""
        shared = packing.shared[token]
        in_shared = packing.shared_row[token] * self.length + position
        in_own = packing.row[token] * self.length + position - shared
        return np.where(position < shared, in_shared, in_own)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        packing = self._packing
        q = query[0].transpose(0, 1)
        keys, values = self.keys[layer], self.values[layer]
        keys[self._write] = key[0].transpose(0, 1)
        values[self._write] = value[0].transpose(0, 1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if packing.single.size:
            out[self._single] = F.scaled_dot_product_attention(
                q[self._single][:, :, None],
                keys[self._read].transpose(1, 2),
                values[self._read].transpose(1, 2),
                self._visible[:, None, None],
                scale=scale,
                enable_gqa=True,
            )[:, :, 0]
        for (begin, end), read in zip(packing.spans, self._span_reads, strict=True):
            k, v = keys[read].transpose(0, 1), values[read].transpose(0, 1)
            out[begin:end] = causal_attention(q[begin:end], k, v, scale)
        return out[None]


@kernel()
def _store(
    keys: FloatArray,
    values: FloatArray,
    row: IntArray,
    shared_row: IntArray,
    shared: IntArray,
    position: IntArray,
    new_keys: FloatArray,
    new_values: FloatArray,
) -> None:
    """Write T new keys and values, (T, Hkv, D), to their places."""
    tokens, heads, size = new_keys.shape
    for t in range(tokens):
        to, at = row[t], position[t] - shared[t]
        if at < 0:
            to, at = shared_row[t], position[t]
        for h in range(heads):
            for d in range(size):
                keys[to, h, d, at] = new_keys[t, h, d]
                values[to, h, at, d] = new_values[t, h, d]


# Both inner loops run from 0 over contiguous vectors: numba turns only such loops into vector instructions,
# since an index that might be negative would count from the end.


@kernel(fastmath=True)
def _score(keys: FloatArray, query: FloatArray, scores: FloatArray) -> None:
    """Add the products of `query` (D,) with the first n of `keys` (D, length) to `scores` (n,)."""
    size = query.size
    for d in range(0, size - 3, 4):
        a, b, c, e = query[d], query[d + 1], query[d + 2], query[d + 3]
        for j in range(scores.size):
            scores[j] += a * keys[d, j] + b * keys[d + 1, j] + c * keys[d + 2, j] + e * keys[d + 3, j]
    for d in range(size - size % 4, size):
        for j in range(scores.size):
            scores[j] += query[d] * keys[d, j]


@kernel(fastmath=True)
def _gather(values: FloatArray, weights: FloatArray, out: FloatArray) -> None:
    """Add the first n of `values` (length, D), weighted by `weights` (n,), to `out` (D,)."""
    for j in range(0, weights.size - 3, 4):
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(out.size):
            out[d] += a * values[j, d] + b * values[j + 1, d] + c * values[j + 2, d] + e * values[j + 3, d]
    for j in range(weights.size - weights.size % 4, weights.size):
        for d in range(out.size):
            out[d] += weights[j] * values[j, d]


@kernel(parallel=True, fastmath=True)
def _attend(
    keys: FloatArray,
    values: FloatArray,
    row: IntArray,
    shared_row: IntArray,
    shared: IntArray,
    position: IntArray,
    single: IntArray,
    query: FloatArray,
    scale: float,
    out: FloatArray,
) -> None:
    """Softmax attention of the `single` tokens: query and out (T, H, D), over positions 0 .. position."""
    group = query.shape[1] // keys.shape[1]
    # Heads outside, tokens inside: threads get equal shares of long and short, and siblings,
    # which are packed together, read their prompt's keys while these are in the cache.
    for item in numba.prange(single.size * query.shape[1]):
        t, h = single[item % single.size], item // single.size
        head = h // group
        end = position[t] + 1
        middle = min(shared[t], end)
        scaled = np.empty(query.shape[2], query.dtype)
        mixed = np.zeros(query.shape[2], query.dtype)
        for d in range(scaled.size):
            scaled[d] = query[t, h, d] * scale
        scores = np.zeros(end, query.dtype)
        _score(keys[shared_row[t], head], scaled, scores[:middle])
        _score(keys[row[t], head], scaled, scores[middle:])
        largest = scores[0]
        for j in range(end):
            largest = max(largest, scores[j])
        total = largest - largest
        for j in range(end):
            scores[j] = math.exp(scores[j] - largest)
            total += scores[j]
        _gather(values[shared_row[t], head], scores[:middle], mixed)
        _gather(values[row[t], head], scores[middle:], mixed)
        for d in range(scaled.size):
            out[t, h, d] = mixed[d] / total


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile, or load from numba's cache, the kernels for a model of this dtype."""
    cache = CpuKeyValues(layers=1, rows=1, length=1, kv_heads=1, head_dim=4, dtype=dtype)
    one = np.zeros(1, np.int64)
    cache.pack(Packing(row=one, shared_row=one, shared=one, position=one, spans=[], single=one))
    tensor = torch.zeros(1, 1, 1, 4, dtype=dtype)
    cache(0, tensor, tensor, tensor, 1.0)
