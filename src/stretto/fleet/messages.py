"""What a trainer and the processes of its fleet say to each other besides events: arrays, numbers and strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.engine import Engine
from stretto.fleet import Drafting
from stretto.records import Event, Request, Rollout, Running
from stretto.tally import Tally
from stretto.weights import WeightsRef

Build = Callable[[int], tuple[Engine, Drafting | None]]
"""Makes the engine of the worker with this number, and its drafter; sent by reference, called in the process."""


@dataclass(slots=True)
class Setup:
    """The first message to a process."""

    build: Build
    worker: int


@dataclass(slots=True)
class Submit:
    requests: Sequence[Request]


@dataclass(slots=True)
class Stop:
    ids: Sequence[int]
    attempts: Sequence[int]


@dataclass(slots=True)
class Load:
    ref: WeightsRef  # of kind "file"
    running: Running


@dataclass(slots=True)
class Remember:
    """Finished responses become history."""

    rollouts: Sequence[Rollout]


@dataclass(slots=True)
class Restore:
    """The drafter goes on from this state."""

    state: Mapping[str, Any]
    budget: bool


@dataclass(slots=True)
class Report:
    """To be answered by the drafter's state, or by figures."""

    state: bool


Command = Submit | Stop | Load | Remember | Restore | Report


@dataclass(slots=True)
class Ready:
    """The engine stands."""

    slots: int
    version: int


@dataclass(slots=True)
class Stepped:
    """What came of one step."""

    events: list[Event]
    handled: int  # commands ever taken
    busy: bool  # the engine has work left


@dataclass(slots=True)
class Figures:
    """The engine's metrics and the drafter's counts since the last ones."""

    engine: dict[str, float]
    drafter: Tally


@dataclass(slots=True)
class DrafterState:
    """What the drafter has learned from verification; empty without one."""

    state: dict[str, Any]


@dataclass(slots=True)
class Failed:
    """The worker has raised, and ends; `message` is meant for the user as it is, or is a traceback."""

    message: str


Reply = Ready | Stepped | Figures | DrafterState | Failed
