from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from stretto.config import DataConfig
from stretto.demo.tokenizer import build_tokenizer
from stretto.errors import StrettoError
from stretto.records import Prompt, prompt_uid
from stretto.tasks.prompts import PromptStream, tokenize_rows

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return build_tokenizer(256)


@pytest.fixture(scope="module")
def chat() -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(256)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def texts(
    rows: Sequence[Any], tokenizer: PreTrainedTokenizerFast, length: int = 200, **config: Any
) -> list[str]:
    found = tokenize_rows(
        [{"prompt": p} for p in rows], tokenizer, DataConfig(**config), max_model_len=length
    )
    return [str(tokenizer.decode(prompt.token_ids)) for prompt in found]


def test_plain_text(plain: PreTrainedTokenizerFast) -> None:
    assert texts(["Puzzle : Ann", "any text at all"], plain) == ["Puzzle : Ann", "any text at all"]


def test_chat_templates(chat: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert texts(["hi", messages], chat) == ["<user>hi<assistant>", "<system>S<user>U<assistant>"]
    assert texts(["hi"], chat, system_prompt="be brief") == ["<system>be brief<user>hi<assistant>"]
    assert texts(["hi"], chat, chat_template=False) == ["hi"]
    begun = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "It is"}]
    assert texts([begun], chat) == ["<user>U<assistant>It is"]


MESSAGES = [{"role": "user", "content": "U"}]


@pytest.mark.parametrize(
    ("prompt", "with_template", "config", "message"),
    [
        ("", False, {}, "row 1 of the data .from 0.: the prompt is empty"),
        ("  \n", True, {}, "row 1 of the data .from 0.: the prompt is empty"),
        ("a \ud800", False, {}, "row 1 of the data .from 0.: the prompt is no text: half a surrogate pair"),
        ([], True, {}, "the prompt is empty"),
        ([{"role": "user", "content": ""}], True, {}, "the prompt is empty"),
        (MESSAGES, False, {}, "row 1 of .*chat messages need a chat template"),
        ("hi", False, {"chat_template": True}, "data.chat_template: the tokenizer has none"),
        ("hi", False, {"system_prompt": "s"}, "data.system_prompt: needs a chat template"),
        (
            [{"role": "system", "content": "S"}],
            True,
            {"system_prompt": "s"},
            "row 1 .* system message of its own",
        ),
    ],
)
def test_bad_prompts(
    plain: PreTrainedTokenizerFast,
    chat: PreTrainedTokenizerFast,
    prompt: Any,
    with_template: bool,
    config: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(StrettoError, match=message):
        texts(["Puzzle", prompt], chat if with_template else plain, **config)


def test_a_prompt_longer_than_the_context(
    plain: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ["Puzzle", "Puzzle says says says", "Puzzle says"]
    assert len(texts(rows, plain, length=5)) == 3
    with pytest.raises(StrettoError, match=r"row 1 .*has 4 tokens, a context of 4 allows 3"):
        texts(rows, plain, length=4)
    with pytest.raises(StrettoError, match=r"has 4 tokens, data.max_prompt_tokens allows 2"):
        texts(rows, plain, max_prompt_tokens=2)
    assert not caplog.records
    assert texts(rows, plain, length=4, long_prompts="skip") == ["Puzzle", "Puzzle says"]
    assert [r.message for r in caplog.records] == [
        "the data: 1 prompts longer than 3 tokens are left out, the first: row 1 of the data (from 0)"
    ]
    with pytest.raises(StrettoError, match="every prompt"):
        texts(rows[1:2], plain, length=4, long_prompts="skip")


def test_repeated_rows_are_numbered_and_said_once(
    plain: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": p, "answer": i} for i, p in enumerate(["Ann", "Bo", "Ann", "Ann"])]
    with caplog.at_level(logging.WARNING):
        found = tokenize_rows(rows, plain, DataConfig(), max_model_len=10, name="x.jsonl")
    assert [p.occurrence for p in found] == [0, 0, 1, 2]
    assert [p.row for p in found] == [0, 1, 2, 3]
    assert [p.data["answer"] for p in found] == [0, 1, 2, 3]
    assert found[0].uid == found[2].uid != found[1].uid
    assert caplog.messages == ["x.jsonl: 2 rows repeat an earlier row's prompt; each is answered by itself"]


def test_the_uid_is_fixed() -> None:
    """Logs of earlier runs are looked up by it, so it may not change with a version or a machine."""
    assert prompt_uid(np.array([1, 2, 300], np.int64)) == "ce15a4c138904957b857f34dda0390c8"


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, f"{i:032x}", 0, np.array([i], np.int64), {}) for i in range(count)]


@given(st.integers(1, 12), st.lists(st.integers(0, 30), max_size=12), st.integers(0, 2**70), st.booleans())
def test_every_epoch_has_every_row_once(count: int, sizes: list[int], seed: int, shuffle: bool) -> None:
    stream = PromptStream(prompts(count), seed=seed, shuffle=shuffle)
    taken = [item for size in sizes for item in stream.next(size)]
    assert [visit for _, visit in taken] == [i // count for i in range(sum(sizes))]
    for start in range(0, len(taken) - count + 1, count):
        rows = [prompt.row for prompt, _ in taken[start : start + count]]
        assert sorted(rows) == list(range(count))
        assert shuffle or rows == list(range(count))
    assert stream.metrics()["epoch"] == pytest.approx(sum(sizes) / count)


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40))
def test_the_order_depends_on_seed_and_epoch_alone(count: int, before: int, after: int) -> None:
    whole = PromptStream(prompts(count), seed=5, shuffle=True)
    expected = [p.row for p, _ in whole.next(before + after)][before:]
    first = PromptStream(prompts(count), seed=5, shuffle=True)
    first.next(before)
    resumed = PromptStream(prompts(count), seed=5, shuffle=True)
    resumed.load_state_dict(first.state_dict())
    assert [p.row for p, _ in resumed.next(after)] == expected


def test_the_order_is_fixed_for_ever() -> None:
    """A resumed run may have another Python or numpy."""
    stream = PromptStream(prompts(6), seed=7, shuffle=True)
    assert [p.row for p, _ in stream.next(18)] == [4, 1, 3, 2, 5, 0, 3, 1, 2, 5, 4, 0, 4, 0, 1, 5, 3, 2]
    assert [p.row for p, _ in PromptStream(prompts(6), seed=8, shuffle=True).next(6)] == [4, 3, 1, 2, 5, 0]


def test_the_fingerprint_is_one_of_the_prompts_in_their_order() -> None:
    stream = PromptStream(prompts(3), seed=0, shuffle=True)
    assert stream.state_dict()["prompts"] == stream.fingerprint()
    assert PromptStream(prompts(3), seed=1, shuffle=False).fingerprint() == stream.fingerprint()
    for others in (prompts(4), prompts(3)[::-1]):
        assert PromptStream(others, seed=0, shuffle=True).fingerprint() != stream.fingerprint()
    with pytest.raises(StrettoError, match="no prompts"):
        PromptStream([], seed=0, shuffle=True)
