"""A response in a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from stretto.records import FinishReason, Request

NOT_ENDED = FinishReason.NONE
MIX = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
TWO_TO_64 = 2.0**64


@dataclass(slots=True)
class Span:
    """A response's time in a slot, for the timeline."""

    worker: int
    slot: int
    start: float
    end: float
    id: int
    tokens: int
    why: str  # how it ended here: stop, length, stopped, preempted, down


@dataclass(slots=True, eq=False)
class Response:
    """A request on its way through an engine."""

    request: Request
    held: int  # tokens after the prompt when it entered its slot, its first step's included
    reported: int  # tokens that the ledger knows of
    limit: int = 0  # tokens at which the engine lets go of it; 0: not known yet
    reason: FinishReason = NOT_ENDED  # then; NONE: an end of its chunk only
    speed: float = 1.0  # tokens per step
    nodes: float = 0.0  # verified per step besides
    entered: int = 0  # the engine's number of steps when it entered
    slot: int = 0
    end: int = 0  # its last step there, and how many had entered before it: see `ORDER_BITS`
    since: float = 0.0  # when it entered
    late: bool = False  # it entered together with who computes its prompt, and waits for that one step
    extra: float = 0.0  # seconds that its entry adds to its first step

    def tokens(self, step: int) -> int:
        """Tokens after the prompt when the engine has made `step` steps."""
        made = step - self.entered - 1
        if made <= 0:
            return self.held
        tokens = self.held + (made if self.speed == 1.0 else int(self.speed * made + 1e-9))
        return tokens if tokens < self.limit else self.limit


def mixed(key: int, salt: int) -> int:
    """64 bits that `key` and `salt` determine (splitmix64)."""
    x = (key + (salt + 1) * MIX) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(key: int, salt: int) -> float:
    """A number in (0, 1) that `key` and `salt` determine."""
    # `mixed`, written out: a simulated response asks twice
    x = (key + (salt + 1) * MIX) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return ((x ^ (x >> 31)) + 0.5) / TWO_TO_64


def uniforms(keys: npt.NDArray[np.uint64], salt: int) -> list[float]:
    """`uniform` of each."""
    with np.errstate(over="ignore"):
        x = keys + np.uint64(((salt + 1) * MIX) & MASK)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: list[float] = (((x ^ (x >> np.uint64(31))).astype(np.float64) + 0.5) / TWO_TO_64).tolist()
    return found


def kept_prefix(agreement: float, key: int, version: int, tokens: int) -> int:
    """Of so many old tokens, how many are sampled again before the first that is not: geometric, cut at `tokens`."""
    if agreement >= 1.0 or agreement <= 0.0:
        return tokens if agreement else 0
    return min(tokens, int(log(uniform(key, version)) / log(agreement)))
