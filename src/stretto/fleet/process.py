"""The fleet of more than one worker on one machine: processes spawned by the trainer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.fleet.messages import Build, Command
from stretto.fleet.workers import WorkerFleet
from stretto.records import Event
from stretto.spawn import SpawnedProcess
from stretto.weights import WeightFiles

SERVER = "stretto.fleet.serve"


class ProcessFleet(WorkerFleet):
    """`scratch` is a folder for weights, the fleet's own; `environment(place)` adds to what a process inherits;
    `more` as `WorkerFleet` has it.
    """

    def __init__(
        self,
        build: Build,
        post: Callable[[Event], None],
        *,
        scratch: Path,
        environment: Callable[[int], Mapping[str, str]] = lambda place: {},
        **more: Any,
    ) -> None:
        super().__init__(build, post, SpawnedHosts(scratch, environment), **more)


class SpawnedHosts:
    """Each process is this one's child, and ends with it. Weights go through files."""

    def __init__(self, scratch: Path, environment: Callable[[int], Mapping[str, str]]) -> None:
        self.weights, self._environment = WeightFiles(scratch), environment

    def start(self, place: int, show: Callable[[str], None]) -> Child:
        return Child(SERVER, show, self._environment(place))

    def pack(self, command: Command) -> bytes:
        return pickle.dumps(command, pickle.HIGHEST_PROTOCOL)

    def leave(self, place: int) -> None: ...

    def close(self) -> None:
        self.weights.close()


class Child(SpawnedProcess):
    """A spawned process as a fleet's channel."""

    @property
    def name(self) -> str:
        return f"process {self.pid}"

    def waits(self) -> str:
        return ""
