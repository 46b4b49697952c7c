"""A toy engine for worker processes that start at once, and what can befall them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stretto.errors import StrettoError
from stretto.fleet.process import ProcessFleet
from stretto.records import (
    Event,
    Finished,
    FinishReason,
    Loaded,
    Progress,
    Request,
    Rollout,
    Running,
    SamplingParams,
    Stopped,
)
from stretto.tally import Tally
from stretto.weights import WeightsRef

Name = tuple[int, int]


def response(key: int) -> list[int]:
    """What the toy policy says under this key, whoever runs it: 5 to 40 tokens."""
    draw = np.random.default_rng(key)
    return [int(token) for token in draw.integers(0, 100, 5 + key % 36)]


@dataclass(frozen=True)
class Fault:
    """Befalls the worker of this number: in its constructor (`step` 0), or in its step-th step."""

    worker: int
    step: int
    kind: str  # "kill", "hang", "stop", "raise", "refuse"

    def strike(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "hang":
            time.sleep(3600)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "refuse":
            raise StrettoError("the engine will not have it")
        raise ZeroDivisionError("an engine's own")


class ToyEngine:
    """One token per running request and step; a step takes a millisecond, so that commands come in between."""

    def __init__(self, faults: Sequence[Fault], worker: int, endless: bool = False, slots: int = 4) -> None:
        self.worker, self.slots, self.version = worker, slots, 0
        self._faults = {fault.step: fault for fault in faults if fault.worker == worker}
        self._endless = endless
        self._requests: dict[Name, Request] = {}  # the first `slots` run
        self._said: dict[Name, int] = {}
        self._events: list[Event] = []
        self._steps = 0
        self._since = 0
        self._strike()

    def _strike(self) -> None:
        if self._steps in self._faults:
            self._faults[self._steps].strike()

    @property
    def num_running(self) -> int:
        return min(self.slots, len(self._requests))

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._events)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            name = (request.id, request.attempt)
            assert request.token_ids.tolist() == response(request.key)[: request.token_ids.size]
            self._requests[name], self._said[name] = request, request.token_ids.size

    def stop(self, ids: Sequence[int], attempts: Sequence[int]) -> None:
        for name in zip(ids, attempts, strict=True):
            if self._requests.pop(name, None):
                self._events.append(Stopped(self.worker, *name))

    def load(self, ref: WeightsRef, running: Running) -> None:
        self.version = ref.version
        self._events.append(Loaded(self.worker, ref.version))

    def step(self) -> list[Event]:
        time.sleep(0.001)
        events, self._events = self._events, []
        self._steps += 1
        self._since += 1
        self._strike()
        running = list(self._requests)[: self.slots]
        if not running:
            return events
        new = [self._next(name) for name in running]
        columns = np.array(running, np.int64)
        nothing = np.zeros(len(running))
        events.append(
            Progress(
                self.worker,
                columns[:, 0],
                columns[:, 1],
                np.ones(len(running), np.int64),
                self.version,
                np.array(new, np.int64),
                nothing,
                nothing,
            )
        )
        for name in running:
            self._said[name] += 1
            if self._said[name] == len(response(self._requests[name].key)) and not self._endless:
                del self._requests[name]
                events.append(Finished(self.worker, *name, FinishReason.STOP))
        return events

    def _next(self, name: Name) -> int:
        said = response(self._requests[name].key)
        return said[self._said[name] % len(said)]

    def metrics(self) -> dict[str, float]:
        steps, self._since = self._since, 0
        return {"steps": float(steps), "step_seconds": 2.0 + self.worker}


def build(faults: Sequence[Fault], endless: bool, worker: int) -> tuple[ToyEngine, None]:
    return ToyEngine(faults, worker, endless), None


def toy(*faults: Fault, endless: bool = False) -> partial[tuple[ToyEngine, None]]:
    return partial(build, faults, endless)


class Rememberer:
    """A drafter that says what it was told, as (prompt, visit, tokens), each once."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, list[int]]] = []

    def remember(self, rollouts: Sequence[Rollout]) -> None:
        self.told += [(r.prompt.uid, r.visit, r.token_ids.tolist()) for r in rollouts]

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state: Mapping[str, Any], *, budget: bool = True) -> None: ...

    def counts(self) -> Tally:
        return Tally()

    def metrics(self) -> dict[str, float]:
        return {}


def build_remembering(worker: int) -> tuple[ToyEngine, Rememberer]:
    return ToyEngine((), worker), Rememberer()


def request(id: int, attempt: int = 1) -> Request:
    nothing = np.zeros(0, np.int64)
    return Request(id, attempt, 0, np.array([1]), nothing, 0, id, SamplingParams())


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, whose parent is init's business, does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return state.stdout.strip()[:1] not in ("", "Z")


def trainer_to_be_killed(folder: str) -> None:
    """Says the numbers of its workers' processes when they are at work, and one of them is stuck in its first step."""
    stuck = Fault(1, 1, "stop" if sys.platform == "linux" else "hang")
    fleet = ProcessFleet(toy(stuck, endless=True), lambda event: None, workers=2, scratch=Path(folder))
    fleet.start()
    for number in (0, 1):
        fleet.submit(number, [request(number)])
    sys.stdout.write(" ".join(str(worker.process.pid) for worker in fleet._workers.values()) + "\n")
    sys.stdout.flush()
    time.sleep(600)


def build_and_die(worker: int) -> Any:
    """Of something that it says."""
    sys.stderr.write(f"worker {worker} is dying of this\n")
    sys.stderr.flush()
    time.sleep(
        1.0
    )  # so that Ray's driver knows by then where it was, as with a model that takes a while to load
    os.kill(os.getpid(), signal.SIGKILL)
