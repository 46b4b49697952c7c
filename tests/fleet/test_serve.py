"""The inside of a worker process, in a thread of this one."""

from __future__ import annotations

import pickle
import queue
import threading
from typing import Any

from stretto.fleet.messages import Command, DrafterState, Figures, Reply, Report, Stepped, Stop, Submit
from stretto.fleet.serve import Worker
from stretto.records import Finished, Progress, Stopped
from stretto.tally import Tally
from tests.fleet.toy import ToyEngine, request, response


class Watched(ToyEngine):
    """Counts how often it is asked whether it has work, which every turn of the worker's loop does."""

    asked = 0

    @property
    def has_work(self) -> bool:
        self.asked += 1
        return super().has_work


class Served:
    """A worker in a thread, with its inbox and what it sends."""

    def __init__(self, drafter: Any = None) -> None:
        self.engine = Watched((), 3)
        self.inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.sent: queue.Queue[Reply] = queue.Queue()
        worker = Worker(self.engine, drafter, self.inbox, self.sent.put)
        threading.Thread(target=worker.run, daemon=True).start()

    def command(self, *commands: Command) -> None:
        for command in commands:
            self.inbox.put(pickle.dumps(command))

    def until_idle(self, handled: int) -> list[Stepped]:
        """What it says until it has taken so many commands and has nothing to do."""
        said: list[Stepped] = []
        while not said or said[-1].busy or said[-1].handled < handled:
            reply = self.sent.get(timeout=30)
            assert isinstance(reply, Stepped)
            said.append(reply)
        return said


def test_says_what_each_step_gave_and_how_far_it_has_read() -> None:
    served = Served()
    served.command(Submit([request(1), request(2)]))
    said = served.until_idle(1)
    assert [reply.handled for reply in said] == [1] * len(said)
    assert [reply.busy for reply in said] == [True] * (len(said) - 1) + [False]
    steps = [event for reply in said for event in reply.events if isinstance(event, Progress)]
    # One message brought both: no step has one of them alone, up to where the shorter one ends.
    assert [step.ids.size for step in steps] == [2] * len(response(1)) + [1] * (
        len(response(2)) - len(response(1))
    )
    assert [event.id for event in said[-1].events if isinstance(event, Finished)] == [2]


def test_does_nothing_while_there_is_nothing_to_do() -> None:
    served = Served()
    served.command(Stop([5], [1]))  # unknown: no event, but it was read
    (said,) = served.until_idle(1)
    assert (said.events, said.handled) == ([], 1)
    asked = served.engine.asked
    threading.Event().wait(0.3)
    assert served.engine.asked <= asked + 1  # it may have been on its way into its sleep
    assert served.sent.empty()


def test_takes_commands_between_steps() -> None:
    served = Served()
    served.command(Submit([request(35)]))
    first = served.sent.get(timeout=30)
    assert isinstance(first, Stepped)
    served.command(Stop([35], [1]))
    said = served.until_idle(2)
    assert said[-1].events[-1] == Stopped(3, 35, 1)
    assert len(said) < len(response(35)) - 1


class Drafter:
    """Has learned something."""

    def state_dict(self) -> dict[str, Any]:
        return {"learned": 1}

    def counts(self) -> Tally:
        return Tally({"spec/proposed": 2.0}, {"spec/acceptance/1": (1.0, 2.0)})


def test_reports() -> None:
    served = Served(Drafter())
    served.command(Report(state=True), Report(state=False))
    assert served.sent.get(timeout=30) == DrafterState({"learned": 1})
    figures = served.sent.get(timeout=30)
    while isinstance(figures, Stepped):
        figures = served.sent.get(timeout=30)
    assert figures == Figures({"steps": 0.0, "step_seconds": 5.0}, Drafter().counts())
