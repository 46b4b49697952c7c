"""What a fleet needs of the place where its workers' processes are: this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from stretto.fleet.messages import Command, Load
from stretto.spawn import ProcessLost
from stretto.weights import WeightsRef

__all__ = ["Channel", "Hosts", "Message", "ProcessLost", "Published"]

Message = bytes | Load
"""A pickled command; or a `Load` as it is, whose weights travel by ways of their own."""


class Channel(Protocol):
    """A worker's process from outside. One thread receives; any thread may send or kill."""

    @property
    def pid(self) -> int:
        """Its number where it runs; 0: it does not run yet."""

    @property
    def name(self) -> str:
        """For messages."""

    def waits(self) -> str:
        """What it needs before it can begin and does not get; empty: nothing."""

    def send(self, message: Any, /) -> None:
        """Hand over one message, as `Hosts.pack` made it. Whether the process is there still, only `receive` says."""

    def receive(self, within: float) -> bytes | None:
        """The next reply; None if it takes more seconds than this. Raises `ProcessLost` when the process has ended."""

    def kill(self) -> None:
        """End it, whatever it is doing."""

    def close(self) -> None:
        """Kill it and let go of it; only the thread that receives may."""


class Published(Protocol):
    """Weights that workers may pull."""

    def write(self, ref: WeightsRef) -> WeightsRef:
        """`ref` in the form in which workers read it; the same one for the same version."""

    def publish(self, written: WeightsRef, workers: Iterable[int]) -> None:
        """Keep it for these workers."""

    def taken(self, worker: int, version: int | None = None) -> None:
        """`worker` has read `version`; None: it reads nothing any more."""


class Hosts(Protocol):
    """Starts processes in places 0, 1 ..., one after the other in each."""

    @property
    def weights(self) -> Published: ...

    def start(self, place: int, show: Callable[[str], None]) -> Channel:
        """A process; `show` gets the lines that it prints, where they can be had. Raises OSError."""

    def pack(self, command: Command) -> Message: ...

    def leave(self, place: int) -> None:
        """Nothing more will be started there."""

    def close(self) -> None:
        """The processes are gone: remove what was kept for them."""
