from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from stretto.demo.tokenizer import build_tokenizer
from stretto.model import location
from stretto.tasks.knights import KnightsAndKnaves
from stretto.tasks.knights_traces import write_trace

MODEL_PATH = Path(location("demo"))
MAX_NEW_TOKENS = 576


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL_PATH)


def test_package_data_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_PATH.iterdir()) < 8_000_000


def test_model_loads_in_float32_and_fits_the_tokenizer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert model.dtype == torch.float32
    assert 1_000_000 <= model.num_parameters() <= 4_000_000
    assert model.config.vocab_size == len(tokenizer) <= 512
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_shipped_tokenizer_is_the_one_that_the_script_builds(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.get_vocab() == build_tokenizer(1024).get_vocab()


def test_prompts_and_traces_round_trip_and_join_at_token_borders(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    for puzzle in KnightsAndKnaves().puzzles("train", 100):
        trace = write_trace(puzzle, rng.choice(("careful", "hasty")), rng)
        prompt_ids = tokenizer(puzzle.prompt)["input_ids"]
        trace_ids = tokenizer(trace)["input_ids"]
        assert tokenizer.decode([*prompt_ids, *trace_ids]) == puzzle.prompt + trace
        assert tokenizer(puzzle.prompt + trace)["input_ids"] == [*prompt_ids, *trace_ids]
        assert tokenizer.eos_token_id not in prompt_ids
        assert len(prompt_ids) == len(puzzle.prompt.split())  # one token per word
        assert len(trace_ids) == len(trace.split()) < MAX_NEW_TOKENS


@pytest.mark.parametrize("text", ["", " ", "a  b\n\tc", "Ann", "zoë says 你好 🙂 .", "x" * 100])
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_padding_and_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = tokenizer(["Puzzle :", "Puzzle"], padding=True, padding_side="left")
    assert batch["input_ids"][1][0] == tokenizer.pad_token_id
    ids = [*tokenizer(" answer Ann knight")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == " answer Ann knight"


def test_model_answers_a_part_of_the_task(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    task = KnightsAndKnaves(test_size=40, seed=1, people_weights={2: 1.0})
    rows = task.rows("test")
    encoded = tokenizer(
        [row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left"
    )
    torch.manual_seed(0)
    output = model.generate(**encoded, do_sample=True, top_k=0, max_new_tokens=64)
    texts = tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    accuracy = sum(task.score(text, row) for text, row in zip(texts, rows, strict=True)) / len(rows)
    assert 0.3 < accuracy < 0.85
    assert {"careful", "hasty"} <= {text.split()[0] for text in texts if text.strip()}


def test_report_is_shipped() -> None:
    report = json.loads((MODEL_PATH / "warm_start.json").read_text())
    assert report["problems"] >= 400
    assert report["response_length"]["p99_over_p50"] >= 4
    assert 0.3 < report["accuracy"] < 0.65
