"""The records that travel between Stretto's stations, and nothing else.

Plain typed data: no torch, no clock, no I/O. Commands go out to engines (`Request`), results
come back as events, a schedule's only output is decisions. Every command and event about a request
carries `(request_id, attempt)`; an event of an old attempt is dropped by the ledger and counted.

Suffixes and shapes: `R` requests in one event, `T` tokens, `P` prompt tokens, `N` tokens after the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stretto.alternatives import Alternatives

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class State(IntEnum):
    """Where a request stands in the ledger (design, "Who owns what")."""

    PENDING = 0  # to be started from its prompt
    RUNNING = 1  # handed to a worker
    PARKED = 2  # stopped, its tokens kept; to be started again from them
    WAITING = 3  # for its environment's turn
    FINISHED = 4  # generated, not scored yet
    SCORED = 5  # has its reward, not trained on yet
    CONSUMED = 6  # part of an update batch (end)
    DISCARDED = 7  # given up for a reason that its schedule declares (end)


class FinishReason(StrEnum):
    """Why a response (or one turn of it) ended."""

    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # its limit of new tokens, or the context's end
    NONE = ""  # has not ended


class Purpose(StrEnum):
    """What a sample is for; part of its key, so that evaluation never reuses training noise."""

    TRAIN = "train"
    EVAL = "eval"
    REFRESH = "refresh"  # whether noise is drawn anew; no sample's
    REUSE = "reuse"  # whether an earlier visit's token is kept; no sample's


Running = Literal["continue", "recompute", "stop"]
"""What happens to running requests when new weights are loaded: go on with the K/V they have,
recompute it under the new weights, or stop with their tokens kept."""

RewardStatus = Literal["ok", "error", "timeout", "invalid"]
"""`ok`, or why there is no usable reward: it raised, ran too long, or returned NaN/inf/no number."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature = 0` is argmax; `top_k = 0`, `top_p = 1`, `min_p = 0` are off.

    `max_new_tokens` counts the tokens of the whole response, environment turns included.
    Stop ids are checked before stop strings, stop strings before the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One data row, tokenised. `uid` hashes its token ids; `occurrence` numbers rows with equal ids."""

    row: int
    uid: str
    occurrence: int
    token_ids: IntArray  # (P,)
    data: Mapping[str, Any]  # the row's own columns, as the reward sees them


def prompt_uid(token_ids: IntArray) -> str:
    """A hash of the token ids (32 hexadecimal digits), the same on every machine."""
    return hashlib.blake2b(token_ids.astype("<i8").tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Reuse:
    """An earlier visit's response, of which a request keeps a prefix; see `stretto.history.prefix`."""

    key: int  # unsigned 64 bit, of what decides, and of no sample
    token_ids: IntArray  # (N,)
    logprobs: FloatArray  # (N,), processed, under the weights of that visit
    top: Alternatives | None  # at these N places, where they were kept
    lenience: float
    residual: bool  # after a rejection draw from the residual instead of the policy


@dataclass(slots=True)
class Request:
    """Command to an engine: generate a response, from its prompt or from the tokens it has.

    Requests with equal `group` have the same prompt, whose K/V the engine computes once. The noise of the
    token at position i (counted after the prompt) is a function of `key`, i and the token id alone.
    """

    id: int
    attempt: int
    group: int
    prompt_ids: IntArray  # (P,)
    token_ids: IntArray  # (N,), empty unless resumed
    turn_start: int  # position at which the current turn began; stop strings are looked for from here
    key: int  # unsigned 64 bit
    sampling: SamplingParams
    # (N,) what an earlier attempt under the same key said, from position 0 on: a draft, which changes no token
    draft_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    reuse: Reuse | None = None  # not exact: the response begins with what this keeps
    max_new: int | None = None  # new tokens of this attempt, after which the engine lets go of it (`Stopped`)


# ---- events: what engines, rewards, learner and clock report ----------------------------------------


@dataclass(slots=True)
class Progress:
    """Tokens that one worker's step added: columns per step, not objects per token.

    A simulated engine leaves the per-token arrays out (None) and may leap: counts are then any number. Of a few
    requests it tells each with a `Leapt`.
    """

    worker: int
    ids: IntArray  # (R,), each once
    attempts: IntArray  # (R,)
    counts: IntArray  # (R,), new tokens of each
    version: int  # of the weights that sampled them
    token_ids: IntArray | None = None  # (T,), request after request, T = counts.sum()
    logprobs: FloatArray | None = None  # (T,), under the processed distribution: the behaviour log-probs
    raw_logprobs: FloatArray | None = None  # (T,), temperature only
    drafted: IntArray | None = None  # (R,), tokens that were proposed for them,
    accepted: IntArray | None = None  # (R,), and how many of those were right
    top: Alternatives | None = None  # at the T places


@dataclass(slots=True)
class Leapt:
    """`count` tokens, nobody knows which, of one request in a simulated engine: a row of a `Progress`."""

    worker: int
    id: int
    attempt: int
    count: int
    version: int  # of the weights that sampled them


@dataclass(slots=True)
class Finished:
    """A response, or its turn, has ended on its worker; all its tokens were reported before."""

    worker: int
    id: int
    attempt: int
    reason: FinishReason


@dataclass(slots=True)
class Stopped:
    """A worker has let go of a request that it was told to stop; its tokens were reported before."""

    worker: int
    id: int
    attempt: int


