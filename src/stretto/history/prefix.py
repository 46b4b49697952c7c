"""SPEC-RL's rule (2509.23232): how far an earlier visit's response is kept. Faster, and not exact.

A token y that was drawn with probability q(y) is kept with probability min(1, l p(y) / q(y)), where p is what the
weights say now and l the lenience. Were y a fresh draw from q, l = 1 and a draw from the residual p - min(p, q) after a
rejection would give p. But the weights were trained on y, and as published that draw is from p: see docs/drafting.md.
"""

from __future__ import annotations

import numpy as np

from stretto.alternatives import Alternatives
from stretto.records import BoolArray, FloatArray, IntArray
from stretto.sampling import gumbel


def keeps(key: int, positions: IntArray, now: FloatArray, then: FloatArray, lenience: float) -> BoolArray:
    """Whether tokens of log-probs `now`, and `then` when they were drawn, are kept: log u <= log l + now - then.

    All (N,). Uniforms u come from key and position: a Gumbel value is -log(-log u). Log-probs are taken as
    float32, which is how the log keeps them, so that a resumed run decides alike.
    """
    log_u = -np.exp(-gumbel(np.array([key], np.uint64), positions, np.zeros(1, np.int64)))
    ratio = now.astype(np.float32).astype(np.float64) - then.astype(np.float32)
    with np.errstate(divide="ignore"):
        return np.asarray(log_u <= np.log(lenience) + ratio)


def residual(
    now: FloatArray, token: int, then: float, others: Alternatives | None, lenience: float
) -> FloatArray:
    """What to draw from after `token` was rejected: probabilities (V,), not normalised.

    It is p - min(q, l p), its positive part if l > 1; with the rule above that makes p where the token was drawn from
    q and l <= 1. `now` is p (V,), `then` the token's log-prob under q and `others` (1, K) what else is known of q. What
    q leaves to the remaining tokens is shared out among them as p does: without `others` it is p without the token.
    """
    known, q = np.zeros(now.size, np.bool_), np.zeros(now.size)
    if others is not None:
        listed = others.token_ids[0] >= 0
        ids = others.token_ids[0, listed]
        known[ids], q[ids] = True, np.exp(others.logprobs[0, listed].astype(np.float64))
    known[token], q[token] = True, np.exp(then)
    left, unknown = max(0.0, 1.0 - q.sum()), now[~known].sum()
    if unknown > 0.0:
        q[~known] = left * now[~known] / unknown
    rest = np.maximum(now - np.minimum(q, lenience * now), 0.0)
    return rest if rest.any() else now  # p and q are equal but for rounding
