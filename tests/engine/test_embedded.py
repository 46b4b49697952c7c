"""The embedded engine gives the tokens of plain decoding with the same keys, whatever runs beside it and however."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine import attention
from stretto.model import FAMILIES
from stretto.records import SamplingParams
from tests.engine.runs import (
    LENGTH,
    REQUESTS,
    Run,
    any_schedule,
    assert_same,
    copies,
    expected,
    make_engine,
    make_request,
    model_of,
)
from tests.models import tiny_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(data=st.data())
def test_same_tokens_under_any_schedule(family: str, data: st.DataObject) -> None:
    """Any order and time of arrival, slots, chunks, stops and resumes, and either attention."""
    model = model_of(family)
    engine = make_engine(
        model,
        data.draw(st.integers(1, 6), label="slots"),
        data.draw(st.sampled_from([3, 17, 500]), label="budget"),
    )
    if data.draw(st.booleans(), label="torch attention"):
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        engine._key_values = attention.TorchKeyValues(
            2, 2 * engine.slots, LENGTH, heads, size, torch.float64, torch.device("cpu")
        )
    run = Run(engine)
    order = data.draw(st.permutations(range(len(REQUESTS))), label="order")[:6]
    any_schedule(data, run, order)
    for i in order:
        assert_same(run, REQUESTS[i], expected(family, i))
    assert engine.num_running == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("slots", "threads"), [(15, 1), (15, 2), (1, 1)])
def test_all_at_once_and_one_by_one(family: str, slots: int, threads: int) -> None:
    torch.set_num_threads(threads)
    run = Run(make_engine(model_of(family), slots, 48))
    run.submit(*REQUESTS)
    run.finish()
    for i, request in enumerate(REQUESTS):
        assert_same(run, request, expected(family, i))


@pytest.mark.parametrize("budget", [1000, 16])
def test_a_groups_prompt_is_computed_once(budget: int) -> None:
    run = Run(make_engine(model_of("llama"), slots=8, budget=budget))
    siblings = copies(8)
    run.submit(*siblings[:6])
    run.step()
    run.step()
    run.submit(siblings[6])  # arrives while the prompt is held
    run.finish()
    run.submit(siblings[7])  # arrives when nothing runs any more; its row was not needed since
    run.finish()
    counted = run.engine.metrics()
    assert counted["decode_tokens"] == 8 * 5
    # All but the prompt's last token, whose logits each sibling needs, and what it samples next.
    assert counted["prefill_tokens"] == 39


def test_prompts_give_way_to_others_when_their_rows_are_needed() -> None:
    run = Run(make_engine(model_of("llama"), slots=2))
    for i in (*range(5), *range(5, 15)):
        run.submit(REQUESTS[i])
        run.finish()
        assert_same(run, REQUESTS[i], expected("llama", i))


def test_the_queue_is_first_come_first_served() -> None:
    run = Run(make_engine(model_of("llama"), slots=2))
    run.submit(*copies(6))
    started: list[int] = []
    while run.engine.has_work:
        run.step()
        started += [i for i in sorted(run.tokens) if run.tokens[i] and i not in started]
        assert run.engine.num_running <= 2
    assert started == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_short_number_formats_stay_close(dtype: torch.dtype, tolerance: float) -> None:
    run = Run(make_engine(tiny_model("llama", dtype=dtype)))
    run.submit(*REQUESTS[:5])
    run.finish()
    plain = model_of("llama", "sdpa")
    for request in REQUESTS[:5]:
        tokens = run.tokens[request.id]
        if request.sampling.top_k or not request.sampling.temperature:
            continue  # a distribution cut elsewhere is not a close one
        with torch.no_grad():
            logits = plain(torch.tensor([[*request.prompt_ids, *tokens]]), use_cache=False).logits[0]
        start = len(request.prompt_ids) - 1
        exact = torch.log_softmax(logits[start:-1] / request.sampling.temperature, -1)
        chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        assert np.abs(chosen - run.logprobs[request.id]).max() < tolerance


def cuda_model() -> Any:
    model: Any = tiny_model("qwen2")
    return model.to("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_tokens_on_a_gpu() -> None:
    run = Run(make_engine(cuda_model(), slots=6, budget=40))
    run.submit(*REQUESTS)
    run.finish()
    for i, request in enumerate(REQUESTS):
        assert_same(run, request, expected("qwen2", i))


def test_packed_rows_do_not_see_each_other() -> None:
    """Changing one request's tokens leaves its neighbour's log-probs as they are, to the last bit."""
    results: list[list[float]] = []
    for other in (1, 3):
        run = Run(make_engine(model_of("llama")))
        probe = make_request(0, 4, 0, SamplingParams(max_new_tokens=8))
        beside = make_request(1, other, 0, SamplingParams(max_new_tokens=8))
        beside.prompt_ids = np.full(5, other)
        run.submit(probe, beside)
        run.finish()
        results.append(run.logprobs[0])
    assert results[0] == results[1]
