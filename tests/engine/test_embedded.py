"""The embedded engine gives the tokens of plain decoding with the same keys, whatever runs beside it and however."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import sampling
from stretto.engine import attention
from stretto.engine.embedded import EmbeddedEngine
from stretto.errors import StrettoError
from stretto.model import FAMILIES
from stretto.records import (
    Event,
    Finished,
    FinishReason,
    Loaded,
    Progress,
    Purpose,
    Request,
    SamplingParams,
    Stopped,
)
from stretto.sampling import SamplingColumns, request_key
from stretto.weights import WeightsRef, fingerprint
from tests.engine.test_stop_strings import TOKENIZER
from tests.models import VOCABULARY, tiny_model

LENGTH = 90  # max_model_len
NOTHING = np.zeros(0, np.int64)


def make_request(id: int, prompt: int, sample_index: int, how: SamplingParams) -> Request:
    """A sample of the `prompt`-th prompt; prompts have 1 to 64 tokens."""
    size = (1, 5, 64, 33, 2)[prompt]
    ids = np.random.default_rng(prompt).integers(1, VOCABULARY, size)
    key = request_key(0, Purpose.TRAIN, f"prompt {prompt}", 0, sample_index, 0)
    return Request(id, 0, prompt, ids, NOTHING, 0, key, how)


SETTINGS = (
    SamplingParams(max_new_tokens=12, stop_token_ids=(3, 4)),
    SamplingParams(temperature=0.7, max_new_tokens=9, stop_token_ids=(3,)),
    SamplingParams(top_k=4, top_p=0.9, min_p=0.01, max_new_tokens=11),
    SamplingParams(temperature=0.0, max_new_tokens=6),
    SamplingParams(max_new_tokens=500),  # ends with the context
)
REQUESTS = [make_request(i, i % 5, i, SETTINGS[(i * 7 + i // 5) % 5]) for i in range(15)]
Answer = tuple[list[int], list[float], list[float], FinishReason]


def plain_step(logits: torch.Tensor, request: Request, position: int) -> tuple[int, float, float]:
    how = request.sampling
    columns = SamplingColumns(*(np.array([x]) for x in (how.temperature, how.top_k, how.top_p, how.min_p)))
    drawn = sampling.sample(logits.numpy(), np.array([request.key], np.uint64), np.array([position]), columns)
    return int(drawn.token_ids[0]), float(drawn.logprobs[0]), float(drawn.raw_logprobs[0])


def ended(request: Request, tokens: list[int]) -> FinishReason:
    how = request.sampling
    text = TOKENIZER.decode(tokens[request.turn_start :]) if how.stop else ""
    if tokens[-1] in how.stop_token_ids or any(string in text for string in how.stop):
        return FinishReason.STOP
    full = len(tokens) >= how.max_new_tokens or len(request.prompt_ids) + len(tokens) >= LENGTH
    return FinishReason.LENGTH if full else FinishReason.NONE


def plain_decoding(model: Any, request: Request, known: Sequence[int] = (), steps: int = 10**6) -> Answer:
    """Token by token, the whole sequence through the plain model each time."""
    tokens, logprobs, raw = list(known), [], []
    for _ in range(steps):
        ids = torch.tensor([[*request.prompt_ids, *tokens]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, -1:]
        token, logprob, raw_logprob = plain_step(logits, request, len(tokens))
        tokens.append(token)
        logprobs.append(logprob)
        raw.append(raw_logprob)
        reason = ended(request, tokens)
        if reason:
            return tokens, logprobs, raw, reason
    return tokens, logprobs, raw, FinishReason.NONE


@cache
def model_of(family: str, attention: str = "stretto", seed: int = 0) -> Any:
    return tiny_model(family, attention=attention, seed=seed)


@cache
def expected(family: str, index: int) -> Answer:
    return plain_decoding(model_of(family, "sdpa"), REQUESTS[index])


def make_engine(model: Any, slots: int = 4, budget: int = 64, tokenizer: Any = None, **more: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        model, tokenizer, worker=7, max_num_seqs=slots, max_model_len=LENGTH, max_num_batched_tokens=budget, **more
    )


class Run:
    """Steps an engine and keeps what it reports, as the ledger would."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.attempt: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.raw: dict[int, list[float]] = {}
        self.versions: dict[int, list[int]] = {}
        self.reason: dict[int, FinishReason] = {}
        self.stopped: set[int] = set()
        self.steps = 0

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.attempt[request.id] = request.attempt
            self.tokens.setdefault(request.id, request.token_ids.tolist())
            for log in (self.logprobs, self.raw, self.versions):
                log.setdefault(request.id, [])  # type: ignore[attr-defined]
        self.engine.submit(requests)

    def step(self) -> list[Event]:
        self.steps += 1
        assert self.steps < 3000
        events = self.engine.step()
        for event in events:
            if isinstance(event, Progress):
                self._take(event)
            elif isinstance(event, Finished):
                assert event.attempt == self.attempt[event.id]
                assert event.id not in self.reason
                self.reason[event.id] = event.reason
            elif isinstance(event, Stopped):
                assert event.attempt == self.attempt[event.id]
                self.stopped.add(event.id)
        return events

    def _take(self, event: Progress) -> None:
        assert event.worker == 7
        assert event.token_ids is not None
        assert event.logprobs is not None
        assert event.raw_logprobs is not None
        assert event.counts.sum() == event.token_ids.size == event.logprobs.size == event.raw_logprobs.size
        for place, id in enumerate(np.repeat(event.ids, event.counts).tolist()):
            assert id not in self.reason
            assert id not in self.stopped
            self.tokens[id].append(int(event.token_ids[place]))
            self.logprobs[id].append(float(event.logprobs[place]))
            self.raw[id].append(float(event.raw_logprobs[place]))
            self.versions[id].append(event.version)

    def stop(self, ids: Sequence[int]) -> None:
        self.engine.stop(ids, [self.attempt[id] for id in ids])

    def resume(self, request: Request) -> None:
        """Start a stopped request again from its tokens, as another attempt."""
        self.stopped.discard(request.id)
        tokens = np.array(self.tokens[request.id], np.int64)
        self.submit(
            Request(
                request.id,
                self.attempt[request.id] + 1,
                request.group,
                request.prompt_ids,
                tokens,
                request.turn_start,
                request.key,
                request.sampling,
            )
        )

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()


