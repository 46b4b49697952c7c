"""Attention of the embedded engine: packed tokens against keys and values kept in rows.

A *row* has room for the keys and values of `length` tokens. The first `shared` positions of a request lie in a row
that it shares with all requests of the same prompt, the others in a row of its own, both from offset 0 on. So a
prompt is computed once, stored once, and read from the processor's cache by its siblings one after the other.

The nodes of a draft's tree are stored behind the request's tokens, one after the other, and see their own path only:
a first part that is contiguous, and their ancestors off it, one by one. What is accepted is moved into line.
"""

from __future__ import annotations

import math
from typing import Protocol

import numba
import numpy as np
import torch
import torch.nn.functional as F

from stretto.engine import kernels
from stretto.engine.kernels import BLOCK
from stretto.engine.packing import Packing
from stretto.model import Attend
from stretto.records import BoolArray, FloatArray, IntArray

WORK = (
    1 << 13
)  # positions times heads: a tenth of a millisecond of one thread, from which on a second one pays
WORK_BESIDE_TORCH = (
    1 << 17
)  # the same where torch's idle threads, which spin for a millisecond, are in the way


class KeyValues(Attend, Protocol):
    """An `Attend` that keeps what it saw. `pack` tells it about the tokens of the next forward pass."""

    def pack(self, packing: Packing) -> None: ...

    def move(self, row: IntArray, source: IntArray, target: IntArray) -> None:
        """Move what is kept from offset `source` to `target` of each `row`, (M,), one after the other."""


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

    Keys lie in blocks, (row, head, block, D, BLOCK), so that scores and outputs are both sums of contiguous vectors and
    memory is read from one end to the other.
    One (token, head) is computed by one thread in a fixed order: the result depends on nothing packed beside it.
    bfloat16 models keep keys and values in float32, for which the processor has vector arithmetic.
    """

    _packing: Packing

    def __init__(
        self, layers: int, rows: int, length: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        _start_threads()
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        number = np.float64 if dtype == torch.float64 else np.float32
        blocks = -(-length // BLOCK)
        shapes = (rows, kv_heads, blocks, head_dim, BLOCK), (rows, kv_heads, length, head_dim)
        # numpy asks the kernel for huge pages where torch does not: the reads are spread over many pages.
        self._arrays = [(np.empty(shapes[0], number), np.empty(shapes[1], number)) for _ in range(layers)]
        self.keys = [torch.from_numpy(keys) for keys, _ in self._arrays]
        self.values = [torch.from_numpy(values) for _, values in self._arrays]
        self.heads = kv_heads
        self.threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        self._exponential = _exponential(self.dtype)

    def pack(self, packing: Packing) -> None:
        self._packing = packing
        work = int(packing.visible[packing.single].sum()) * self.heads
        enough = WORK if torch.get_num_threads() == 1 else WORK_BESIDE_TORCH
        numba.set_num_threads(self.threads if work > enough else 1)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        packing = self._packing
        q, k, v = (x[0].transpose(0, 1).to(self.dtype).contiguous() for x in (query, key, value))
        out = torch.empty_like(q)
        keys, values = self._arrays[layer]
        rows = (packing.row, packing.shared_row, packing.shared)
        kernels.store(keys, values, *rows, packing.place, k.numpy(), v.numpy())
        if packing.single.size:
            seen = (packing.visible, packing.first_ancestor, packing.ancestors, packing.single)
            how = (keys.dtype.type(scale), self._exponential)
            kernels.attend(keys, values, *rows, *seen, q.numpy(), *how, out.numpy())
        for begin, end in packing.spans:
            out[begin:end] = self._attend_span(layer, begin, end, q[begin:end], scale)
        return out[None].to(query.dtype)

    def move(self, row: IntArray, source: IntArray, target: IntArray) -> None:
        for keys, values in self._arrays:
            kernels.move(keys, values, row, source, target)

    def _attend_span(self, layer: int, begin: int, end: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention of one request's new tokens, (C, H, D), over all its tokens so far."""
        packing = self._packing
        stop = int(packing.visible[end - 1])
        shared = min(int(packing.shared[begin]), stop)
        row, shared_row = int(packing.row[begin]), int(packing.shared_row[begin])
        keys, values = self.keys[layer], self.values[layer]
        own = stop - shared
        k = torch.cat([_unblocked(keys[shared_row], shared), _unblocked(keys[row], own)], dim=1)
        v = torch.cat([values[shared_row, :, :shared], values[row, :, :own]], dim=1)
        return causal_attention(q, k, v, scale)


