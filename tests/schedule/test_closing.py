"""Who may be started while the gate makes an update wait."""

from __future__ import annotations

import pytest

from stretto.buffer import Ledger
from stretto.config.schedules import Kind
from stretto.records import (
    Finished,
    FinishReason,
    Harvest,
    Loaded,
    Request,
    SamplingParams,
    Scored,
    Start,
    Updated,
    WorkerUp,
)
from stretto.schedule import ledger_options, make_schedule
from tests.schedule.runs import of
from tests.test_buffer import progress
from tests.world import prompt


def score(book: Ledger, requests: list[Request], version: int) -> None:
    """They get a token of these weights, end and have their rewards."""
    book.apply([progress(requests, [[1]] * len(requests), version)])
    for request in requests:
        book.apply([Finished(0, request.id, request.attempt, FinishReason.STOP)])
        book.apply([Scored(request.id, request.attempt, float(request.id % 2))])


@pytest.mark.parametrize("kind", ["sorted", "concurrency"])
def test_whom_an_update_waits_for_is_started_however_much_is_in_hand(kind: Kind) -> None:
    """Two batches of a group of two may be in hand under `max_staleness = 1`, and there is more, since a worker had old
    weights: a complete group that is due, another whose second member has to begin anew, and two that run.
    """
    config = of(kind, prompts=1, samples=2, max_staleness=1, off_policy_strategy="wait", load_prompts=8)
    book = Ledger(SamplingParams(max_new_tokens=9), **ledger_options(config))
    schedule = make_schedule(config)
    up = WorkerUp(0, 8, 0)
    book.apply([up])
    book.admit([(prompt(row), 0) for row in range(3)], 2)
    score(book, book.start([0, 1, 2], 0), 0)
    book.apply([Updated(1), Loaded(0, 1)])
    book.apply([progress(book.start([4, 5], 0), [[1]] * 2, 1)])
    decisions = schedule.decide(book.view, [up])
    assert book.view.gate([0, 1]).blocked == [2]
    assert [d for d in decisions if isinstance(d, (Harvest, Start))] == [Start([3], 0)]
    score(book, book.start([3], 0), 1)
    (harvest,) = (d for d in schedule.decide(book.view, []) if isinstance(d, Harvest))
    assert harvest == Harvest([0, 1])
