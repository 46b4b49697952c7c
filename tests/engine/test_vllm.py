"""The vLLM engine, for real: the demo model in float32, against the embedded engine and the plain model."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="make test-vllm")

from stretto.config import ModelConfig
from stretto.engine.embedded import EmbeddedEngine
from stretto.engine.vllm import VllmEngine
from stretto.engine.vllm_arguments import _undisturbed
from stretto.errors import StrettoError
from stretto.model import load_model, load_model_config, load_tokenizer, location
from stretto.records import (
    Finished,
    FinishReason,
    Loaded,
    Progress,
    Purpose,
    Request,
    Running,
    SamplingParams,
    Stopped,
)
from stretto.sampling import request_key
from stretto.weights import WeightFiles, WeightsRef
from tests.engine.drafters import Oracle
from tests.engine.runs import NOTHING, Run

LENGTH, SLOTS = 200, 6
TOKENIZER = load_tokenizer(ModelConfig())
EOS = int(TOKENIZER.eos_token_id)
TEXT = "A says: B is a knave. B says: A and I are of the same kind. Who is what?"
PROMPT = np.array(TOKENIZER(TEXT)["input_ids"], np.int64)
SETTINGS = (
    SamplingParams(max_new_tokens=60, stop_token_ids=(EOS,)),
    SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=50),
    SamplingParams(temperature=0.0, max_new_tokens=40),
    SamplingParams(top_k=5, min_p=0.05, max_new_tokens=70, stop_token_ids=(EOS,)),
    SamplingParams(max_new_tokens=1000),  # ends with the context
)


def requests(count: int = 15, first: int = 0) -> list[Request]:
    def one(id: int) -> Request:
        prompt = PROMPT[: 5 + 7 * (id % 4)]
        key = request_key(3, Purpose.TRAIN, f"prompt {id % 4}", 0, id, 0)
        return Request(id, 0, id % 4, prompt, NOTHING, 0, key, SETTINGS[id % 5])

    return [one(id) for id in range(first, first + count)]


def options(**more: Any) -> dict[str, Any]:
    how = {"worker": 7, "max_num_seqs": SLOTS, "max_model_len": LENGTH, "max_num_batched_tokens": 128}
    return {**how, "alternatives": 4, **more}


@pytest.fixture(scope="module")
def vllm_engine() -> Iterator[VllmEngine]:
    """One for all tests that leave it with the demo's weights and without requests."""
    engine = VllmEngine(location("demo"), load_model_config(ModelConfig()), TOKENIZER, **options())
    yield engine
    engine.close()