def _start_threads() -> None:
    """Have numba start its threads without a change to torch's: it sets OpenMP's number, which is torch's too."""
    threads = torch.get_num_threads()
    numba.set_num_threads(1)  # the first call starts them
    torch.set_num_threads(threads)


def _unblocked(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` keys of a row, (Hkv, count, D), from their blocks (Hkv, blocks, D, BLOCK)."""
    heads, _, size, _ = keys.shape
    used = keys[:, : -(-count // BLOCK)]
    return used.transpose(2, 3).reshape(heads, -1, size)[:, :count]


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
        self._write = on_device(self._places(packing, np.arange(packing.row.size), packing.place))
        single, first = packing.single, packing.first_ancestor
        self._single = on_device(single)
        visible, nodes = packing.visible[single], first[single + 1] - first[single]
        offsets = np.arange(visible.max() if single.size else 0)
        more = np.arange(nodes.max() if single.size else 0)
        where = (
            packing.ancestors[np.where(more < nodes[:, None], first[single][:, None] + more, 0)]
            if more.size
            else more
        )
        places = [
            np.broadcast_to(offsets, (single.size, offsets.size)),
            np.broadcast_to(where + packing.shared[single][:, None], (single.size, more.size)),
        ]
        self._read = on_device(self._places(packing, single[:, None], np.concatenate(places, axis=1)))
        self._visible = on_device(np.concatenate([offsets < visible[:, None], more < nodes[:, None]], axis=1))
        self._span_reads = [
            on_device(self._places(packing, np.int64(begin), np.arange(packing.visible[end - 1])))
            for begin, end in packing.spans
        ]

    def move(self, row: IntArray, source: IntArray, target: IntArray) -> None:
        # All at once: a source is never the target of a later move of its row, since paths are moved in order.
        begin, end = (torch.from_numpy(row * self.length + at).to(self.device) for at in (source, target))
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[end], values[end] = keys[begin], values[begin]

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
        # Where autocast chose another precision than the weights', what is kept stays in theirs.
        keys[self._write] = key[0].transpose(0, 1).to(keys.dtype)
        values[self._write] = value[0].transpose(0, 1).to(values.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if packing.single.size:
            out[self._single] = F.scaled_dot_product_attention(
                q[self._single][:, :, None],
                keys[self._read].transpose(1, 2),
                values[self._read].transpose(1, 2),
                self._visible[:, None, None],
                scale=scale,
                enable_gqa=True,
            )[:, :, 0].to(out.dtype)
        for (begin, end), read in zip(packing.spans, self._span_reads, strict=True):
            k, v = keys[read].transpose(0, 1), values[read].transpose(0, 1)
            out[begin:end] = causal_attention(q[begin:end], k, v, scale)
        return out[None]


def _exponential(dtype: torch.dtype) -> tuple[IntArray, FloatArray, int, int]:
    """For `_exponentials`: integers of the float's size, log2(e) and the Taylor coefficients of 2**f from the highest
    on (error below 1e-8, or 1e-17), where a float keeps its exponent, and the exponent's bias.
    """
    size, degree, shift, bias = (64, 13, 52, 1023) if dtype == torch.float64 else (32, 7, 23, 127)
    taylor = [math.log(2) ** k / math.factorial(k) for k in range(degree, -1, -1)]
    coefficients = np.array([1 / math.log(2), *taylor], f"float{size}")
    return np.empty(0, f"int{size}"), coefficients, shift, bias


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile, or load from numba's cache, the kernels for a model of this dtype."""
    cache = CpuKeyValues(layers=1, rows=1, length=1, kv_heads=1, head_dim=4, dtype=dtype)
    one = np.zeros(1, np.int64)
    zeros = np.zeros(2, np.int64)
    cache.pack(Packing(one, one, one, one, one + 1, zeros, one[:0], [], one))
    tensor = torch.zeros(1, 1, 1, 4, dtype=dtype)
    cache(0, tensor, tensor, tensor, 1.0)
    cache.move(one, one, one)
