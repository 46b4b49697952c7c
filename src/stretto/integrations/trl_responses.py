"""Requests through the embedded engine until all of them are answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stretto.alternatives import Alternatives
from stretto.engine.embedded import EmbeddedEngine
from stretto.records import Event, Finished, FinishReason, FloatArray, IntArray, Progress, Request


class Response(NamedTuple):
    """What a request was answered, N tokens."""

    token_ids: IntArray  # (N,)
    logprobs: FloatArray  # (N,), under the distribution that they were drawn from
    raw_logprobs: FloatArray  # (N,), temperature only
    top: Alternatives | None  # at the N places, where the engine reports them
    finish_reason: FinishReason
    drafted: int
    accepted: int
    decode_steps: int


def generate(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Response]:
    """The responses to `requests`, whose ids are 0, 1, 2 ..., in their order.

    If it is broken off, the engine lets go of what runs, so that its drafter may serve another.
    """
    steps: list[Progress] = []
    reasons = [FinishReason.NONE] * len(requests)
    engine.submit(requests)
    try:
        while engine.has_work:
            _note(engine.step(), steps, reasons)
    finally:
        left = [request for request in requests if not reasons[request.id]]
        engine.stop([request.id for request in left], [request.attempt for request in left])
    return _responses(steps, reasons)


def _note(events: Sequence[Event], steps: list[Progress], reasons: list[FinishReason]) -> None:
    for event in events:
        if isinstance(event, Progress):
            steps.append(event)
        elif isinstance(event, Finished):
            reasons[event.id] = event.reason


def _responses(steps: Sequence[Progress], reasons: Sequence[FinishReason]) -> list[Response]:
    """The columns of all steps, sorted by request."""
    count = len(reasons)
    ids = np.concatenate([step.ids for step in steps])
    owner = np.repeat(ids, np.concatenate([step.counts for step in steps]))
    order, ends = np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=count))

    def column(name: str) -> list[Any]:
        return np.split(np.concatenate([getattr(step, name) for step in steps])[order], ends[:-1])

    token_ids, logprobs, raw = (column(name) for name in ("token_ids", "logprobs", "raw_logprobs"))
    tops: list[Alternatives | None] = [None] * count
    known = [step.top for step in steps if step.top is not None]
    if known:
        sides = (
            np.concatenate([top.token_ids for top in known]),
            np.concatenate([top.logprobs for top in known]),
        )
        split = (np.split(side[order], ends[:-1]) for side in sides)
        tops = [Alternatives(top_ids, probs) for top_ids, probs in zip(*split, strict=True)]
    drafted, accepted = (
        np.bincount(ids, np.concatenate([getattr(step, name) for step in steps]), count).astype(np.int64)
        for name in ("drafted", "accepted")
    )
    decode_steps = np.bincount(ids, minlength=count)
    return [
        Response(
            token_ids[i].astype(np.int64),
            logprobs[i],
            raw[i],
            tops[i],
            reasons[i],
            int(drafted[i]),
            int(accepted[i]),
            int(decode_steps[i]),
        )
        for i in range(count)
    ]