@dataclass(slots=True)
class Observed:
    """The environment's turn: tokens to append with loss mask 0, or `done`."""

    id: int
    attempt: int  # of the response that it answers
    token_ids: IntArray  # (T,)
    done: bool


@dataclass(slots=True)
class Scored:
    """The reward of a finished response. `status` other than "ok" carries `reward = nan` and a `message`."""

    id: int
    attempt: int  # of the response that was graded
    reward: float
    status: RewardStatus = "ok"
    parts: Mapping[str, float] = field(default_factory=dict)  # by reward function, before weighting
    message: str = ""


@dataclass(slots=True)
class Admitted:
    """Requests `first .. first + count - 1` now wait in the ledger, group after group."""

    first: int
    count: int


@dataclass(slots=True)
class Updated:
    """The learner has made its optimiser step; `version` counts the steps made."""

    version: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Loaded:
    """A worker now samples with the weights of `version`."""

    worker: int
    version: int


@dataclass(slots=True)
class WorkerUp:
    """A worker is ready: `slots` responses at a time, weights of `version`."""

    worker: int
    slots: int
    version: int
    place: int | None = None
    """Among the workers, kept by who comes in a lost one's place; None: that of its number."""


@dataclass(slots=True)
class WorkerDown:
    """A worker is gone; what ran there goes on elsewhere from the tokens received."""

    worker: int


@dataclass(slots=True)
class Timer:
    """The moment that a `Wake` asked for has come."""

    name: str = "wake"


@dataclass(slots=True)
class Interrupted:
    """SIGINT or SIGTERM: leave a resumable folder and end."""

    signal: int


EngineEvent = Progress | Leapt | Finished | Stopped | Loaded | WorkerUp | WorkerDown
Event = EngineEvent | Observed | Scored | Admitted | Updated | Timer | Interrupted


# ---- decisions: a schedule's only output --------------------------------------------------------------


@dataclass(slots=True)
class Admit:
    """Take the next `prompts` rows of the data into the ledger, `samples_each` requests for each."""

    prompts: int
    samples_each: int


@dataclass(slots=True)
class Start:
    """Hand waiting requests to a worker; it runs them in this order as its slots allow.

    With `max_new` it lets go of each after so many new tokens, which are kept (PARKED).
    """

    ids: Sequence[int]
    worker: int
    max_new: int | None = None


@dataclass(slots=True)
class Stop:
    """Take running requests off their workers, with their tokens kept (PARKED) or dropped (PENDING)."""

    ids: Sequence[int]
    keep: bool


@dataclass(slots=True)
class Discard:
    """Give requests up, whatever their state; running ones are taken off their workers."""

    ids: Sequence[int]
    reason: str


@dataclass(slots=True)
class Harvest:
    """Give these scored requests to the learner. The `final` one of a version closes its update batch: the optimiser
    step is made, and the staleness gate is applied. Those before it only add their gradients.
    """

    ids: Sequence[int]
    final: bool = True


@dataclass(slots=True)
class Publish:
    """Give the learner's newest weights to these workers."""

    workers: Sequence[int]
    running: Running


@dataclass(slots=True)
class Wake:
    """Call the schedule at this time (seconds on the runtime's clock) at the latest."""

    at: float


Decision = Admit | Start | Stop | Discard | Harvest | Publish | Wake


# ---- what is kept ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Rollout:
    """A response with everything known about it; per-token arrays all have length N."""

    request_id: int
    group_id: int
    prompt: Prompt
    sample_index: int
    visit: int
    key: int
    token_ids: IntArray  # (N,)
    logprobs: FloatArray  # (N,), processed distribution; 0 where loss_mask is False
    raw_logprobs: FloatArray  # (N,), temperature only; 0 where loss_mask is False
    versions: IntArray  # (N,), the weights that sampled each token
    loss_mask: BoolArray  # (N,), False on environment tokens
    turn_start: int = 0  # position at which its current or last turn began
    turn: int = 0  # turns completed before that one
    reward: float = float("nan")
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_status: RewardStatus = "ok"
    finish_reason: FinishReason = FinishReason.NONE
    outcome: State = State.PENDING
    worker: int = -1
    attempt: int = 0
    admitted_step: int = 0  # version of the trainer when it was admitted
    started_at: float = float("nan")  # seconds on the runtime's clock
    finished_at: float = float("nan")
    drafted: int = 0
    accepted: int = 0
    decode_steps: int = 0  # of the engine in which its tokens came; 0 where that is not known
    top: Alternatives | None = None  # at the N places, where they are kept
    discard_reason: str = ""
    refreshes: int = 0  # how often its tokens were dropped and generated again
    draft_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # those dropped last

    @property
    def oldest_version(self) -> int:
        """The oldest version among the trained tokens; -1 when there are none."""
        trained = self.versions[self.loss_mask]
        return int(trained.min()) if trained.size else -1


@dataclass(slots=True)
class UpdateBatch:
    """The rollouts of one optimiser step, in canonical order (admission, sample index)."""

    version: int  # of the trainer when the batch was closed
    rollouts: list[Rollout]
    final: bool = True  # False: a part of an update that others follow

    @property
    def staleness(self) -> list[int]:
        """Of each rollout: the trainer's version minus the oldest version among its trained tokens."""
        return [self.version - r.oldest_version for r in self.rollouts if r.oldest_version >= 0]
