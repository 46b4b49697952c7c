"""Products of a few tokens with a model's matrices on a CPU: a draft's nodes for the price of reading the weights.

A decoding step of a model that is larger than the cache takes as long as its weights take to read, however many tokens
it has, if each weight is used for all of them while it is in a register. The libraries that torch calls are made
for many rows: between 2 and 16 they take about twice the time of one.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch.overrides import TorchFunctionMode

from stretto.sampling import kernel

LANES = 8  # float32 numbers of one vector
ROWS, TOKENS = 2, 4  # of a tile: as many sums as there are vector registers for, next to what is multiplied
MOST = 24  # tokens, beyond which torch is as fast

Float32Array = npt.NDArray[np.float32]
VECTOR = ir.VectorType(ir.FloatType(), LANES)
INDEX, INT = ir.IntType(64), ir.IntType(32)


@intrinsic
def _tile(context: Any, weight: Any, tokens: Any, out: Any, first_row: Any, first_token: Any) -> Any:
    """`_tile(weight (N, K), tokens (M, K), out (M, N), first_row, first_token)` sets `out` for ROWS rows and TOKENS
    tokens, or as many as there are from the first one on. K is a multiple of LANES.

    Written as vector instructions, since no loop that numba compiles keeps its sums in registers. Every sum has the
    same order, so a token's result depends on nothing beside it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args[:3], args[:3], strict=True)
        ]
        _emit(builder, arrays, args[3], args[4])
        return context.get_dummy_value()

    return types.void(weight, tokens, out, first_row, first_token), generate


def _emit(builder: Any, arrays: Any, first_row: Any, first_token: Any) -> None:
    """The instructions of `_tile`: a loop over K in steps of LANES, with a vector of sums for each row and token."""
    weight, tokens, out = arrays
    last_token, size = (builder.extract_value(tokens.shape, i) for i in range(2))
    last_token = builder.sub(last_token, INDEX(1))
    rows = [builder.add(first_row, INDEX(r)) for r in range(ROWS)]
    chosen = []
    for m in range(TOKENS):  # beyond the last one it is computed again
        token = builder.add(first_token, INDEX(m))
        chosen.append(builder.select(builder.icmp_signed("<", token, last_token), token, last_token))

    def vector(array: Any, line: Any) -> Any:
        start = builder.gep(array.data, [builder.add(builder.mul(line, size), k)])
        return builder.load(builder.bitcast(start, VECTOR.as_pointer()), align=4)

    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(INDEX)
    sums = [[builder.phi(VECTOR) for _ in range(TOKENS)] for _ in range(ROWS)]
    # The next rows, which begin behind these, are on their way while these are computed.
    behind = builder.mul(builder.add(first_row, INDEX(ROWS)), size)
    _prefetch(builder, builder.gep(weight.data, [builder.add(behind, builder.mul(k, INDEX(ROWS)))]))
    multiply_add = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    weights, values = [vector(weight, row) for row in rows], [vector(tokens, token) for token in chosen]
    following = [
        [builder.call(multiply_add, [weights[r], values[m], sums[r][m]]) for m in range(TOKENS)]
        for r in range(ROWS)
    ]
    next_k = builder.add(k, INDEX(LANES))
    k.add_incoming(INDEX(0), before)
    k.add_incoming(next_k, loop)
    for r in range(ROWS):
        for m in range(TOKENS):
            sums[r][m].add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
            sums[r][m].add_incoming(following[r][m], loop)
    builder.cbranch(builder.icmp_signed("<", next_k, size), loop, after)
    builder.position_at_end(after)
    columns = builder.extract_value(weight.shape, 0)
    for r in range(ROWS):
        for m in range(TOKENS):
            place = builder.add(builder.mul(chosen[m], columns), rows[r])
            builder.store(_total(builder, following[r][m]), builder.gep(out.data, [place]))


def _total(builder: Any, vector: Any) -> Any:
    """The sum of a vector, halves added to each other until one number is left."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        halves = [
            builder.shuffle_vector(
                vector,
                vector,
                ir.Constant(ir.VectorType(INT, lanes), list(range(half * lanes, (half + 1) * lanes))),
            )
            for half in range(2)
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, INT(0))


def _prefetch(builder: Any, pointer: Any) -> None:
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT]), "llvm.prefetch.p0i8"
    )
    read, keep, data = INT(0), INT(3), INT(1)
    builder.call(function, [builder.bitcast(pointer, byte), read, keep, data])


@kernel(parallel=True)
def product(weight: Float32Array, tokens: Float32Array, out: Float32Array, pieces: int) -> None:
    """Set `out` (M, N) to `tokens` (M, K) times the transpose of `weight` (N, K); contiguous, N >= ROWS, K a multiple
    of LANES.

    Threads share the rows of `weight`, cut into `pieces`.
    """
    blocks = (weight.shape[0] + ROWS - 1) // ROWS
    for piece in numba.prange(pieces):
        for block in range(piece * blocks // pieces, (piece + 1) * blocks // pieces):
            first = min(block * ROWS, weight.shape[0] - ROWS)
            for token in range(0, tokens.shape[0], TOKENS):
                _tile(weight, tokens, out, first, token)  # type: ignore[call-arg]


class FewTokens(TorchFunctionMode):
    """While entered, `linear` of at most MOST float32 tokens on a CPU is `product`; needs no gradient."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = min(threads, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and _fits(*args):
            return self._linear(*args)
        return func(*args, **(kwargs or {}))

    def _linear(
        self, tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.empty((*tokens.shape[:-1], weight.shape[0]))
        numba.set_num_threads(self.threads)
        product(
            weight.detach().numpy(),
            tokens.reshape(-1, tokens.shape[-1]).contiguous().numpy(),
            out.view(-1, weight.shape[0]).numpy(),
            self.threads,
        )
        return out if bias is None else out.add_(bias)


def _fits(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return (
        tokens.dtype == weight.dtype == torch.float32
        and tokens.shape[-1] == weight.shape[1]  # torch says what is wrong
        and 0 < tokens.numel() <= MOST * tokens.shape[-1]
        and weight.shape[0] >= ROWS
        and weight.shape[1] % LANES == 0
        and weight.is_contiguous()
        and weight.device.type == "cpu"
    )


def compile_kernels() -> None:
    """Compile, or load from numba's cache, what `FewTokens` needs."""
    weight = np.zeros((ROWS, LANES), np.float32)
    product(weight, weight[:1], np.zeros((1, ROWS), np.float32), 1)
