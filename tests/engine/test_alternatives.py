"""The engine reports what else could have been drawn at every place, drafted or not."""

from __future__ import annotations

import numpy as np
import torch

from stretto.alternatives import Alternatives
from stretto.draft.budget import Fixed
from stretto.draft.drafter import HistoryDrafter
from stretto.engine import Drafter
from stretto.engine.embedded import EmbeddedEngine
from stretto.history.index import HistoryIndex
from stretto.records import Progress, SamplingParams
from tests.engine.runs import LENGTH, make_request, model_of

REQUESTS = [make_request(i, i % 3, i, SamplingParams(max_new_tokens=10)) for i in range(6)]


def reported(drafter: Drafter | None) -> tuple[dict[int, list[int]], dict[int, Alternatives]]:
    """Tokens and alternatives of each request."""
    engine = EmbeddedEngine(
        model_of("llama"),
        None,
        worker=0,
        max_num_seqs=4,
        max_model_len=LENGTH,
        max_num_batched_tokens=64,
        drafter=drafter,
        alternatives=3,
    )
    engine.submit(REQUESTS)
    tokens: dict[int, list[int]] = {request.id: [] for request in REQUESTS}
    parts: dict[int, list[Alternatives]] = {request.id: [] for request in REQUESTS}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Progress):
                assert event.token_ids is not None
                assert event.top is not None
                ends = np.cumsum(event.counts)
                for id, end, count in zip(event.ids.tolist(), ends, event.counts, strict=True):
                    tokens[id] += event.token_ids[end - count : end].tolist()
                    parts[id].append(event.top[end - count : end])
    joined = {
        id: Alternatives(
            np.concatenate([part.token_ids for part in some]),
            np.concatenate([part.logprobs for part in some]),
        )
        for id, some in parts.items()
    }
    return tokens, joined


def test_they_are_those_of_the_plain_model_with_drafts_and_without() -> None:
    budget = Fixed(8)
    drafter = HistoryDrafter(HistoryIndex(), budget, slots=4)
    plain, drafted = reported(None), reported(drafter)
    assert plain[0] == drafted[0]
    for request in REQUESTS:
        ids = torch.tensor([[*request.prompt_ids, *plain[0][request.id]]])
        with torch.no_grad():
            logits = model_of("llama", "eager")(input_ids=ids, use_cache=False).logits[
                0, request.prompt_ids.size - 1 : -1
            ]
        expected = logits.log_softmax(-1).topk(3)
        for top in (plain[1][request.id], drafted[1][request.id]):
            np.testing.assert_array_equal(top.token_ids, expected.indices.numpy())
            np.testing.assert_allclose(top.logprobs, expected.values.numpy(), atol=1e-5)
