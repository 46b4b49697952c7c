"""Requests that bring their own dropped tokens give the tokens of plain decoding, in few steps where little changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.draft.budget import Budget, Fixed, Goodput
from stretto.draft.cost import CostModel
from stretto.draft.drafter import HistoryDrafter
from stretto.engine.embedded import EmbeddedEngine
from stretto.history.index import HistoryIndex
from stretto.records import IntArray, Request, SamplingParams
from tests.engine.runs import (
    REQUESTS,
    Run,
    any_schedule,
    assert_same,
    expected,
    make_engine,
    make_request,
    model_of,
)
from tests.models import VOCABULARY


def cheap() -> CostModel:
    cost = CostModel()
    cost.fit([(1, 1.0), (4096, 1.001)])
    return cost


def make_drafter(budget: Budget, slots: int) -> HistoryDrafter:
    return HistoryDrafter(HistoryIndex(), budget, slots=slots, max_nodes=8)


def dropped_ids(data: st.DataObject, index: int) -> IntArray:
    """Right, cut, changed at one place, longer than it may be, or anything at all."""
    right = expected("llama", index)[0]
    token = st.integers(0, VOCABULARY - 1)
    kind = data.draw(st.sampled_from(["none", "right", "cut", "changed", "longer", "garbage"]))
    if kind == "none":
        return np.zeros(0, np.int64)
    if kind == "garbage":
        return np.array(data.draw(st.lists(token, max_size=100)), np.int64)
    ids = np.array(right, np.int64)
    if kind == "cut":
        return ids[: data.draw(st.integers(0, ids.size))]
    if kind == "changed":
        ids[data.draw(st.integers(0, ids.size - 1))] = data.draw(token)
    if kind == "longer":
        return np.concatenate([ids, data.draw(st.lists(token, min_size=1, max_size=70))])
    return ids


@settings(max_examples=12)
@given(data=st.data())
def test_no_dropped_tokens_change_a_token(data: st.DataObject) -> None:
    budget = data.draw(st.sampled_from([Fixed(3), Fixed(64), Goodput(cheap())]))
    slots = data.draw(st.integers(1, 6), label="slots")
    batched = data.draw(st.sampled_from([3, 17, 500]), label="batched tokens")
    engine = make_engine(model_of("llama"), slots, batched, drafter=make_drafter(budget, slots))
    run = Run(engine)
    order = data.draw(st.permutations(range(len(REQUESTS))), label="order")[:5]
    requests = {i: replace(REQUESTS[i], draft_ids=dropped_ids(data, i)) for i in order}
    any_schedule(data, run, order, requests)
    for i in order:
        assert_same(run, requests[i], expected("llama", i))


def long_run(budget: Budget | None, *requests: Request) -> Run:
    """All of it in a context of 128 tokens."""
    engine = EmbeddedEngine(
        model_of("llama"),
        None,
        worker=7,
        max_num_seqs=4,
        max_model_len=128,
        max_num_batched_tokens=500,
        drafter=make_drafter(budget, 4) if budget else None,
    )
    run = Run(engine)
    run.submit(*requests)
    run.finish()
    return run


@pytest.mark.parametrize("budget", [Fixed(64), Goodput(cheap())])
def test_what_still_holds_comes_in_a_step_for_every_64_tokens(budget: Budget) -> None:
    """After a step for the prompt; the last token of every step is one beyond its draft."""
    requests = [make_request(i, 1, i, SamplingParams(max_new_tokens=118)) for i in range(3)]
    plain = long_run(None, *requests)
    again = [replace(r, draft_ids=np.array(plain.tokens[r.id])) for r in requests]
    run = long_run(budget, *again)
    assert (run.tokens, run.reason) == (plain.tokens, plain.reason)
    for request in requests:
        assert np.allclose(run.logprobs[request.id], plain.logprobs[request.id], rtol=0, atol=1e-9)
    assert run.steps <= -(-118 // 64) + 2
    assert plain.steps >= 118


def test_a_change_costs_little_more_than_the_tokens_behind_it() -> None:
    request = make_request(0, 1, 0, SamplingParams(max_new_tokens=118))
    plain = long_run(None, request)
    ids = np.array(plain.tokens[0])
    ids[100] = (ids[100] + 1) % VOCABULARY
    run = long_run(Fixed(64), replace(request, draft_ids=ids))
    assert run.tokens == plain.tokens
    assert run.steps <= 2 + 2 + 17


def test_token_ids_of_another_model_are_refused() -> None:
    request = replace(REQUESTS[0], draft_ids=np.array([1, VOCABULARY]))
    with pytest.raises(ValueError, match=r"request 0: token ids of its dropped tokens are outside 0 \.\. 30"):
        make_engine(model_of("llama")).submit([request])
