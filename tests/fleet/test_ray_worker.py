"""The actor around an engine, without Ray around it."""

from __future__ import annotations

import pickle
import queue
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="make test-ray")

from stretto.fleet import ray_worker
from stretto.fleet.messages import Stepped
from stretto.records import Finished, FinishReason, Progress

NOBODY_WAITS = Stepped([Progress(0, np.array([1]), np.array([0]), np.array([1]), version=0)], 1, busy=True)
SOMEBODY_WAITS = Stepped([Finished(0, 1, 0, FinishReason.STOP)], 1, busy=True)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that says whatever it is told to say, and would rather wait for ever."""
    module = ModuleType("parrot")

    def serve(inbox: queue.SimpleQueue[Any], send: Callable[[object], None]) -> None:
        while True:
            for reply in inbox.get():
                send(reply)

    monkeypatch.setattr(module, "serve", serve, raising=False)
    monkeypatch.setitem(sys.modules, "parrot", module)
    monkeypatch.setattr(ray_worker, "LINGER", 3600.0)
    return ray_worker.EngineActor([], "parrot")


def ask(actor: Any, found: list[list[bytes]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.append(actor.replies(3600.0)), daemon=True)
    thread.start()
    return thread


def test_news_that_nobody_waits_for_come_with_the_next_that_somebody_does(actor: Any) -> None:
    found: list[list[bytes]] = []
    asking = ask(actor, found)
    for number, news in enumerate([[NOBODY_WAITS], [NOBODY_WAITS], [SOMEBODY_WAITS]]):
        assert not found
        actor.take(number, [news])
    asking.join(60.0)
    assert [len(replies) for replies in found] == [3]
    assert found[0][-1] == pickle.dumps(SOMEBODY_WAITS, pickle.HIGHEST_PROTOCOL)


def test_what_came_before_it_was_asked_is_said_at_once_if_somebody_waits(actor: Any) -> None:
    actor.take(0, [[NOBODY_WAITS, SOMEBODY_WAITS]])
    found: list[list[bytes]] = []
    asking = ask(actor, found)
    asking.join(60.0)
    assert sum(map(len, found)) == 2


def test_news_that_nobody_waits_for_do_not_wait_for_ever(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "LINGER", 0.01)
    actor.take(0, [[NOBODY_WAITS]])
    found: list[list[bytes]] = []
    asking = ask(actor, found)
    asking.join(60.0)
    assert [len(replies) for replies in found] == [1]