@cache
def reference(dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(location("demo"), dtype=dtype).eval()


def embedded(model: Any = None, **more: Any) -> Run:
    return Run(EmbeddedEngine(model or load_model(ModelConfig()), TOKENIZER, **options(**more)))


def finished(run: Run, wanted: Sequence[Request]) -> Run:
    run.submit(*wanted)
    run.finish()
    return run


def assert_alike(run: Run, other: Run) -> None:
    """Same tokens, ends and log-probs, to float32's rounding."""
    assert run.tokens == other.tokens
    assert run.reason == other.reason
    for id in run.tokens:
        assert np.allclose(run.logprobs[id], other.logprobs[id], atol=3e-4)
        assert np.allclose(run.raw[id], other.raw[id], atol=3e-4)


def logprobs_by(model: Any, request: Request, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Of `tokens` behind the prompt, at the request's temperature."""
    ids = torch.tensor([[*request.prompt_ids.tolist(), *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, request.prompt_ids.size - 1 : -1].double()
    at = logits / (request.sampling.temperature or 1.0)
    found = at.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    result: np.ndarray[Any, Any] = found.numpy()
    return result


def changed(seed: int, scale: float = 0.05) -> dict[str, torch.Tensor]:
    """The demo's weights, moved clearly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: p.detach().clone() for name, p in reference().named_parameters()}
    for tensor in tensors.values():
        tensor += scale * tensor.std() * torch.randn(tensor.shape, generator=generator)
    return tensors


def original() -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in reference().named_parameters()}


def model_of(tensors: dict[str, torch.Tensor], ours: bool = False) -> Any:
    model = (
        load_model(ModelConfig()) if ours else AutoModelForCausalLM.from_pretrained(location("demo")).eval()
    )
    model.load_state_dict(tensors, strict=False)
    return model


def test_tokens_and_ends_are_those_of_the_embedded_engine(vllm_engine: VllmEngine) -> None:
    run = finished(Run(vllm_engine), requests())
    assert_alike(run, finished(embedded(), requests()))
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(run.reason.values())


def test_logprobs_are_those_of_the_plain_model(vllm_engine: VllmEngine) -> None:
    run = finished(Run(vllm_engine), requests())
    off = np.concatenate(
        [
            np.abs(np.subtract(run.raw[r.id], logprobs_by(reference(), r, run.tokens[r.id])))
            for r in requests()
        ]
    )
    # Few of these texts are like the demo's: where the model is torn, rounding is felt (1.1e-4 with AVX-512).
    assert np.quantile(off, 0.99) < 3e-5
    assert off.max() < 3e-4


def test_the_most_probable_tokens_are_reported(vllm_engine: VllmEngine) -> None:
    request = replace(requests(1)[0], sampling=SamplingParams(max_new_tokens=3))
    vllm_engine.submit([request])
    events = [event for _ in range(3) for event in vllm_engine.step() if isinstance(event, Progress)]
    assert [event.counts.tolist() for event in events] == [[1], [1], [1]]
    tokens: list[int] = []
    for event in events:
        assert event.top is not None
        assert event.token_ids is not None
        for token, logprob in zip(
            event.top.token_ids[0].tolist(), event.top.logprobs[0].tolist(), strict=True
        ):
            assert abs(logprobs_by(reference(), request, [*tokens, token])[-1] - logprob) < 1e-3
        tokens += event.token_ids.tolist()


class TestPartials:
    def test_a_stopped_request_keeps_its_tokens_and_goes_on_from_them(self, vllm_engine: VllmEngine) -> None:
        expected = finished(embedded(), requests())
        run = Run(vllm_engine)
        run.submit(*requests())
        for round in range(6):
            for _ in range(5):
                run.step()
            live = [id for id in run.tokens if id not in run.reason]
            run.stop(live[round % 2 :: 2])
            run.step()
            assert set(live[round % 2 :: 2]) <= run.stopped | run.reason.keys()
            for id in sorted(run.stopped):
                run.resume(requests()[id])
        run.finish()
        assert run.tokens == expected.tokens
        assert run.reason == expected.reason

    def test_an_attempt_of_so_many_tokens_ends_as_stopped(self, vllm_engine: VllmEngine) -> None:
        request = replace(requests(5)[4], max_new=7)
        run = finished(Run(vllm_engine), [request])
        assert run.stopped == {4}
        assert len(run.tokens[4]) == 7
        assert not run.reason

    def test_stopping_what_is_not_there_is_ignored(self, vllm_engine: VllmEngine) -> None:
        vllm_engine.stop([99], [0])
        assert not vllm_engine.has_work

    def test_a_request_without_room_has_ended(self, vllm_engine: VllmEngine) -> None:
        tokens = np.full(60, 9, np.int64)
        vllm_engine.submit([replace(requests(1)[0], token_ids=tokens)])
        assert vllm_engine.step() == [Finished(7, 0, 0, FinishReason.LENGTH)]


class TestStops:
    @pytest.mark.parametrize(("begin", "size"), [(20, 1), (25, 4), (31, 7)])
    def test_stop_strings(self, vllm_engine: VllmEngine, begin: int, size: int) -> None:
        free = finished(
            Run(vllm_engine), [replace(requests(1)[0], sampling=SamplingParams(max_new_tokens=80))]
        )
        string = str(TOKENIZER.decode(free.tokens[0]))[begin : begin + size]
        stop = ("never in it", string)
        how = SamplingParams(max_new_tokens=80, stop=stop, stop_token_ids=(EOS,))
        wanted = [replace(request, sampling=how) for request in requests(6)]
        run = finished(Run(vllm_engine), wanted)
        assert_alike(run, finished(embedded(), wanted))
        assert run.reason[0] == FinishReason.STOP
        assert string in TOKENIZER.decode(run.tokens[0])
        assert string not in TOKENIZER.decode(run.tokens[0][:-1])

    def test_stop_tokens_and_limits(self, vllm_engine: VllmEngine) -> None:
        free = finished(
            Run(vllm_engine), [replace(requests(1)[0], sampling=SamplingParams(max_new_tokens=20))]
        )
        tokens = free.tokens[0]
        how = SamplingParams(max_new_tokens=20, stop_token_ids=(tokens[9],))
        run = finished(Run(vllm_engine), [replace(requests(1)[0], sampling=how)])
        assert run.tokens[0] == tokens[: tokens.index(tokens[9]) + 1]
        assert run.reason[0] == FinishReason.STOP


@pytest.fixture
def changing(vllm_engine: VllmEngine) -> Iterator[VllmEngine]:
    """The engine for a test that gives it other weights."""
    yield vllm_engine
    vllm_engine.load(WeightsRef(0, "copy", original()), "stop")
    vllm_engine.step()


class TestWeights:
    def test_each_update_is_what_the_plain_model_has(self, changing: VllmEngine) -> None:
        for version in (1, 2, 3):
            tensors = changed(version)
            changing.load(WeightsRef(version, "copy", tensors), "continue")
            run = finished(Run(changing), requests(5))
            assert {v for versions in run.versions.values() for v in versions} == {version}
            for request in requests(5):
                found = logprobs_by(model_of(tensors), request, run.tokens[request.id])
                assert np.abs(np.subtract(run.raw[request.id], found)).max() < 1e-4

    def test_from_a_file(self, changing: VllmEngine, tmp_path: Any) -> None:
        tensors = changed(5)
        ref = WeightFiles(tmp_path / "weights").write(WeightsRef(4, "copy", tensors))
        changing.load(ref, "continue")
        expected = finished(embedded(model_of(tensors, ours=True)), requests(5))
        assert_alike(finished(Run(changing), requests(5)), expected)
        (tmp_path / "weights" / "version-000004.safetensors").write_bytes(b"nothing")
        with pytest.raises(StrettoError, match="cannot be read"):
            changing.load(ref, "continue")
        some = {name: tensor for name, tensor in changed(1).items() if "q_proj" not in name}
        part = WeightFiles(tmp_path / "part").write(WeightsRef(5, "copy", some))
        with pytest.raises(StrettoError, match="version 5: .*q_proj.* is missing"):
            changing.load(part, "continue")
        whole = WeightFiles(tmp_path / "other").write(WeightsRef(6, "copy", changed(1)))
        with pytest.raises(StrettoError, match="its fingerprint differs"):
            changing.load(replace(whole, digest="0"), "continue")
        assert changing.version == 4
        assert_alike(finished(Run(changing), requests(5)), expected)

    def test_prompts_that_are_kept_are_not_those_of_new_weights(self, changing: VllmEngine) -> None:
        """A request that goes on keeps old keys and values; others with its prompt must not find them."""
        long = np.resize(PROMPT, 160)
        how = SamplingParams(max_new_tokens=12)
        wanted = [replace(r, prompt_ids=long, sampling=how) for r in requests(3)]
        run = Run(changing)
        run.submit(wanted[0])
        run.step()
        run.step()
        tensors = changed(6)
        changing.load(WeightsRef(1, "copy", tensors), "continue")
        run.submit(*wanted[1:])
        run.finish()
        expected = finished(embedded(model_of(tensors, ours=True)), wanted[1:])
        assert [run.tokens[id] for id in (1, 2)] == [expected.tokens[id] for id in (1, 2)]

    @pytest.mark.parametrize("running", ["continue", "recompute", "stop"])
    def test_running_requests(self, changing: VllmEngine, running: Running) -> None:
        wanted = [
            replace(r, sampling=SamplingParams(max_new_tokens=40)) for r in requests(4)
        ]  # no shared prompt
        tensors = changed(8, 0.2)
        ours = embedded(load_model(ModelConfig()))
        both = [Run(changing), ours]
        for run in both:
            run.submit(*wanted)
            for _ in range(11):
                run.step()
            run.engine.load(WeightsRef(2, "copy", tensors), running)
            events = run.step()
            assert any(isinstance(event, Loaded) and event.version == 2 for event in events)
            assert sum(isinstance(event, Stopped) for event in events) == (4 if running == "stop" else 0)
            for id in sorted(run.stopped):
                run.resume(wanted[id])
            run.finish()
        assert all(set(versions) == {0, 2} for versions in both[0].versions.values())
        assert_alike(*both)

    def test_other_tensors_are_refused_and_nothing_changes(self, changing: VllmEngine) -> None:
        expected = finished(Run(changing), requests(3)).tokens
        some = {name: t for name, t in changed(1).items() if "q_proj" not in name}
        with pytest.raises(StrettoError, match="q_proj.* is missing"):
            changing.load(WeightsRef(1, "copy", some), "continue")
        with pytest.raises(StrettoError, match="no such tensor"):
            changing.load(WeightsRef(1, "copy", {**changed(1), "more": torch.zeros(1)}), "continue")
        with pytest.raises(StrettoError, match="fleet.weights"):
            changing.load(WeightsRef(1, "shared"), "continue")
        assert changing.version == 0
        assert finished(Run(changing), requests(3)).tokens == expected


def test_requests_that_cannot_be_run_are_refused(vllm_engine: VllmEngine) -> None:
    request = requests(1)[0]
    for wrong, said in (
        (replace(request, id=1, prompt_ids=np.array([10**6])), "outside"),
        (replace(request, id=1, prompt_ids=np.full(LENGTH, 5)), "no room"),
    ):
        with pytest.raises(StrettoError, match=said):
            vllm_engine.submit([request, wrong])
    assert not vllm_engine.has_work


def test_what_starting_changes_in_the_process_is_put_back() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = random.random(), np.random.random(), torch.rand(1)  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    before = dict(os.environ)
    with _undisturbed():
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
    assert (random.random(), np.random.random(), torch.rand(1)) == expected  # noqa: NPY002
    assert os.environ == before


def test_drafts_change_no_token_and_save_steps() -> None:
    plain = finished(embedded(), requests())
    for right in (1.0, 0.6):
        oracle = Oracle(plain.tokens, 1, right, nodes=40, branches=False)
        engine = VllmEngine(
            location("demo"),
            load_model_config(ModelConfig()),
            TOKENIZER,
            **options(drafter=oracle, max_draft=8),
        )
        run = finished(Run(engine), requests())
        assert_alike(run, plain)
        counted = engine.metrics()
        assert counted["drafted_tokens"] > 100
        assert counted["accepted_tokens"] > (0.9 if right == 1.0 else 0.2) * counted["drafted_tokens"]
        assert run.steps < plain.steps
        engine.close()
