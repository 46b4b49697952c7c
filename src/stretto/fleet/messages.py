"""What a trainer and the processes of its fleet say to each other besides events: arrays, numbers and strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.alternatives import Alternatives
from stretto.engine import Engine
from stretto.fleet import Drafting
from stretto.records import Event, Prompt, Request, Rollout, Running
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
    ref: WeightsRef  # of kind "file", or "object" on its way through Ray
    running: Running


@dataclass(slots=True)
class Past:
    """A finished response as drafters need it, without what a user's data and rewards put into a `Rollout`, which need
    not fit through a pipe.
    """

    uid: str  # the prompt's
    visit: int
    token_ids: npt.NDArray[np.int32]  # (N,)
    logprobs: npt.NDArray[np.float32]  # (N,), as in the log
    reward: float
    top: Alternatives | None  # at the N places

    @classmethod
    def of(cls, rollout: Rollout) -> Past:
        return cls(
            rollout.prompt.uid,
            rollout.visit,
            rollout.token_ids.astype(np.int32),
            rollout.logprobs.astype(np.float32),
            float(rollout.reward),
            rollout.top,
        )

    @property
    def nbytes(self) -> int:
        top = self.top
        kept = top.token_ids.nbytes + top.logprobs.nbytes if top is not None else 0
        return kept + self.token_ids.nbytes + self.logprobs.nbytes

    def rollout(self) -> Rollout:
        """With what is known of it here."""
        nothing = np.zeros(0, np.int64)
        ids, logprobs = self.token_ids.astype(np.int64), self.logprobs.astype(np.float64)
        return Rollout(
            request_id=-1,
            group_id=-1,
            prompt=Prompt(-1, self.uid, 0, nothing, {}),
            sample_index=-1,
            visit=self.visit,
            key=0,
            token_ids=ids,
            logprobs=logprobs,
            raw_logprobs=np.zeros(ids.size),
            versions=np.zeros(ids.size, np.int64),
            loss_mask=np.ones(ids.size, np.bool_),
            reward=self.reward,
            top=self.top,
        )


@dataclass(slots=True)
class Remember:
    """Finished responses become history."""

    pasts: Sequence[Past]


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
