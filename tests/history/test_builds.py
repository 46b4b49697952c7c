"""Automata are built aside: nobody waits unasked, what fails is done without, nothing depends on when it is done."""

from __future__ import annotations

import gc
import threading
import time
from concurrent import futures
from typing import Any

import numpy as np
import pytest

from stretto.history import builds
from stretto.history.builds import Weight
from stretto.history.frozen import Frozen, freeze
from stretto.history.index import HistoryIndex
from tests.history.responses import HeldUp, known, response


def test_the_background_is_not_waited_for_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    held_up = HeldUp(monkeypatch)
    index = HistoryIndex()
    index.add("a", 0, [response((1,))])
    index.prepare(["a"])
    index.prepare(["a"])
    assert held_up.begun.wait(30)
    assert index.open("a") == -1
    index.add("a", 0, [response((2,))])
    held_up.go.set()
    index.wait(["a"])
    assert set(known(index, index.open("a"))) == {(), (1,), (2,)}
    assert index.metrics()["built_tokens"] == 3  # the first build's one, and two


def test_who_is_waited_for_does_not_stand_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    held_up = HeldUp(monkeypatch)
    index = HistoryIndex()
    for place, uid in enumerate("abc"):
        index.add(uid, 0, [response((place,))])
    index.prepare("abc")
    assert held_up.begun.wait(30)
    index.wait("c")  # while the thread is at "a"
    assert set(known(index, index.open("c"))) == {(), (2,)}
    assert index.open("a") == index.open("b") == -1
    held_up.go.set()
    index.wait("abc")
    assert set(known(index, index.open("b"))) == {(), (1,)}
    assert index.metrics()["built_tokens"] == 3  # nothing was built twice


def test_what_cannot_be_built_is_done_without_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = HistoryIndex()
    index.add("a", 0, [response((1,))])
    index.add("b", 0, [response((2,))])

    def fail(*arguments: np.ndarray) -> Frozen:
        raise MemoryError(f"no room for {arguments[0].tolist()}")

    with monkeypatch.context() as patched:
        patched.setattr(builds, "freeze", fail)
        index.prepare("ab")
        futures.wait([job.future for job in index._jobs.values()], timeout=30)
        index.add("c", 0, [response((3,))])
        index.wait("abc")  # of these c in this thread or in that one
    assert [index.open(uid) for uid in "abc"] == [-1] * 3
    (said,) = caplog.messages
    assert said == "no drafts from what prompt a said before: MemoryError: no room for [1]"
    index.add("a", 1, [response((4,))])
    index.wait("abc")
    assert set(known(index, index.open("a"))) == {(), (1,), (4,)}
    assert index.open("b") == -1


@pytest.mark.parametrize("weight", ["count", "probability"])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_dropped_does_not_depend_on_how_fast_the_thread_builds(
    seed: int, weight: Weight, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = threading.current_thread()

    def slowly(*arguments: Any) -> Frozen:
        if threading.current_thread() is not caller:
            time.sleep(0.003)
        return freeze(*arguments)

    monkeypatch.setattr(builds, "freeze", slowly)
    quick, late = (HistoryIndex(weight=weight, max_bytes=30_000) for _ in range(2))
    random = np.random.default_rng(seed)
    visits, dropped = dict.fromkeys(range(9), 0), []
    for step in range(12):
        uids = random.permutation(9)[:4].tolist()
        for uid in uids:
            tokens = tuple(random.integers(0, random.integers(2, 60), random.integers(1, 160)).tolist())
            for index in (quick, late):
                index.add(str(uid), visits[uid], [response(tokens)])
            visits[uid] += 1
        for index in (quick, late):
            index.prepare(map(str, uids))
        futures.wait([job.future for job in quick._jobs.values()], timeout=30)
        if step % 3 == 0:  # between steps in which nobody asks
            for index in (quick, late):
                index.wait([str(uids[0])])
                if (handle := index.open(str(uids[0]))) >= 0:
                    index.close(handle)
        kept = [{uid: sorted(h.visits) for uid, h in i._histories.items()} for i in (quick, late)]
        assert kept[0] == kept[1]
        dropped.append(late.metrics()["dropped_visits"])
    assert sum(dropped) > 4


def test_the_thread_ends_with_its_index() -> None:
    index = HistoryIndex()
    index.add("a", 0, [response((1,))])
    before = set(threading.enumerate())
    index.prepare(["a"])
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    del index
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
