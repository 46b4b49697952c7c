"""With drafts of any shape and quality the engine gives the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.draft import Drafts
from stretto.draft.budget import make_budget
from stretto.draft.cost import CostModel
from stretto.draft.drafter import IDLE_GROUPS, HistoryDrafter
from stretto.engine import attention, embedded
from stretto.engine.packing import tree_views
from stretto.history.builds import Weight
from stretto.history.index import HistoryIndex
from stretto.model import FAMILIES
from stretto.records import IntArray, Prompt, Request, Rollout, Running, SamplingParams, prompt_uid
from stretto.weights import WeightsRef
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.drafters import Oracle
from tests.engine.runs import (
    REQUESTS,
    Answer,
    Run,
    any_schedule,
    assert_same,
    expected,
    make_engine,
    make_request,
    model_of,
    plain_decoding,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(data=st.data())
def test_same_tokens_under_any_drafts_and_schedule(family: str, data: st.DataObject) -> None:
    answers = {i: expected(family, i) for i in range(len(REQUESTS))}
    oracle = Oracle(
        {i: answer[0] for i, answer in answers.items()},
        data.draw(st.integers(0, 10**6), label="seed"),
        data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]), label="knows"),
    )
    engine = make_engine(
        model_of(family),
        data.draw(st.integers(1, 6), label="slots"),
        data.draw(st.sampled_from([3, 17, 500]), label="budget"),
        drafter=oracle,
    )
    if data.draw(st.booleans(), label="torch attention"):
        key_values = engine._key_values
        assert isinstance(key_values, attention.CpuKeyValues)
        rows, heads, length, size = key_values.values[0].shape
        engine._key_values = attention.TorchKeyValues(
            2, rows, length, heads, size, torch.float64, torch.device("cpu")
        )
    run = Run(engine)
    order = data.draw(st.permutations(range(len(REQUESTS))), label="order")[:6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "AHEAD", data.draw(st.sampled_from([0, 1 << 20]), label="logits drawn ahead"))
        any_schedule(data, run, order)
    for i in order:
        assert_same(run, REQUESTS[i], answers[i])


def test_right_drafts_save_steps() -> None:
    truth = {i: expected("llama", i)[0] for i in range(len(REQUESTS))}
    run = Run(make_engine(model_of("llama"), 15, 1000, drafter=Oracle(truth, 0, 1.0)))
    run.submit(*REQUESTS)
    run.finish()
    for i, request in enumerate(REQUESTS):
        assert_same(run, request, expected("llama", i))
    counted = run.engine.metrics()
    tokens = sum(len(answer) for answer in truth.values())
    assert counted["decode_tokens"] == tokens
    assert counted["decode_steps"] + counted["accepted_tokens"] >= tokens
    assert counted["decode_steps"] < 0.7 * tokens
    assert counted["drafted_tokens"] > counted["accepted_tokens"] > 0


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_string_inside_the_accepted_path_ends_the_response(seed: int) -> None:
    tokenizer, model = byte_tokenizer(), model_of("llama")
    plain = make_request(0, 1, seed, SamplingParams(max_new_tokens=30))
    text = str(tokenizer.decode(plain_decoding(model_of("llama", "sdpa"), plain)[0]))
    how = SamplingParams(max_new_tokens=30, stop=(text[6:8],))
    request = make_request(0, 1, seed, how)
    answer = plain_decoding(model_of("llama", "sdpa"), request)
    future = {0: [*answer[0], *range(1, 20)]}  # it would go on
    run = Run(make_engine(model, 1, 500, tokenizer, drafter=Oracle(future, seed, 1.0)))
    run.submit(request)
    run.finish()
    assert_same(run, request, answer)


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_token_inside_the_accepted_path_ends_the_response(seed: int) -> None:
    plain = make_request(0, 1, seed, SamplingParams(max_new_tokens=30))
    token = plain_decoding(model_of("llama", "sdpa"), plain)[0][6]
    request = make_request(0, 1, seed, SamplingParams(max_new_tokens=30, stop_token_ids=(token,)))
    answer = plain_decoding(model_of("llama", "sdpa"), request)
    run = Run(
        make_engine(model_of("llama"), 1, 500, drafter=Oracle({0: [*answer[0], *range(1, 20)]}, seed, 1.0))
    )
    run.submit(request)
    run.finish()
    assert_same(run, request, answer)


@pytest.mark.parametrize("running", ["continue", "recompute"])
def test_weights_may_come_between_two_steps(running: Running) -> None:
    truth = {i: expected("llama", i)[0] for i in range(len(REQUESTS))}
    run = Run(make_engine(model_of("llama"), 4, 500, drafter=Oracle(truth, 1, 0.9)))
    run.submit(*REQUESTS)
    while len(run.reason) < len(REQUESTS):
        run.step()
        run.engine.load(WeightsRef(run.steps, "shared", {}), running)
    for i, request in enumerate(REQUESTS):
        assert_same(run, request, expected("llama", i))


class TooMuch(Oracle):
    """Proposes what does not fit."""

    def __init__(self, drafts: Drafts) -> None:
        super().__init__({}, 0, 0.0)
        self.drafts = drafts

    def propose(self, slots: IntArray, generated: IntArray, room: IntArray, tokens: int, most: int) -> Drafts:
        return self.drafts


@pytest.mark.parametrize(("nodes", "depth"), [(65, 1), (2, 12), (30, 1)])
def test_drafts_that_do_not_fit_are_refused(nodes: int, depth: int) -> None:
    ids, floats = np.zeros(nodes, np.int64), np.zeros(nodes)
    drafts = Drafts(np.array([nodes]), ids, ids - 1, ids + depth, floats, ids.astype(np.int8))
    run = Run(make_engine(model_of("llama"), 1, 20 if nodes == 30 else 500, drafter=TooMuch(drafts)))
    run.submit(make_request(0, 1, 0, SamplingParams(max_new_tokens=12)))
    with pytest.raises(RuntimeError, match=f"the drafter proposed {nodes} nodes"):
        run.finish()


@given(st.data())
def test_a_node_sees_its_path(data: st.DataObject) -> None:
    counts = np.array(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    parents = np.array(
        [data.draw(st.integers(-1, k - 1)) for count in counts for k in range(count)], np.int64
    )
    length = np.array(data.draw(st.lists(st.integers(5, 30), min_size=counts.size, max_size=counts.size)))
    offset = length - 4
    visible, first, ancestors = tree_views(counts, parents, length, offset)
    node = 0
    for r, count in enumerate(counts):
        begin = node
        for k in range(count):
            path, up = [], k
            while up >= 0:
                path.append(int(length[r]) + up)
                up = int(parents[begin + up])
            seen = [*range(int(visible[node])), *(ancestors[first[node] : first[node + 1]] + 4).tolist()]
            assert seen == [*range(int(length[r])), *reversed(path)]
            node += 1
    assert first[-1] == ancestors.size


@pytest.mark.parametrize("budget", ["fixed", "aimd", "length_class", "marginal", "goodput"])
@pytest.mark.parametrize("weight", ["probability", "count", "reward", "recency"])
def test_same_tokens_with_a_history_of_any_kind_and_any_budget(budget: str, weight: Weight) -> None:
    """Three visits, the later ones from the history of the first; stopped and resumed on the way."""
    cost = CostModel()
    cost.fit([(1, 1.0), (64, 1.5)])
    drafter = HistoryDrafter(
        HistoryIndex(weight=weight), make_budget(budget, cost), slots=4, probabilities=weight == "probability"
    )
    run = Run(make_engine(model_of("llama"), 4, 500, drafter=drafter))
    answers = [expected("llama", i) for i in range(len(REQUESTS))]
    for visit in range(3):
        again = [replace(request, id=100 * visit + i, group=10 * visit) for i, request in enumerate(REQUESTS)]
        run.submit(*again)
        for _ in range(4):
            run.step()
        live = [id for id in run.tokens if id not in run.reason][:3]
        run.stop(live)
        run.step()
        for id in live:
            run.resume(again[id % 100])
        run.finish()
        rollouts = []
        for request, answer in zip(again, answers, strict=True):
            assert_same(run, request, answer)
            rollouts.append(finished(request, answer, visit))
        drafter.remember(rollouts)
    assert run.engine.metrics()["accepted_tokens"] > len(answers)  # the keys are those of the first visit
    assert drafter._pool.metrics()["groups"] <= 2 * IDLE_GROUPS


def finished(request: Request, answer: Answer, visit: int) -> Rollout:
    tokens, logprobs, raw, _ = answer
    return Rollout(
        request_id=request.id,
        group_id=request.group,
        prompt=Prompt(0, prompt_uid(request.prompt_ids), 0, request.prompt_ids, {}),
        sample_index=0,
        visit=visit,
        key=request.key,
        token_ids=np.array(tokens),
        logprobs=np.array(logprobs),
        raw_logprobs=np.array(raw),
        versions=np.zeros(len(tokens), np.int64),
        loss_mask=np.ones(len(tokens), np.bool_),
        reward=float(len(tokens)),
    )
