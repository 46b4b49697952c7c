"""Make the demo's model: a tiny Llama trained on Knights and Knaves traces of careful and hasty writers.

    python -m stretto.demo.warm_start --out DIR --seed 0

The corpus is a mixture on purpose: less than half of its writers are careful and always right, the others
are hasty and mostly wrong (see `stretto.tasks.knights_traces`). Imitating all of them, the model answers
about half of the puzzles, depending on which writer it happens to start as. What pays is not in the
corpus; reinforcement learning has to find it out, and responses get longer as it does. No puzzle of the
task's test split is in the corpus. The result is a pure function of the seed and the number of steps on one
machine with one number of threads.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stretto.demo.muon import Muon
from stretto.demo.report import measure
from stretto.demo.tokenizer import build_tokenizer
from stretto.tasks.knights import PEOPLE_WEIGHTS, draw_puzzle
from stretto.tasks.knights_traces import Writer, write_trace

MAX_POSITIONS = 1024
STEPS = 1000
BATCH_TOKENS = 2048  # padded tokens of an optimiser step
CHUNK = 2048  # examples that are sorted into batches of equal lengths together
MUON_LEARNING_RATE = 6e-3  # for the layers' matrices
ADAM_LEARNING_RATE = 3e-3  # for embeddings and norms
WARM_UP = 50  # optimiser steps
COOL_DOWN = 0.5  # of all steps
REPORT_EVERY = 50  # steps
IGNORED = -100  # the label of prompts and padding
CAREFUL_SHARE = 0.45


@dataclass(frozen=True)
class Stage:
    """A part of the training, `share` of all steps: the puzzles and the writers it draws from."""

    share: float
    people_weights: Mapping[int, float]
    careful_share: float


# First the rules on short traces, then the long ones, and last the mixture that the model is meant to have.
STAGES = (
    Stage(0.25, {2: 0.5, 3: 0.5}, 0.8),
    Stage(0.45, {2: 0.2, 3: 0.3, 4: 0.3, 5: 0.2}, 0.8),
    Stage(0.30, PEOPLE_WEIGHTS, CAREFUL_SHARE),
)


@dataclass(frozen=True)
class Example:
    """Token ids of prompt, response and end-of-sequence; the first `prompt_length` are the prompt's."""

    ids: list[int]
    prompt_length: int


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A model of 1.3 M parameters with random weights, in float32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    return LlamaForCausalLM(config)


def draw_examples(
    tokenizer: PreTrainedTokenizerFast, stage: Stage, rng: random.Random, count: int
) -> list[Example]:
    """`count` puzzles of the train split, each with one writer's trace."""
    people = rng.choices(list(stage.people_weights), list(stage.people_weights.values()), k=count)
    prompts, traces = [], []
    for number in people:
        puzzle = draw_puzzle(rng, number, "train")
        writer: Writer = "careful" if rng.random() < stage.careful_share else "hasty"
        prompts.append(puzzle.prompt)
        traces.append(write_trace(puzzle, writer, rng))
    encoded = zip(tokenizer(prompts)["input_ids"], tokenizer(traces)["input_ids"], strict=True)
    return [Example([*prompt, *trace, tokenizer.eos_token_id], len(prompt)) for prompt, trace in encoded]


def batches(examples: list[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Batches of about `BATCH_TOKENS` padded tokens, each of examples of similar length, in random order."""
    result: list[list[Example]] = []
    batch: list[Example] = []
    for example in sorted(examples, key=lambda example: len(example.ids)):
        if batch and (len(batch) + 1) * len(example.ids) > BATCH_TOKENS:
            result.append(batch)
            batch = []
        batch.append(example)
    result.append(batch)
    rng.shuffle(result)
    yield from result


def collate(batch: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids (B, T) and next-token labels (B, T - 1). A causal model needs no mask for them."""
    longest = max(len(example.ids) for example in batch)
    ids = torch.full((len(batch), longest), pad)
    labels = torch.full((len(batch), longest - 1), IGNORED)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        response = torch.tensor(example.ids[example.prompt_length :])
        labels[row, example.prompt_length - 1 : len(example.ids) - 1] = response
    return ids, labels


def stage_batches(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Iterator[list[Example]]:
    """The batches of a whole training, stage by stage."""
    rng = random.Random(f"warm start/{seed}")
    for stage in STAGES:
        left = round(steps * stage.share)
        while left > 0:
            for batch in batches(draw_examples(tokenizer, stage, rng, CHUNK), rng):
                if left > 0:
                    yield batch
                left -= 1


def schedule(step: int, steps: int) -> float:
    """The factor of both learning rates: linear warm-up, constant, linear `COOL_DOWN` to zero."""
    return min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps * COOL_DOWN))


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Next-token training on the responses, in place, with progress on standard output."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    started = time.monotonic()
    recent = 0.0
    for step, batch in enumerate(stage_batches(tokenizer, steps, seed)):
        ids, labels = collate(batch, tokenizer.pad_token_id)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        # A constant divisor: every token of the corpus has the same weight, however batches are cut.
        (total / BATCH_TOKENS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = schedule(step, steps)
        adam.param_groups[0]["lr"] = ADAM_LEARNING_RATE * factor
        adam.step()
        adam.zero_grad()
        muon.step(MUON_LEARNING_RATE * factor)
        recent += total.item() / int((labels != IGNORED).sum()) / REPORT_EVERY
        if (step + 1) % REPORT_EVERY == 0:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps}  loss {recent:.4f} nats/token  {seconds:.0f} s", flush=True)
            recent = 0.0


def round_to_bfloat16(model: torch.nn.Module) -> None:
    """Round the weights in place, so that what is measured is exactly what is stored."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Store the rounded weights as bfloat16; the configuration says float32, in which they are loaded."""
    tokenizer.save_pretrained(out)
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    model.save_pretrained(out, state_dict=state)
    (out / "model.safetensors").chmod(0o644)  # written for its owner only, which no package data should be


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stretto.demo.warm_start", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for model, tokenizer and report")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer(MAX_POSITIONS)
    model = build_model(tokenizer)
    train(model, tokenizer, arguments.steps, arguments.seed)
    round_to_bfloat16(model)
    save(model, tokenizer, arguments.out)
    report = {
        "command": "python -m stretto.demo.warm_start --out DIR"
        f" --seed {arguments.seed} --steps {arguments.steps} --threads {arguments.threads}",
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **measure(model, tokenizer),
    }
    text = json.dumps(report, indent=2)
    (arguments.out / "warm_start.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
