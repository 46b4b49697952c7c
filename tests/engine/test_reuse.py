"""Prefix reuse in the engine gives what its rule gives token by token, whatever the schedule, drafts and restarts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import sampling
from stretto.alternatives import Alternatives
from stretto.draft.budget import Fixed
from stretto.draft.drafter import HistoryDrafter
from stretto.engine.reuse import log_probabilities
from stretto.errors import StrettoError
from stretto.history.index import HistoryIndex
from stretto.history.prefix import keeps, residual
from stretto.history.previous import PreviousVisits
from stretto.records import Progress, Prompt, Purpose, Request, Reuse, Rollout, SamplingParams
from stretto.sampling import SamplingColumns
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.drafters import Oracle
from tests.engine.runs import (
    REQUESTS,
    Answer,
    Run,
    any_schedule,
    assert_same,
    ended,
    expected,
    make_engine,
    make_request,
    model_of,
    plain_decoding,
    plain_step,
)

GRPO = math.exp(0.5)


def columns(how: SamplingParams) -> SamplingColumns:
    return SamplingColumns(*(np.array([x]) for x in (how.temperature, how.top_k, how.top_p, how.min_p)))


def plain_reuse(model: Any, request: Request) -> tuple[Answer, int, bool]:
    """Token by token, each time through the plain model; how many are kept; whether one was not."""
    reuse, kept = request.reuse, 0
    tokens: list[int] = []
    logprobs: list[float] = []
    raw: list[float] = []
    rejected = reuse is None
    while True:
        ids, place = torch.tensor([[*request.prompt_ids, *tokens]]), len(tokens)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, -1:]
        drawn = plain_step(logits, request, place)
        if reuse is not None and not rejected and place < reuse.token_ids.size:
            old, then = int(reuse.token_ids[place]), float(reuse.logprobs[place])
            processed, plain = (table[0] for table in log_probabilities(logits, columns(request.sampling)))
            now = np.array([processed[old]])
            rejected = not keeps(reuse.key, np.array([place]), now, np.array([then]), reuse.lenience)[0]
            kept += not rejected
            if not rejected:
                drawn = old, processed[old], plain[old]
            elif reuse.residual:
                top = reuse.top[place : place + 1] if reuse.top is not None else None
                weights = residual(np.exp(processed), old, then, top, reuse.lenience)
                noise = sampling.gumbel(
                    np.array([request.key], np.uint64), np.array([place]), np.arange(weights.size)
                )
                with np.errstate(divide="ignore"):
                    token = int(np.argmax(np.log(weights) + noise))
                drawn = token, processed[token], plain[token]
        tokens.append(drawn[0])
        logprobs.append(drawn[1])
        raw.append(drawn[2])
        reason = ended(request, tokens)
        if reason:
            return (tokens, logprobs, raw, reason), kept, rejected


def old_response(index: int, seed: int, lenience: float, residue: bool, width: int) -> Reuse:
    """What other weights said to the `index`-th prompt, with the `width` most probable alternatives."""
    request = replace(REQUESTS[index], key=seed)
    run = Run(make_engine(model_of("llama", seed=1), 1, alternatives=width))
    run.submit(request)
    tops = []
    while run.engine.has_work:
        tops += [event.top for event in run.step() if isinstance(event, Progress) and event.top is not None]
    top = None
    if tops:
        top = Alternatives(
            np.concatenate([t.token_ids for t in tops]), np.concatenate([t.logprobs for t in tops])
        )
    ids, logprobs = np.array(run.tokens[index]), np.array(run.logprobs[index])
    return Reuse(1000 + seed, ids, logprobs, top, lenience, residue)


class Interrupted(Run):
    """Stops and resumes as the ledger does: what is left to try depends on the tokens' log-probs."""

    def resume(self, request: Request) -> None:
        reuse, size = request.reuse, len(self.tokens[request.id])
        if reuse is not None and size:
            tokens, logprobs = np.array(self.tokens[request.id]), np.array(self.logprobs[request.id])
            count = min(size, reuse.token_ids.size)
            kept = keeps(
                reuse.key, np.arange(count), logprobs[:count], reuse.logprobs[:count], reuse.lenience
            )
            if size >= reuse.token_ids.size or not (kept & (tokens == reuse.token_ids[:size])).all():
                request = replace(request, reuse=None)
        super().resume(request)


