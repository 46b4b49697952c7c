"""What an update knows and learns about each trained token, and the metrics made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from stretto.learn.packing import TrainedTokens
from stretto.records import FloatArray


class Measurements:
    """Columns (n,) beside `TrainedTokens`, filled micro-batch by micro-batch; so means do not depend on the split."""

    def __init__(self, tokens: TrainedTokens, advantages: FloatArray, weights: FloatArray) -> None:
        n = len(tokens)
        self.tokens = tokens
        self.advantages = advantages
        self.weights = weights  # of the loss normalization
        self.logprobs = np.full(n, np.nan)  # the learner's, before the step
        self.entropy = np.full(n, np.nan)
        self.loss = np.full(n, np.nan)  # weighted: the batch's loss is the sum
        self.kl = np.full(n, np.nan)
        self.clipped = np.zeros(n, dtype=np.bool_)
        self.capped = np.zeros(n, dtype=np.bool_)

    @classmethod
    def joined(cls, parts: Sequence[Measurements], scale: float) -> Measurements:
        """Those of several parts of an update, whose weights are still to be multiplied by `scale`."""
        tokens = TrainedTokens.joined([part.tokens for part in parts])
        whole = cls(
            tokens, *(np.concatenate([getattr(p, name) for p in parts]) for name in ("advantages", "weights"))
        )
        for name in ("logprobs", "entropy", "loss", "kl", "clipped", "capped"):
            setattr(whole, name, np.concatenate([getattr(part, name) for part in parts]))
        whole.weights, whole.loss = whole.weights * scale, whole.loss * scale
        return whole

    def take(self, shares: Measurements, total: Callable[[FloatArray], FloatArray]) -> None:
        """What several processes measured, each other tokens; `total` sums an array over them."""
        mine = ~np.isnan(shares.logprobs) | ~np.isnan(shares.loss)
        measured = total(mine.astype(np.float64)) > 0
        for name in ("logprobs", "entropy", "loss", "kl"):
            values = getattr(shares, name)
            getattr(self, name)[:] = np.where(measured, total(np.where(mine, values, 0.0)), np.nan)
        for name in ("clipped", "capped"):
            getattr(self, name)[:] = total((getattr(shares, name) & mine).astype(np.float64)) > 0

    def not_finite(self) -> list[int]:
        """Tokens whose log-prob, here or from the engine, or loss isn't finite, or was never measured."""
        finite = np.isfinite(self.logprobs) & np.isfinite(self.tokens.logprobs) & np.isfinite(self.loss)
        return [int(i) for i in np.flatnonzero(~finite)]

    def metrics(self, version: int) -> dict[str, float]:
        """Token means over the batch; NaN where nothing was measured.

        `logprob_mismatch` compares engine and learner at equal weights, so over tokens of the current `version` only;
        `ratio_mean` is of exp(learner - behaviour) over all tokens. `policy/kl` is to the reference model, if there
        is one.
        """
        ratio = np.exp(self.logprobs - self.tokens.logprobs)
        current = self.tokens.versions == version
        mismatch = np.abs(self.logprobs - self.tokens.raw_logprobs)[current]
        return {
            "policy/loss": math.fsum(self.loss),
            "policy/kl": float(self.kl.mean()),
            "policy/entropy": float(self.entropy.mean()),
            "off_policy/ratio_mean": float(ratio.mean()),
            "off_policy/clip_fraction": float(self.clipped.mean()),
            "off_policy/cap_fraction": float(self.capped.mean()),
            "off_policy/logprob_mismatch": float(mismatch.mean()) if mismatch.size else math.nan,
            "off_policy/logprob_mismatch_max": float(mismatch.max()) if mismatch.size else math.nan,
        }
