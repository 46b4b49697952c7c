"""What the embedded engine answers to submit, stop and load, and how responses end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from stretto.engine.embedded import EmbeddedEngine
from stretto.errors import StrettoError
from stretto.records import Finished, FinishReason, Loaded, Progress, Request, SamplingParams, Stopped
from stretto.weights import WeightsRef, fingerprint
from tests.engine.byte_tokenizer import TOKENIZER, decode
from tests.engine.runs import (
    LENGTH,
    NOTHING,
    REQUESTS,
    SETTINGS,
    Run,
    assert_same,
    copies,
    make_engine,
    make_request,
    model_of,
    plain_decoding,
    plain_step,
)
from tests.models import VOCABULARY, tiny_model


def published(model: Any, version: int) -> WeightsRef:
    tensors = dict(model.named_parameters())
    return WeightsRef(version, "copy", tensors)


def new_engine_and_model(seed: int = 0, **how: Any) -> Run:
    return Run(make_engine(tiny_model("qwen3", seed=seed), **how))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_request_is_let_go_of_after_its_chunk(chunk: int) -> None:
    run = new_engine_and_model(slots=5)
    requests = {i: replace(REQUESTS[i], max_new=chunk) for i in (1, 2, 3, 6, 11)}
    run.submit(*requests.values())
    while len(run.reason) < len(requests):
        before = {i: len(tokens) for i, tokens in run.tokens.items()}
        run.finish()
        for i, request in requests.items():
            assert len(run.tokens[i]) - before[i] <= chunk
            if i not in run.reason:
                assert len(run.tokens[i]) - before[i] == chunk
                assert i in run.stopped
                run.resume(request)
    for i in requests:
        assert_same(run, REQUESTS[i], plain_decoding(model_of("qwen3", "sdpa"), REQUESTS[i]))


def test_recompute_goes_on_under_the_new_weights_alone() -> None:
    run = new_engine_and_model(slots=5)
    requests = [REQUESTS[i] for i in (1, 2, 6, 11)]
    run.submit(*requests)
    for _ in range(4):
        run.step()
    before = {r.id: list(run.tokens[r.id]) for r in requests if r.id not in run.reason}
    assert before
    run.engine.load(published(model_of("qwen3", seed=1), 3), "recompute")
    assert [e for e in run.step() if isinstance(e, Loaded)] == [Loaded(7, 3)]
    late = make_request(99, 2, 99, SETTINGS[0])  # the same prompt as before, but not its old keys and values
    run.submit(late)
    run.finish()
    new = model_of("qwen3", "sdpa", seed=1)
    for request in requests:
        if request.id in before:
            known = before[request.id]
            tokens, logprobs, _, reason = plain_decoding(new, request, known)
            assert run.tokens[request.id] == tokens
            assert run.reason[request.id] == reason
            assert np.abs(np.subtract(run.logprobs[request.id][len(known) :], logprobs)).max() < 1e-9
            assert run.versions[request.id] == [0] * len(known) + [3] * (len(tokens) - len(known))
    assert_same(run, late, plain_decoding(new, late))


@pytest.mark.filterwarnings("ignore:.past_key_values.:FutureWarning")
def test_continue_keeps_what_was_computed() -> None:
    run = new_engine_and_model()
    request = make_request(0, 3, 0, SamplingParams(max_new_tokens=14))
    run.submit(request)
    for _ in range(5):
        run.step()
    run.engine.load(published(model_of("qwen3", seed=1), 1), "continue")
    late = make_request(1, 3, 1, SETTINGS[0])
    run.submit(late)
    run.finish()

    tokens: list[int] = []
    past, ids = None, request.prompt_ids
    for step in range(14):
        model = model_of("qwen3", "sdpa", seed=0 if step < 5 else 1)
        with torch.no_grad():
            out = model(input_ids=torch.tensor(ids)[None], past_key_values=past, use_cache=True)
        past = out.past_key_values
        tokens.append(plain_step(out.logits[0, -1:], request, step)[0])
        ids = np.array(tokens[-1:])
    assert run.tokens[0] == tokens
    assert_same(run, late, plain_decoding(model_of("qwen3", "sdpa", seed=1), late))


def test_stop_at_a_load_answers_for_everything_that_ran() -> None:
    run = new_engine_and_model(slots=2)
    run.submit(*copies(3))
    run.step()
    run.step()
    run.engine.load(published(model_of("qwen3", seed=1), 1), "stop")
    assert run.engine.num_running == 0
    events = run.step()
    assert [e for e in events if not isinstance(e, Progress)] == [
        Stopped(7, 0, 0),
        Stopped(7, 1, 0),
        Loaded(7, 1),
    ]
    run.finish()  # the third was only queued: it runs under the new weights
    assert_same(run, copies(3)[2], plain_decoding(model_of("qwen3", "sdpa", seed=1), copies(3)[2]))


def test_shared_weights_move_nothing_but_the_version() -> None:
    model = tiny_model("qwen3")
    run = Run(make_engine(model))
    run.submit(copies(1)[0])
    run.step()
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), model_of("qwen3", seed=1).parameters(), strict=True):
            ours.copy_(theirs)  # the learner's step
    run.engine.load(WeightsRef(4, "shared", {}), "recompute")
    run.finish()
    known = run.tokens[0][:1]
    assert run.tokens[0] == plain_decoding(model_of("qwen3", "sdpa", seed=1), copies(1)[0], known)[0]
    assert run.engine.version == 4


def test_a_module_left_in_training_mode_is_sampled_in_evaluation_mode() -> None:
    model = tiny_model("qwen3")
    config = LoraConfig(r=2, lora_dropout=0.9, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(1)
    inject_adapter_in_model(config, model)
    answers = []
    for _ in range(2):
        model.train()
        run = Run(make_engine(model))
        run.submit(*copies(2))
        run.finish()
        answers.append(run.logprobs)
    assert answers[0] == answers[1]
    assert not model.training


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = make_engine(tiny_model("qwen3"))
    before = fingerprint(dict(engine._model.named_parameters()))
    other = published(tiny_model("qwen3", intermediate_size=32), 1)
    with pytest.raises(StrettoError, match=r"mlp.*does not fit"):
        engine.load(other, "continue")
    with pytest.raises(StrettoError, match=r"nonsense.*no such tensor"):
        engine.load(WeightsRef(1, "copy", {"nonsense": torch.zeros(1)}), "continue")
    assert fingerprint(dict(engine._model.named_parameters())) == before
    assert engine.version == 0
    assert not engine.has_work


def text_model() -> Any:
    return tiny_model("llama", vocab_size=len(TOKENIZER))


def test_stop_ids_come_before_strings_and_strings_before_the_limit() -> None:
    plain = tiny_model("llama", attention="sdpa", vocab_size=len(TOKENIZER))
    base = make_request(0, 1, 0, SamplingParams(max_new_tokens=40))
    tokens = plain_decoding(plain, base)[0]
    text = decode(tokens)
    string = next(text[i : i + 2] for i in range(8, len(text)) if "\ufffd" not in text[i : i + 2])
    found = next(i for i in range(1, 41) if string in decode(tokens[:i]))
    requests = [
        make_request(0, 1, 0, SamplingParams(max_new_tokens=40, stop=("never", string))),
        make_request(1, 1, 0, SamplingParams(max_new_tokens=found, stop=(string,))),
        make_request(
            2, 1, 0, SamplingParams(max_new_tokens=found, stop=(string,), stop_token_ids=(tokens[found - 1],))
        ),
        make_request(3, 1, 0, SamplingParams(max_new_tokens=found - 1, stop=(string,))),
    ]
    run = Run(make_engine(text_model(), tokenizer=TOKENIZER))
    run.submit(*requests)
    run.finish()
    for request in requests:
        answer = plain_decoding(plain, request)
        assert_same(run, request, answer)
    assert [run.reason[i] for i in range(4)] == ["stop", "stop", "stop", "length"]
    assert len(run.tokens[0]) == found

    resumed = make_request(4, 1, 0, SamplingParams(max_new_tokens=40, stop=(string,)))
    resumed.token_ids = np.array(tokens[: found - 1], np.int64)
    run.submit(resumed)
    run.finish()
    assert run.tokens[4] == tokens[:found]
    # Strings are looked for in the present turn only.
    later = make_request(5, 1, 0, SamplingParams(max_new_tokens=found + 3, stop=(string,)))
    later.token_ids, later.turn_start = np.array(tokens[:found], np.int64), found
    run.submit(later)
    run.finish()
    assert run.tokens[5] == plain_decoding(plain, later, tokens[:found])[0]


def test_nothing_left_to_generate_is_finished_at_once() -> None:
    run = Run(make_engine(model_of("llama")))
    request = make_request(0, 1, 0, SamplingParams(max_new_tokens=3))
    request.token_ids = np.array([1, 2, 5])
    run.submit(request)
    assert run.step() == [Finished(7, 0, 0, FinishReason.LENGTH)]
    assert not run.engine.has_work


def changed(**fields: Any) -> Request:
    request = make_request(1, 1, 0, SamplingParams())
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (changed(prompt_ids=NOTHING), "empty prompt"),
        (
            changed(prompt_ids=np.ones(LENGTH, np.int64)),
            f"{LENGTH} tokens and leaves no room.*max_model_len = {LENGTH}",
        ),
        (changed(token_ids=np.ones(LENGTH, np.int64)), rf"5 \+ {LENGTH} tokens"),
        (changed(prompt_ids=np.array([VOCABULARY])), "prompt are outside 0 .. 30"),
        (changed(token_ids=np.array([-1])), "response are outside"),
        (changed(sampling=SamplingParams(stop_token_ids=(99,))), "stop tokens are outside"),
        (changed(sampling=SamplingParams(stop=("x",))), "no tokenizer"),
        (changed(id=0), "here already"),
    ],
)
def test_unfit_requests_are_refused_and_nothing_is_queued(request_: Request, message: str) -> None:
    engine = make_engine(model_of("llama"))
    with pytest.raises(StrettoError, match=message):
        engine.submit([make_request(0, 1, 0, SamplingParams()), request_])
    assert not engine.has_work


def test_a_request_that_is_here_is_refused_again_but_not_its_next_attempt() -> None:
    engine = make_engine(model_of("llama"), slots=1)
    first, queued = copies(2)
    engine.submit([first, queued])
    engine.step()
    for present in (first, queued):
        with pytest.raises(StrettoError, match="here already"):
            engine.submit([present])
    engine.stop([0, 1, 5, 1], [0, 0, 0, 0])
    assert engine.step() == [Stopped(7, 0, 0), Stopped(7, 1, 0)]
    engine.stop([0], [0])
    assert not engine.has_work
    first.attempt = 1
    engine.submit([first])
    engine.stop([0], [0])  # of the old attempt
    assert any(isinstance(event, Progress) for event in engine.step())


def test_a_context_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"max_model_len is 129.*128"):
        EmbeddedEngine(
            model_of("gpt2"), None, worker=0, max_num_seqs=1, max_model_len=129, max_num_batched_tokens=64
        )


def test_metrics_count_since_the_last_call() -> None:
    ticks = iter(range(10**6))
    run = Run(make_engine(model_of("llama"), slots=2, clock=lambda: float(next(ticks))))
    run.submit(*copies(3, prompt=1))
    run.finish()
    counted = run.engine.metrics()
    assert counted["steps"] == run.steps
    assert counted["decode_tokens"] == 15
    assert counted["prefill_tokens"] == 4
    assert 0 < counted["model_seconds"] + counted["sampling_seconds"] < counted["step_seconds"]
    assert counted["step_seconds"] < counted["busy_slot_seconds"] <= 2 * counted["step_seconds"]
    assert set(run.engine.metrics().values()) == {0.0}


def test_broken_weights_end_in_an_error_not_in_tokens() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    engine = make_engine(model)
    engine.submit(copies(1))
    with pytest.raises(StrettoError, match="NaN"):
        engine.step()