@settings(max_examples=15)
@given(data=st.data())
def test_the_same_as_token_by_token(data: st.DataObject) -> None:
    lenience = data.draw(st.sampled_from([0.0, 0.5, 1.0, GRPO, 1e9]), label="lenience")
    residue, width = data.draw(st.booleans(), label="residual"), data.draw(st.sampled_from([0, 1, 8]))
    order = data.draw(st.permutations(range(len(REQUESTS))), label="order")[:5]
    requests = {
        i: replace(
            REQUESTS[i], reuse=old_response(i, data.draw(st.integers(0, 50)), lenience, residue, width)
        )
        if data.draw(st.integers(0, 3))
        else REQUESTS[i]
        for i in order
    }
    found = {i: plain_reuse(model_of("llama", "sdpa"), requests[i]) for i in order}
    slots = data.draw(st.integers(1, 6), label="slots")
    drafter = data.draw(st.sampled_from(["none", "oracle", "history"]))
    truth = {i: answer[0] for i, (answer, _, _) in found.items()}
    drafters: Mapping[str, Any] = {
        "none": lambda: None,
        "oracle": lambda: Oracle(truth, 0, 0.9),
        "history": lambda: HistoryDrafter(HistoryIndex(), Fixed(5), slots=slots, max_nodes=8),
    }
    engine = make_engine(
        model_of("llama"),
        slots,
        data.draw(st.sampled_from([3, 17, 500])),
        drafter=drafters[drafter](),
        alternatives=2,
    )
    run = Interrupted(engine)
    any_schedule(data, run, order, requests)
    for i in order:
        assert_same(run, requests[i], found[i][0])


def finish(requests: Sequence[Request], **more: Any) -> Run:
    run = Run(make_engine(model_of("llama"), 15, 1000, **more))
    run.submit(*requests)
    run.finish()
    return run


def test_one_pass_keeps_and_counts() -> None:
    """Under the weights that drew them, responses are kept whole: a step for the prompt, and one for all the rest."""
    requests = []
    for i, request in enumerate(REQUESTS):
        tokens, logprobs, _, _ = expected("llama", i)
        reuse = Reuse(i, np.array(tokens), np.array(logprobs), None, 1.0, False)
        requests.append(replace(request, key=request.key + 1, reuse=reuse))
    run = finish(requests)
    for i, request in enumerate(requests):
        assert_same(run, request, expected("llama", i))
    counted = run.engine.metrics()
    said = sum(len(expected("llama", i)[0]) for i in range(len(REQUESTS)))
    assert counted["reuse_kept_tokens"] == counted["decode_tokens"] == said
    assert counted["reuse_tried"] == counted["reuse_whole"] == len(REQUESTS)
    assert counted["drafted_tokens"] == counted["accepted_tokens"] == 0
    assert counted["steps"] <= 3


@pytest.mark.parametrize("residue", [False, True])
def test_counts_are_those_of_the_rule(residue: bool) -> None:
    requests = [
        replace(request, reuse=old_response(i, 7, 1.0, residue, 8)) for i, request in enumerate(REQUESTS)
    ]
    found = [plain_reuse(model_of("llama", "sdpa"), request) for request in requests]
    counted = finish(requests).engine.metrics()
    assert counted["reuse_kept_tokens"] == sum(kept for _, kept, _ in found)
    assert counted["reuse_whole"] == sum(not rejected for _, _, rejected in found)
    assert counted["reuse_tried"] == len(requests)
    assert 0 < counted["reuse_kept_tokens"] < counted["decode_tokens"]


def test_with_a_drafter_only_its_own_drafts_are_counted() -> None:
    requests = [
        replace(request, reuse=old_response(i, 7, 1e9, False, 0)) if i % 2 else request
        for i, request in enumerate(REQUESTS)
    ]
    found = [plain_reuse(model_of("llama", "sdpa"), request)[0] for request in requests]
    oracle = Oracle({i: answer[0] for i, answer in enumerate(found)}, 0, 1.0)
    run = finish(requests, drafter=oracle)
    for request, answer in zip(requests, found, strict=True):
        assert_same(run, request, answer)
    assert run.engine.metrics()["accepted_tokens"] == oracle.accepted > 0


