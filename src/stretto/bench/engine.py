"""The embedded engine against transformers' `generate` and its continuous batching: useful tokens per second.

Both sides run the same model on the same threads, draw at temperature 1, and bring every request to the same
prescribed length; useful tokens are those. `generate` pads: it computes every sequence up to the longest one's length.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

from stretto.bench.pairs import Ratio, alternate, count, require_idle, timed
from stretto.config import ModelConfig
from stretto.engine.embedded import EmbeddedEngine
from stretto.model import load_model, location
from stretto.records import Request, SamplingParams
from stretto.sampling import request_key

PROMPT_TOKENS = 48
RIVALS = ("generate", "continuous")
WORKLOADS = ("long-tailed", "equal")


def lengths(workload: str, requests: int, longest: int) -> list[int]:
    """Response lengths: all `longest`/2, or lognormal (sigma 1.2) with median `longest`/12, cut at `longest`."""
    if workload == "equal":
        return [longest // 2] * requests
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 12), 1.2, requests)
    return [int(n) for n in np.clip(drawn, 1, longest)]


def prompts(requests: int, vocabulary: int) -> list[list[int]]:
    """Random token ids, all different: no side can share prefixes."""
    drawn = np.random.default_rng(1).integers(0, vocabulary, (requests, PROMPT_TOKENS))
    return [[int(token) for token in row] for row in drawn]


class Ours:
    """The embedded engine; one object, as in training."""

    def __init__(self, model: PreTrainedModel, slots: int, longest: int) -> None:
        self.engine = EmbeddedEngine(
            model,
            None,
            worker=0,
            max_num_seqs=slots,
            max_model_len=PROMPT_TOKENS + longest,
            max_num_batched_tokens=2048,
        )
        self.calls = 0

    def run(self, inputs: list[list[int]], wanted: list[int]) -> None:
        self.calls += 1
        requests = [
            Request(
                id=i,
                attempt=self.calls,
                group=i,
                prompt_ids=np.array(ids),
                token_ids=np.empty(0, np.int64),
                turn_start=0,
                key=request_key(0, "train", str(i), 0, 0, self.calls),  # type: ignore[arg-type]
                sampling=SamplingParams(max_new_tokens=n),
            )
            for i, (ids, n) in enumerate(zip(inputs, wanted, strict=True))
        ]
        self.engine.submit(requests)
        while self.engine.has_work:
            self.engine.step()


class _Prescribed(StoppingCriteria):
    """Ends each sequence at its prescribed length."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted = torch.tensor(wanted)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
        done: Any = input_ids.shape[1] - PROMPT_TOKENS >= self.wanted
        return done  # type: ignore[no-any-return]


def generate(model: PreTrainedModel) -> Callable[[list[list[int]], list[int]], None]:
    """transformers' `generate`: one padded batch."""

    def run(inputs: list[list[int]], wanted: list[int]) -> None:
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(wanted),
            pad_token_id=0,
            eos_token_id=None,
        )
        ids = torch.tensor(inputs)
        criteria = StoppingCriteriaList([_Prescribed(wanted)])
        with torch.inference_mode():
            made = model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=criteria
            )
        assert made.shape[1] == PROMPT_TOKENS + max(wanted), "it must not end before the longest one"

    return run


def continuous(model: PreTrainedModel, longest: int) -> Callable[[list[list[int]], list[int]], None]:
    """transformers' continuous batching, with as many blocks as the load needs: more make it slower on a CPU."""
    page = 32

    def run(inputs: list[list[int]], wanted: list[int]) -> None:
        blocks = sum((PROMPT_TOKENS + n) // page + 2 for n in wanted)
        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, max_new_tokens=longest, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(page_size=page, num_blocks=blocks, max_batch_tokens=256)
        with model.continuous_batching_context_manager(  # type: ignore[operator]
            generation_config=config, continuous_batching_config=batching
        ) as manager:
            for i, (ids, n) in enumerate(zip(inputs, wanted, strict=True)):
                manager.add_request(ids, request_id=str(i), max_new_tokens=n, eos_token_id=-1)
            left = len(inputs)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    assert len(result.generated_tokens) == wanted[int(result.request_id)]
                    left -= 1

    return run


def compare(options: argparse.Namespace, workload: str, rival: str) -> dict[str, Any]:
    """One row of the table."""
    config = ModelConfig(path=options.model)
    wanted = lengths(workload, options.requests, options.longest)
    policy = load_model(config)
    inputs = prompts(options.requests, policy.config.vocab_size)
    ours = Ours(policy, options.requests, options.longest)
    attention = "sdpa" if rival == "generate" else "paged|sdpa"
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        location(config.path), dtype=torch.float32, attn_implementation=attention
    ).eval()
    theirs.generation_config.eos_token_id = None  # `generate` falls back to it: lengths are prescribed here
    run = generate(theirs) if rival == "generate" else continuous(theirs, options.longest)
    a, b = alternate(
        lambda: timed(lambda: ours.run(inputs, wanted)),
        lambda: timed(lambda: run(inputs, wanted)),
        options.pairs,
    )
    useful = sum(wanted)
    padding = 1 - useful / (len(wanted) * max(wanted)) if rival == "generate" else 0.0
    return {
        "workload": workload,
        "rival": rival,
        "useful_tokens": useful,
        "ours_tokens_per_s": useful / float(np.median(a)),
        "theirs_tokens_per_s": useful / float(np.median(b)),
        "their_padding": padding,
        "ratio": asdict(Ratio.of([t / o for o, t in zip(a, b, strict=True)])),
    }


def main(argv: Sequence[str] = ()) -> int:
    """Prints a table, or with --json one object."""
    parser = argparse.ArgumentParser(prog="stretto bench engine", description=__doc__)
    parser.add_argument("--model", default="demo", help="a folder or a hub name")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512, help="the longest response, in tokens")
    parser.add_argument("--pairs", type=count, default=10)
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--busy", action="store_true", help="measure although others use the machine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    others = require_idle(limit=float("inf") if options.busy else 0.2)
    rows = [compare(options, w, r) for w in options.workloads for r in options.rivals]
    machine = (
        f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}, others {others:.0%}"
    )
    if options.json:
        print(json.dumps({"model": options.model, "machine": machine, "rows": rows}))
        return 0
    print(f"{options.model}, {options.requests} requests, {machine}; tokens are useful ones")
    for row in rows:
        ratio = Ratio(**row["ratio"])
        padding = f" ({row['their_padding']:.0%} of its work is padding)" if row["their_padding"] else ""
        print(
            f"{row['workload']:11s}  ours {row['ours_tokens_per_s']:7,.0f} tokens/s   "
            f"{row['rival']} {row['theirs_tokens_per_s']:7,.0f}{padding}   {ratio}"
        )
    return 0
