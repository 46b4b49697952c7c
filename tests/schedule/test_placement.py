from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.buffer import Ledger
from stretto.history.lengths import Ended, LengthHistory, rank_correlation
from stretto.records import (
    Event,
    Finished,
    FinishReason,
    Leapt,
    Loaded,
    SamplingParams,
    Start,
    Updated,
    WorkerDown,
    WorkerUp,
)
from stretto.schedule.placement import FreeSlots, fill, predict_groups
from stretto.simulate.workload import Drawn, Quantiles
from tests.world import prompt


def ledger(slots: list[int], prompts: int, samples: int) -> tuple[Ledger, list[Event]]:
    found = Ledger(SamplingParams())
    up: list[Event] = [WorkerUp(worker, count, 0) for worker, count in enumerate(slots)]
    found.apply(up)
    found.admit([(prompt(row), 0) for row in range(prompts)], samples)
    return found, up


def test_siblings_stay_together_as_far_as_there_is_room() -> None:
    book, up = ledger([4, 4, 2], 4, 3)
    free = FreeSlots()
    free.watch(up)
    starts = fill(book.view, book.view.waiting, free.room(book.view))
    assert starts == [Start([0, 1, 2, 8], 0), Start([3, 4, 5, 9], 1), Start([6, 7], 2)]


def test_siblings_that_have_ended_tell_how_long_the_others_are() -> None:
    """Prompts seen once before, with lengths as long-tailed; of their second visit the first two of six have ended."""
    trace = Drawn(Quantiles.lognormal(1000, 1.0), rows=60, share=0.6, stability=0.7, cap=100_000)
    history = LengthHistory()
    history.observe_lengths([Ended.of(r, r.token_ids.size) for r in trace.earlier(2, -1)])
    book = Ledger(SamplingParams(max_new_tokens=100_000))
    book.apply([WorkerUp(0, 400, 0)])
    book.admit(trace.next(60), 6)
    requests = book.start(list(book.waiting), 0)
    before = predict_groups(book.view, range(60), history)
    for request in requests:
        if book.view.sample_index(request.id) < 2:
            book.apply([Leapt(0, request.id, 1, trace.length(request.group, request.key), 0)])
            book.apply([Finished(0, request.id, 1, FinishReason.STOP)])
    after = predict_groups(book.view, range(60), history)
    left = [(r.group, trace.length(r.group, r.key)) for r in requests if book.view.sample_index(r.id) >= 2]
    actual = np.array([length for _, length in left], np.float64)
    without, with_siblings = (
        rank_correlation(np.array([predicted[group] for group, _ in left]), actual)
        for predicted in (before, after)
    )
    assert without > 0.2
    assert with_siblings > without + 0.1, (without, with_siblings)


def test_only_workers_with_the_newest_weights() -> None:
    book, up = ledger([2, 2], 4, 1)
    free = FreeSlots()
    free.watch(up)
    book.apply([Updated(1), Loaded(1, 1)])
    assert free.room(book.view, newest=True) == {1: 2}
    book.apply([Loaded(0, 1)])
    assert free.room(book.view, newest=True) == {0: 2, 1: 2}


@settings(max_examples=100)
@given(seed=st.integers(0, 100_000))
def test_what_events_tell_is_what_there_is(seed: int) -> None:
    draw = random.Random(seed)
    slots = [draw.randint(1, 4) for _ in range(draw.randint(1, 5))]
    book, events = ledger(slots, 200, 1)
    free = FreeSlots()
    view = book.view
    for _ in range(40):
        free.watch(events)
        wanted = draw.choice([None, draw.randint(0, 6)])
        there = {
            w: view.slots[w] - view.num_running(w) for w in view.slots if view.slots[w] > view.num_running(w)
        }
        room = free.room(view, enough=wanted)
        if wanted is None or sum(there.values()) <= wanted:
            assert room == there
        else:
            assert all(there[worker] == count for worker, count in room.items())
            assert sum(room.values()) >= wanted
        for start in fill(view, view.waiting, room, wanted):
            book.start(start.ids, start.worker)
        assert all(view.num_running(w) <= view.slots[w] for w in view.slots)
        events = []
        for worker in list(view.slots):
            if draw.random() < 0.05:
                events.append(WorkerDown(worker))
            else:
                ids = [i for i in view.running(worker) if draw.random() < 0.3]
                attempts = [int(book.columns.attempt[i]) for i in ids]
                events += [
                    Finished(worker, i, a, FinishReason.STOP) for i, a in zip(ids, attempts, strict=True)
                ]
        events += [
            WorkerUp(w, n, 0) for w, n in enumerate(slots) if w not in view.slots and draw.random() < 0.5
        ]
        book.apply(events)
        free.watch(events)
        assert free.in_flight(view) == sum(view.num_running(w) for w in view.slots)
        events = []
