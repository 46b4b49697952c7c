"""A decoding step's matrix products, for few tokens: the engine's own kernel against torch's.

All products of one step of a Llama-type model, its output layer included; the defaults are SmolLM2-135M's sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from stretto.bench.pairs import Ratio, alternate, count, require_idle, timed
from stretto.engine import linear


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stretto bench linear", description=__doc__)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--kv", type=int, default=192, help="size of keys and of values")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=count, default=10)
    parser.add_argument("--busy", action="store_true", help="measure although the machine is not idle")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    busy = float("nan") if args.busy else require_idle()
    torch.set_num_threads(args.threads)
    linear.compile_kernels()
    torch.set_num_threads(args.threads)  # numba's threads, when they start, change torch's number
    hidden, wide = args.hidden, args.intermediate
    layer = [(hidden, hidden)] * 2 + [(args.kv, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]
    shapes = layer * args.layers + [(args.vocabulary, hidden)]
    weights = [torch.randn(shape) for shape in shapes]
    cells = [_cell(weights, tokens, args.threads, args.pairs) for tokens in args.tokens]
    if args.json:
        print(
            json.dumps({"threads": args.threads, "machine": platform.machine(), "busy": busy, "cells": cells})
        )
        return 0
    print(
        f"{args.threads} threads, {platform.machine()}, {args.pairs} pairs; torch / ours with 95 % interval"
    )
    for cell in cells:
        print(
            f"{cell['tokens']:>3} tokens: torch {cell['torch_ms']:6.1f} ms, ours {cell['ours_ms']:6.1f} ms, "
            f"{cell['text']}"
        )
    return 0


@torch.inference_mode()
def _cell(weights: list[torch.Tensor], tokens: int, threads: int, pairs: int) -> dict[str, float | int | str]:
    inputs = {size: torch.randn(1, tokens, size) for size in {weight.shape[1] for weight in weights}}

    def products() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    def ours() -> float:
        with linear.FewTokens(threads):
            return timed(products)

    mine, theirs = alternate(ours, lambda: timed(products), pairs)
    ratio = Ratio.of([b / a for a, b in zip(mine, theirs, strict=True)])
    middle = pairs // 2
    return {
        "tokens": tokens,
        "torch_ms": 1e3 * sorted(theirs)[middle],
        "ours_ms": 1e3 * sorted(mine)[middle],
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "text": str(ratio),
    }
