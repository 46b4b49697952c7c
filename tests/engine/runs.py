"""Plain decoding as the reference, and a driver of an engine that keeps what it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from stretto import sampling
from stretto.engine import Engine
from stretto.engine.embedded import EmbeddedEngine
from stretto.records import Event, Finished, FinishReason, Progress, Purpose, Request, SamplingParams, Stopped
from stretto.sampling import SamplingColumns, request_key
from tests.engine.byte_tokenizer import decode
from tests.models import VOCABULARY, tiny_model

LENGTH = 48  # max_model_len
NOTHING = np.zeros(0, np.int64)


def make_request(id: int, prompt: int, sample_index: int, how: SamplingParams) -> Request:
    """A sample of the `prompt`-th prompt; prompts have 1 to 40 tokens."""
    size = (1, 5, 40, 33, 2)[prompt]
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
    text = decode(tokens[request.turn_start :]) if how.stop else ""
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


def make_engine(
    model: Any, slots: int = 4, budget: int = 64, tokenizer: Any = None, **more: Any
) -> EmbeddedEngine:
    return EmbeddedEngine(
        model,
        tokenizer,
        worker=7,
        max_num_seqs=slots,
        max_model_len=LENGTH,
        max_num_batched_tokens=budget,
        **more,
    )


class Run:
    """Steps an engine and keeps what it reports, as the ledger would."""

    def __init__(self, engine: Engine) -> None:
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
                log.setdefault(request.id, [])
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
        self.submit(replace(request, attempt=self.attempt[request.id] + 1, token_ids=tokens))

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()


def assert_same(run: Run, request: Request, answer: Answer) -> None:
    tokens, logprobs, raw, reason = answer
    assert run.tokens[request.id] == tokens
    assert run.reason[request.id] == reason
    assert np.abs(np.subtract(run.logprobs[request.id], logprobs)).max() < 1e-9
    assert np.abs(np.subtract(run.raw[request.id], raw)).max() < 1e-9


def copies(count: int, prompt: int = 2) -> list[Request]:
    return [make_request(i, prompt, i, SamplingParams(max_new_tokens=5)) for i in range(count)]


def any_schedule(
    data: st.DataObject, run: Run, order: Sequence[int], requests: Mapping[int, Request] | None = None
) -> None:
    """Submit, step, stop and resume the requests of these numbers in any way, until all have ended."""
    requests = requests or dict(enumerate(REQUESTS))
    waiting = list(order)
    parked: list[int] = []
    while waiting or parked or run.engine.has_work:
        action = data.draw(st.sampled_from(["submit", "step", "step", "stop", "resume"]))
        if action == "submit" and waiting:
            count = data.draw(st.integers(1, len(waiting)))
            run.submit(*(requests[i] for i in waiting[:count]))
            waiting = waiting[count:]
        elif action == "stop":
            live = [i for i in run.tokens if i not in run.reason and i not in parked]
            chosen = [i for i in live if data.draw(st.booleans())][:2]
            run.stop(chosen)
            parked += chosen
            run.step()
            parked = [i for i in parked if i not in run.reason]
        elif action == "resume" and parked:
            run.resume(requests[parked.pop(0)])
        else:
            for _ in range(data.draw(st.integers(1, 6))):
                run.step()
