"""How often float32 draws another token than float64 would, with the same weights, keys and prefix.

    python studies/flips.py [--tokens 1000000] [--results FOLDER]

The embedded engine answers the demo's puzzles in float32. Then the float64 model reads each response in one
pass and draws at every position with the response's key: a flip is a position where its token differs.
Finished chunks are kept in `flips.jsonl`; called again, the study goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from scipy.stats import beta
from transformers import AutoModelForCausalLM

from stretto.config import ModelConfig
from stretto.engine.embedded import EmbeddedEngine
from stretto.model import load_model, load_tokenizer, location
from stretto.records import IntArray, Progress, Purpose, Request, SamplingParams, prompt_uid
from stretto.sampling import SamplingColumns, request_key
from stretto.sampling_torch import sample
from stretto.tasks.knights import KnightsAndKnaves

ROWS = 400


def chunk(number: int) -> tuple[int, int]:
    """Tokens and flips of one visit to every row."""
    tokenizer = load_tokenizer(ModelConfig())
    model32 = load_model(ModelConfig())
    model64 = AutoModelForCausalLM.from_pretrained(
        location("demo"), dtype=torch.float64, attn_implementation="sdpa"
    )
    engine = EmbeddedEngine(
        model32, tokenizer, worker=0, max_num_seqs=64, max_model_len=1024, max_num_batched_tokens=2048
    )
    how = SamplingParams(max_new_tokens=512, stop_token_ids=(int(tokenizer.eos_token_id),))
    rows = KnightsAndKnaves(size=ROWS, seed=1).rows("train")
    requests: dict[int, Request] = {}
    for row, prompt in enumerate(tokenizer([r["prompt"] for r in rows])["input_ids"]):
        ids = np.array(prompt)
        key = request_key(0, Purpose.EVAL, prompt_uid(ids), 0, 0, number)
        requests[row] = Request(row, 1, row, ids, np.empty(0, np.int64), 0, key, how)
    engine.submit(list(requests.values()))
    tokens: dict[int, list[int]] = {row: [] for row in requests}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Progress) and event.token_ids is not None:
                for row, token in zip(event.ids.tolist(), event.token_ids.tolist(), strict=True):
                    tokens[row].append(token)
    flips = sum(int((redraw(model64, requests[row], tokens[row]) != tokens[row]).sum()) for row in requests)
    return sum(map(len, tokens.values())), flips


def redraw(model: torch.nn.Module, request: Request, tokens: list[int]) -> IntArray:
    """What `model` draws at each position of the response, given the tokens before it; (N,)."""
    ids = torch.tensor([[*request.prompt_ids.tolist(), *tokens]])
    with torch.inference_mode():
        logits = model(ids).logits[0, request.prompt_ids.size - 1 : -1]
    count = len(tokens)
    columns = SamplingColumns(np.ones(count), np.zeros(count, np.int64), np.ones(count), np.zeros(count))
    keys = np.full(count, request.key, np.uint64)
    return sample(logits, keys, np.arange(count), columns).token_ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--results", type=Path, default=Path("studies/results/flips"))
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    log = options.results / "flips.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    while sum(d["tokens"] for d in done) < options.tokens:
        tokens, flips = chunk(len(done))
        done.append({"visit": len(done), "tokens": tokens, "flips": flips})
        with log.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(f"{sum(d['tokens'] for d in done):,} tokens, {sum(d['flips'] for d in done)} flips", flush=True)
    tokens, flips = sum(d["tokens"] for d in done), sum(d["flips"] for d in done)
    upper = beta.ppf(0.975, flips + 1, tokens - flips)  # Clopper and Pearson
    print(f"float32 against float64: {flips} flips in {tokens:,} tokens (95 % below {upper:.1e} per token)")


if __name__ == "__main__":
    main()