def test_a_stop_string_ends_a_kept_response() -> None:
    model, tokenizer = model_of("llama"), byte_tokenizer()
    plain = make_request(0, 1, 0, SamplingParams(max_new_tokens=30))
    tokens, logprobs, _, _ = plain_decoding(model_of("llama", "sdpa"), plain)
    how = SamplingParams(max_new_tokens=30, stop=(str(tokenizer.decode(tokens))[6:8],))
    request = make_request(0, 1, 3, how)
    request.reuse = Reuse(0, np.array(tokens), np.array(logprobs), None, 1e9, False)
    answer, _, _ = plain_reuse(model_of("llama", "sdpa"), request)
    run = Run(make_engine(model, 1, 500, tokenizer))
    run.submit(request)
    run.finish()
    assert_same(run, request, answer)
    assert run.tokens[0] == tokens[: len(run.tokens[0])] != tokens
    assert run.engine.metrics()["reuse_whole"] == 1


def test_token_ids_of_another_model_are_refused() -> None:
    reuse = Reuse(0, np.array([1, 31]), np.zeros(2), None, 1.0, False)
    with pytest.raises(StrettoError, match=r"token ids of its earlier response are outside 0 \.\. 30"):
        make_engine(model_of("llama")).submit([replace(REQUESTS[0], reuse=reuse)])


class TestPreviousVisits:
    def rollout(self, visit: int, tokens: Sequence[int], sample_index: int = 0, **more: Any) -> Rollout:
        size = len(tokens)
        logs = np.log(np.linspace(0.3, 0.6, size))
        prompt = Prompt(0, "uid", more.pop("occurrence", 0), np.array([1]), {})
        ids, zeros, mask = np.array(tokens, np.int64), np.zeros(size, np.int64), np.ones(size, np.bool_)
        return replace(Rollout(0, 0, prompt, sample_index, visit, 5, ids, logs, logs, zeros, mask), **more)

    def previous(self, lenience: float = 1.0) -> PreviousVisits:
        return PreviousVisits(seed=3, lenience=lenience, residual=False)

    def test_the_newest_visit_of_the_same_sample(self) -> None:
        it = self.previous()
        it.remember([self.rollout(1, [5, 6]), self.rollout(0, [7, 8, 9])])
        it.remember([self.rollout(1, [4], sample_index=1), self.rollout(1, [3], occurrence=1)])
        found = it.reuse(self.rollout(2, []))
        assert found is not None
        assert found.token_ids.tolist() == [5, 6]
        assert it.reuse(self.rollout(1, [])) is None
        assert it.reuse(self.rollout(2, [], sample_index=2)) is None
        other = it.reuse(self.rollout(3, []))
        assert other is not None
        assert len({found.key, other.key, sampling.request_key(3, Purpose.TRAIN, "uid", 0, 0, 2)}) == 3

    def test_it_ends_where_the_environment_answered(self) -> None:
        it = self.previous()
        it.remember([self.rollout(0, [5, 6, 7, 8], loss_mask=np.array([True, True, False, True]))])
        found = it.reuse(self.rollout(1, []))
        assert found is not None
        assert found.token_ids.tolist() == [5, 6]
        assert it.reuse(self.rollout(1, [5, 6, 7, 1])) is None

    def test_an_interrupted_one_goes_on_if_all_was_kept(self) -> None:
        it = self.previous(lenience=1e9)
        it.remember([self.rollout(0, [5, 6, 7, 8])])
        assert it.reuse(self.rollout(1, [5, 6])) is not None
        assert it.reuse(self.rollout(1, [5, 7])) is None
        never = self.previous(lenience=0.0)  # the same token was drawn after a rejection
        never.remember([self.rollout(0, [5, 6, 7, 8])])
        assert never.reuse(self.rollout(1, [5, 6])) is None
