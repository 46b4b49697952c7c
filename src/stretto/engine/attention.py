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

BLOCK = 64  # positions whose keys lie together
PIECES = 4  # into which the tokens are cut for each head, so that threads get the same amount of work
WORK = (
    1 << 13
)  # positions times heads: a tenth of a millisecond of one thread, from which on a second one pays
WORK_BESIDE_TORCH = (
    1 << 17
)  # the same where torch's idle threads, which spin for a millisecond, are in the way
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
        work = int(packing.position[packing.single].sum()) * self.heads
        enough = WORK if torch.get_num_threads() == 1 else WORK_BESIDE_TORCH
        numba.set_num_threads(self.threads if work > enough else 1)

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
            how = (scale_of_dtype, self._exponential)
            _attend(keys, values, *place, packing.single, q.numpy(), *how, out.numpy())
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
                keys[to, h, at // BLOCK, d, at % BLOCK] = new_keys[t, h, d]
                values[to, h, at, d] = new_values[t, h, d]


# Inner loops run from 0 over contiguous vectors: numba turns only such loops into vector instructions, since an
# index that might be negative would count from the end. Maxima and sums are kept per position of a block first: the
# compiler may not reorder a float sum, and one chain of additions would take longer than all the rest. Whole arrays
# are handed over, since every slice that one function passes to another is counted as a reference.


@kernel()
def _score(
    keys: FloatArray,
    row: int,
    head: int,
    query: FloatArray,
    scores: FloatArray,
    count: int,
    largest: FloatArray,
) -> None:
    """Set the first `count` scores to `query` (D,) times the row's keys; `largest` (BLOCK,) keeps their maxima."""
    size = query.size
    for block in range((count + BLOCK - 1) // BLOCK):
        lines = keys[row, head, block]
        part = scores[block * BLOCK : min(count, (block + 1) * BLOCK)]
        for j in range(part.size):
            part[j] = query[0] * lines[0, j]
        for d in range(1, size - 3, 4):
            a, b, c, e = query[d], query[d + 1], query[d + 2], query[d + 3]
            for j in range(part.size):
                part[j] += a * lines[d, j] + b * lines[d + 1, j] + c * lines[d + 2, j] + e * lines[d + 3, j]
        for d in range(size - (size - 1) % 4, size):
            for j in range(part.size):
                part[j] += query[d] * lines[d, j]
        for j in range(part.size):
            largest[j] = max(largest[j], part[j])


@kernel()
def _exponentials(
    scores: FloatArray,
    count: int,
    largest: float,
    totals: FloatArray,
    bits: IntArray,
    coefficients: FloatArray,
    shift: int,
    bias: int,
) -> None:
    """Replace the first `count` scores by exp(score - largest) and add them to `totals` (BLOCK,).

    exp(x) = 2**m * 2**f with m whole and |f| <= 1/2; 2**f is a polynomial, 2**m is written as a float's bits (`bits`
    (BLOCK,) is room for integers of the same size). The library's exp would be called number by number, and take most
    of the attention's time.
    """
    kind, whole = scores.dtype.type, bits.dtype.type
    lowest = kind(2 - bias)  # of the exponents that a normal float has
    values, powers = np.empty_like(totals), bits.view(scores.dtype)
    for block in range((count + BLOCK - 1) // BLOCK):
        part = scores[block * BLOCK : min(count, (block + 1) * BLOCK)]
        for j in range(part.size):
            power = max((part[j] - largest) * coefficients[0], lowest)
            exponent = np.floor(power + kind(0.5))
            bits[j] = (whole(exponent) + whole(bias)) << whole(shift)
            part[j] = power - exponent
            values[j] = coefficients[1]
        for c in range(2, coefficients.size):
            coefficient = coefficients[c]
            for j in range(part.size):
                values[j] = values[j] * part[j] + coefficient
        for j in range(part.size):
            part[j] = values[j] * powers[j]
            totals[j] += part[j]


@kernel()
def _gather(
    values: FloatArray, row: int, head: int, weights: FloatArray, count: int, out: FloatArray
) -> None:
    """Add the row's first `count` values, weighted by `weights`, to `out` (D,)."""
    whole = count - count % 4
    for j in range(0, whole, 4):
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(out.size):
            out[d] += (
                a * values[row, head, j, d]
                + b * values[row, head, j + 1, d]
                + c * values[row, head, j + 2, d]
                + e * values[row, head, j + 3, d]
            )
    for j in range(whole, count):
        for d in range(out.size):
            out[d] += weights[j] * values[row, head, j, d]


@kernel(parallel=True)
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
    exponential: tuple[IntArray, FloatArray, int, int],
    out: FloatArray,
) -> None:
    """Softmax attention of the `single` tokens: query and out (T, H, D), over positions 0 .. position."""
    heads, size = keys.shape[1], query.shape[2]
    group = query.shape[1] // heads
    room, coefficients, shift, bias = exponential
    longest = 1
    for i in range(single.size):
        longest = max(longest, position[single[i]] + BLOCK)
    # Heads outside, tokens inside: siblings, which are packed together, read their prompt's keys while these
    # are in the cache, and so do the query heads of one key head.
    pieces = min(single.size, PIECES)
    for piece in numba.prange(heads * pieces):
        head = piece // pieces
        begin, end = (piece % pieces) * single.size // pieces, (piece % pieces + 1) * single.size // pieces
        ours, theirs = np.empty(longest, query.dtype), np.empty(longest, query.dtype)
        bits = np.empty(BLOCK, room.dtype)
        blockwise = np.empty(BLOCK, query.dtype)
        scaled, mixed = np.empty(size, query.dtype), np.empty(size, query.dtype)
        for i in range(begin, end):
            t = single[i]
            middle = min(shared[t], position[t] + 1)
            own = position[t] + 1 - middle
            for h in range(head * group, (head + 1) * group):
                for d in range(size):
                    scaled[d] = query[t, h, d] * scale
                    mixed[d] = 0
                for j in range(BLOCK):
                    blockwise[j] = -np.inf
                _score(keys, shared_row[t], head, scaled, theirs, middle, blockwise)
                _score(keys, row[t], head, scaled, ours, own, blockwise)
                largest = blockwise[0]
                for j in range(BLOCK):
                    largest = max(largest, blockwise[j])
                    blockwise[j] = 0
                _exponentials(theirs, middle, largest, blockwise, bits, coefficients, shift, bias)
                _exponentials(ours, own, largest, blockwise, bits, coefficients, shift, bias)
                _gather(values, shared_row[t], head, theirs, middle, mixed)
                _gather(values, row[t], head, ours, own, mixed)
                total = blockwise[0]
                for j in range(1, BLOCK):
                    total += blockwise[j]
                for d in range(size):
                    out[t, h, d] = mixed[d] / total


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
    cache.pack(Packing(row=one, shared_row=one, shared=one, position=one, spans=[], single=one))
    tensor = torch.zeros(1, 1, 1, 4, dtype=dtype)
    cache(0, tensor, tensor, tensor, 1.0)