def assert_same(run: Run, request: Request, answer: Answer) -> None:
    tokens, logprobs, raw, reason = answer
    assert run.tokens[request.id] == tokens
    assert run.reason[request.id] == reason
    assert np.abs(np.subtract(run.logprobs[request.id], logprobs)).max() < 1e-9
    assert np.abs(np.subtract(run.raw[request.id], raw)).max() < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_same_tokens_under_any_schedule(family: str, data: st.DataObject) -> None:
    """Any order and time of arrival, slots, chunks, stops and resumes, threads, and either attention."""
    torch.set_num_threads(data.draw(st.integers(1, 2), label="threads"))
    model = model_of(family)
    engine = make_engine(
        model, data.draw(st.integers(1, 6), label="slots"), data.draw(st.sampled_from([1, 7, 40, 500]), label="budget")
    )
    if data.draw(st.booleans(), label="torch attention"):
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        engine._key_values = attention.TorchKeyValues(
            2, 2 * engine.slots, LENGTH, heads, size, torch.float64, torch.device("cpu")
        )
    run = Run(engine)
    order = data.draw(st.permutations(range(len(REQUESTS))), label="order")[:8]
    waiting, parked = list(order), []
    while waiting or parked or engine.has_work:
        action = data.draw(st.sampled_from(["submit", "step", "step", "stop", "resume"]))
        if action == "submit" and waiting:
            count = data.draw(st.integers(1, len(waiting)))
            run.submit(*(REQUESTS[i] for i in waiting[:count]))
            waiting = waiting[count:]
        elif action == "stop":
            live = [i for i in run.tokens if i not in run.reason and i not in parked]
            chosen = [i for i in live if data.draw(st.booleans())][:2]
            run.stop(chosen)
            parked += chosen
            run.step()
            parked = [i for i in parked if i not in run.reason]
        elif action == "resume" and parked:
            run.resume(REQUESTS[parked.pop(0)])
        else:
            for _ in range(data.draw(st.integers(1, 6))):
                run.step()
    for i in order:
        assert_same(run, REQUESTS[i], expected(family, i))
    assert engine.num_running == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_all_at_once_and_one_by_one(family: str) -> None:
    for slots in (15, 1):
        run = Run(make_engine(model_of(family), slots, 48))
        run.submit(*REQUESTS)
        run.finish()
        for i, request in enumerate(REQUESTS):
            assert_same(run, request, expected(family, i))


