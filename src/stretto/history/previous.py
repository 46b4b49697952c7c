"""Where prefix reuse takes responses from: what each sample said at its prompt's newest visit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stretto.alternatives import Alternatives
from stretto.history.prefix import keeps
from stretto.records import FloatArray, IntArray, Purpose, Reuse, Rollout
from stretto.sampling import request_key


class PreviousVisits:
    """The newest response of every prompt row and sample index: 16 bytes a token, and 8 for each alternative.

    `seed` is the run's. A response counts up to its environment's first turn, which answered what it had said.
    """

    def __init__(self, *, seed: int, lenience: float, residual: bool) -> None:
        self._seed, self._lenience, self._residual = seed, lenience, residual
        self._newest: dict[tuple[str, int, int], _Said] = {}

    def remember(self, rollouts: Iterable[Rollout]) -> None:
        """Take in finished responses."""
        for rollout in rollouts:
            known = self._newest.get(_sample(rollout))
            if known is None or known.visit < rollout.visit:
                size = (
                    rollout.token_ids.size if rollout.loss_mask.all() else int(np.argmin(rollout.loss_mask))
                )
                top = rollout.top[:size] if rollout.top is not None else None
                said = _Said(rollout.visit, rollout.token_ids[:size], rollout.logprobs[:size], top)
                self._newest[_sample(rollout)] = said

    def reuse(self, rollout: Rollout) -> Reuse | None:
        """What a response that stands as `rollout` has to try; None: nothing.

        One that was interrupted goes on only if all its tokens were kept; its own log-probs, which the rule was asked
        with, say so.
        """
        said = self._newest.get(_sample(rollout))
        tokens = rollout.token_ids
        if said is None or said.visit >= rollout.visit or said.token_ids.size <= tokens.size:
            return None
        key = request_key(self._seed, Purpose.REUSE, *_sample(rollout), rollout.visit)
        if tokens.size:
            then = said.logprobs[: tokens.size]
            kept = keeps(key, np.arange(tokens.size), rollout.logprobs, then, self._lenience)
            if not (kept & (tokens == said.token_ids[: tokens.size])).all():
                return None
        return Reuse(key, said.token_ids, said.logprobs, said.top, self._lenience, self._residual)


@dataclass(frozen=True, slots=True)
class _Said:
    visit: int
    token_ids: IntArray  # (N,)
    logprobs: FloatArray  # (N,)
    top: Alternatives | None


def _sample(rollout: Rollout) -> tuple[str, int, int]:
    return rollout.prompt.uid, rollout.prompt.occurrence, rollout.sample_index
