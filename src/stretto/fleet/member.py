"""A fleet's worker as the trainer knows it."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.fleet.channel import Channel
from stretto.fleet.messages import Ready


@dataclass(slots=True)
class Member:
    """A process as the trainer knows it. One that is started in a lost one's place has a number of its own, so that
    nothing meant for the one can reach the other.
    """

    number: int
    place: int  # 0 .. workers - 1, kept by those that come after it
    process: Channel
    waiting: bool = False  # it has no place in the cluster yet, and comes when it has
    waited: float = 0.0  # seconds
    ready: Ready | None = None
    missed: list[bytes] | None = None  # responses that come in while it is told of those before
    up: bool = False  # it is ready, and knows of all responses that others know of
    announced: bool = False  # its WorkerUp is posted
    lost: bool = False
    sent: int = 0  # commands
    handled: int = 0
    busy: bool = False  # its engine has work
    asked: int = 0  # reports
    reported: int = 0

    @property
    def owes(self) -> bool:
        """Whether something is still to come from it."""
        return not (self.lost or self.waiting) and (not self.up or self.busy or self.handled < self.sent)