def copies(count: int, prompt: int = 2) -> list[Request]:
    return [make_request(i, prompt, i, SamplingParams(max_new_tokens=5)) for i in range(count)]


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
    assert counted["prefill_tokens"] == 63


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


def published(model: Any, version: int) -> WeightsRef:
    tensors = dict(model.named_parameters())
    return WeightsRef(version, "copy", fingerprint(tensors), tensors)


def new_engine_and_model(seed: int = 0, **how: Any) -> Run:
    return Run(make_engine(tiny_model("qwen3", seed=seed), **how))


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


def test_continue_keeps_what_was_computed() -> None:
    run = new_engine_and_model()
    request = make_request(0, 2, 0, SamplingParams(max_new_tokens=14))
    run.submit(request)
    for _ in range(5):
        run.step()
    run.engine.load(published(model_of("qwen3", seed=1), 1), "continue")
    late = make_request(1, 2, 1, SETTINGS[0])
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
    assert [e for e in events if not isinstance(e, Progress)] == [Stopped(7, 0, 0), Stopped(7, 1, 0), Loaded(7, 1)]
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
    run.engine.load(WeightsRef(4, "shared", ""), "recompute")
    run.finish()
    known = run.tokens[0][:1]
    assert run.tokens[0] == plain_decoding(model_of("qwen3", "sdpa", seed=1), copies(1)[0], known)[0]
    assert run.engine.version == 4


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = make_engine(tiny_model("qwen3"))
    before = fingerprint(dict(engine._model.named_parameters()))
    other = published(tiny_model("qwen3", intermediate_size=32), 1)
    with pytest.raises(StrettoError, match=r"mlp.*does not fit"):
        engine.load(other, "continue")
    with pytest.raises(StrettoError, match=r"nonsense.*no such tensor"):
        engine.load(WeightsRef(1, "copy", "", {"nonsense": torch.zeros(1)}), "continue")
    assert fingerprint(dict(engine._model.named_parameters())) == before
    assert engine.version == 0
    assert not engine.has_work


def text_model() -> Any:
    return tiny_model("llama", vocab_size=len(TOKENIZER))


def test_stop_ids_come_before_strings_and_strings_before_the_limit() -> None:
    plain = tiny_model("llama", attention="sdpa", vocab_size=len(TOKENIZER))
    base = make_request(0, 1, 0, SamplingParams(max_new_tokens=40))
    tokens = plain_decoding(plain, base)[0]
    text = TOKENIZER.decode(tokens)
    string = next(text[i : i + 2] for i in range(8, len(text)) if "\ufffd" not in text[i : i + 2])
    found = next(i for i in range(1, 41) if string in TOKENIZER.decode(tokens[:i]))
    requests = [
        make_request(0, 1, 0, SamplingParams(max_new_tokens=40, stop=("never", string))),
        make_request(1, 1, 0, SamplingParams(max_new_tokens=found, stop=(string,))),
        make_request(2, 1, 0, SamplingParams(max_new_tokens=found, stop=(string,), stop_token_ids=(tokens[found - 1],))),
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
        (changed(prompt_ids=np.ones(LENGTH, np.int64)), f"{LENGTH} tokens and leaves no room.*max_model_len = {LENGTH}"),
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
    assert engine.has_work
    assert any(isinstance(event, Progress) for event in engine.step())


def test_a_context_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"max_model_len is 129.*128"):
        EmbeddedEngine(
            model_of("gpt2"), None, worker=0, max_num_seqs=1, max_model_len=129, max_num_batched_tokens=64
        )


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


def cuda_model() -> Any:
    return tiny_model("qwen2", dtype=torch.float64).to("cuda")


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

