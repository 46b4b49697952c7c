"""The inside of a fleet's worker process: an engine that takes commands between two of its steps.

Both directions are pickles, over a socket pair that only parent and child hold, or between a Ray driver and its actors;
nothing of the user's runs here.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from stretto.engine import Engine
from stretto.errors import StrettoError
from stretto.fleet import Drafting
from stretto.fleet.channel import Message
from stretto.fleet.messages import (
    Command,
    DrafterState,
    Failed,
    Figures,
    Load,
    Ready,
    Remember,
    Reply,
    Report,
    Restore,
    Setup,
    Stepped,
    Stop,
    Submit,
)
from stretto.spawn import connect, leave_signals_to_parent
from stretto.tally import Tally


class Inbox(Protocol):
    """Messages in the order in which they were sent."""

    def get(self) -> Message:
        """The next one; waits for it."""

    def empty(self) -> bool: ...


def main(descriptor: int) -> None:
    """Serve on the socket `descriptor` until the parent closes it or something fails."""
    leave_signals_to_parent()
    send_bytes, inbox = connect(descriptor)

    def send(reply: Reply) -> None:
        send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))

    serve(inbox, send)


def serve(inbox: Inbox, send: Callable[[Reply], None]) -> None:
    """Build the engine that the first message names, and serve until something fails, which is then said."""
    try:
        setup: Setup = _unpack(inbox.get())
        engine, drafter = setup.build(setup.worker)
        send(Ready(engine.slots, engine.version))
        Worker(engine, drafter, inbox, send).run()
    except StrettoError as error:
        send(Failed(str(error)))
    except Exception:  # noqa: BLE001 -- whatever it is, the trainer is to say it
        send(Failed(traceback.format_exc()))


class Worker:
    """Steps `engine` while it has work, and waits for a command while it has none."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafting | None,
        inbox: Inbox,
        send: Callable[[Reply], None],
    ) -> None:
        self.engine, self.drafter = engine, drafter
        self.inbox, self.send = inbox, send
        self.handled = 0

    def run(self) -> None:
        while True:
            before = self.handled
            if not self.engine.has_work:
                self.handle(self.inbox.get())
            while not self.inbox.empty():
                self.handle(self.inbox.get())
            events = self.engine.step() if self.engine.has_work else []
            busy = self.engine.has_work
            if events or self.handled > before or not busy:
                self.send(Stepped(events, self.handled, busy))

    def handle(self, message: Message) -> None:
        command: Command = _unpack(message)
        match command:
            case Submit():
                self.engine.submit(command.requests)
            case Stop():
                self.engine.stop(command.ids, command.attempts)
            case Load():
                self.engine.load(command.ref, command.running)
            case Remember() if self.drafter is not None:
                self.drafter.remember([past.rollout() for past in command.pasts])
            case Restore() if self.drafter is not None:
                self.drafter.load_state_dict(command.state, budget=command.budget)
            case Report(state=True):
                self.send(DrafterState({} if self.drafter is None else self.drafter.state_dict()))
            case Report():
                drafter = Tally() if self.drafter is None else self.drafter.counts()
                self.send(Figures(self.engine.metrics(), drafter))
        self.handled += 1


def _unpack(message: Message) -> Any:
    return pickle.loads(message) if isinstance(message, bytes) else message  # noqa: S301 -- from our own trainer
