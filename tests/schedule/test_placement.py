from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.buffer import Ledger
from stretto.records import (
    Event,
    Finished,
    FinishReason,
    Loaded,
    SamplingParams,
    Start,
    Updated,
    WorkerDown,
    WorkerUp,
)
from stretto.schedule.placement import FreeSlots, fill
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


def test_only_workers_with_the_newest_weights() -> None:
    book, up = ledger([2, 2], 4, 1)
    free = FreeSlots()
    free.watch(up)
    book.apply([Updated(1), Loaded(1, 1)])
    assert free.room(book.view, newest=True) == {1: 2}
    book.apply([Loaded(0, 1)])
    assert free.room(book.view, newest=True) == {0: 2, 1: 2}


@settings(max_examples=100, deadline=None)
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
