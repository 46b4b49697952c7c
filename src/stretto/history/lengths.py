"""How long responses will be, from how long they were: ranks, quantiles, survival.

Log lengths are modelled as f(prompt) + u + e: f a regression on the prompt's length, u what is particular to the
prompt (variance tau^2), e what differs between its responses (sigma^2). The prediction is the posterior mean of f + u
(empirical Bayes), so that one formula serves a prompt never seen (f alone), one with history, and one some of whose
present siblings have finished: the more is known of the prompt itself, the less f counts. All is estimated online.

A resumed run rebuilds it from the log (`stretto.drafting.restore_lengths`); there is no other state. Pure logic, no
randomness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, exp, inf, log, log1p, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from stretto.records import FinishReason, FloatArray, Prompt, Rollout

RECENT = 4096  # responses of any prompt that the survival estimate is made of
FORGET = 1.0 - 1.0 / 16384  # weight that the regression's earlier responses keep with each new one
NORMAL = NormalDist()
TAIL = 0.2  # the share whose recall StreamRL (2504.15930) reports


class Ended(NamedTuple):
    """A response that has ended with `length` tokens; `capped`: by the limit, it would have been longer."""

    prompt: Prompt
    visit: int
    length: int
    capped: bool

    @classmethod
    def of(cls, rollout: Rollout, length: int) -> Ended:
        return cls(rollout.prompt, rollout.visit, length, rollout.finish_reason == FinishReason.LENGTH)


class LengthHistory:
    """Lengths of finished responses by prompt (its uid: rows with equal token ids share it).

    Args:
        window: how many of a prompt's newest visits count. Older policies predict worse, but of the newest visit
            perhaps only a part has ended.
    """

    def __init__(self, window: int = 2) -> None:
        self.window = window
        self._prompts: dict[str, dict[int, _Visit]] = {}  # uid -> visit -> what it was, newest `window`
        self._regression = _Regression()
        self._within = [0.0, 0.0]  # squared deviations of log lengths within a visit, degrees of freedom
        self._recent: list[float] = []  # a ring of lengths; inf: cut off by the limit
        self._at = 0
        self._sorted: FloatArray | None = None
        self._judged: tuple[list[float], list[float]] = ([], [])  # predictions, outcomes since `metrics`

    def observe(self, rollouts: Iterable[Rollout]) -> None:
        """Those that have ended, such as the ledger gives at an update, or the log."""
        ended = [r for r in rollouts if r.finish_reason != FinishReason.NONE]
        self.observe_lengths([Ended.of(r, r.token_ids.size) for r in ended])

    def observe_lengths(self, ended: Sequence[Ended]) -> None:
        """Responses of which only the lengths are known; predictions are judged by what was known before them."""
        for prompt, visit, _, _ in ended:
            visits = self._prompts.setdefault(prompt.uid, {})
            if visit not in visits:
                visits[visit] = _Visit(self.predict(prompt))
        for response in ended:
            self._observe(*response)

    def _observe(self, prompt: Prompt, visit: int, length: int, capped: bool) -> None:
        visits = self._prompts[prompt.uid]
        entry = visits.get(visit) or _Visit(None)  # an old one may have been forgotten
        y = log(max(1, length))
        if entry.lengths:
            n = len(entry.lengths)
            self._within[0] += (y - entry.log_sum / n) ** 2 * n / (n + 1)
            self._within[1] += 1
        entry.log_sum += y
        entry.lengths.append(inf if capped else length)
        if entry.predicted is not None:
            self._judged[0].append(entry.predicted)
            self._judged[1].append(length)
        self._regression.observe(_feature(prompt), y)
        self._remember(inf if capped else length)
        for old in sorted(visits)[: -self.window]:
            if old != visit:
                del visits[old]

    def _remember(self, length: float) -> None:
        self._sorted = None
        if len(self._recent) < RECENT:
            self._recent.append(length)
        else:
            self._recent[self._at] = length
            self._at = (self._at + 1) % RECENT

    # ---- what is to be expected ---------------------------------------------------------------------------

    def predict(self, prompt: Prompt, siblings: Sequence[int] = ()) -> float | None:
        """Expected tokens of a response; `siblings`: lengths of those that have ended. None: nothing is known."""
        visits = [v for v in self._prompts.get(prompt.uid, {}).values() if v.lengths]
        n = sum(len(v.lengths) for v in visits) + len(siblings)
        total = sum(v.log_sum for v in visits) + sum(log(max(1, length)) for length in siblings)
        if not self._regression.weight:
            return exp(total / n) if n else None
        general, spread = self._regression.predict(_feature(prompt))
        within = max(self._variance_within() if self._within[1] else spread, 1e-6)
        between = max(spread - within, 0.05 * spread, 1e-6)
        mean = (general * within + total * between) / (within + n * between)
        return exp(mean + 0.5 * within)  # the mean of a lognormal

    def _variance_within(self) -> float:
        return self._within[0] / self._within[1] if self._within[1] else 0.0

    def spread(self, samples: int) -> FloatArray:
        """How `samples` responses to a prompt lie around the predicted length: factors of mean about 1, (n,)."""
        sigma = sqrt(self._variance_within())
        z = np.array([NORMAL.inv_cdf((i + 0.5) / samples) for i in range(samples)])
        factors: FloatArray = np.exp(sigma * z - 0.5 * sigma * sigma)
        return factors

    def quantile(self, prompt: Prompt, q: float) -> float | None:
        """The smallest earlier length that a share `q` of the prompt's did not exceed; None: no history.

        Infinite if that one was cut off by the limit.
        """
        known = sorted(x for visit in self._prompts.get(prompt.uid, {}).values() for x in visit.lengths)
        return known[max(0, ceil(q * len(known)) - 1)] if known else None

    def p_long(self, prompt: Prompt, so_far: int, threshold: float) -> float:
        """P(length >= threshold | length > so_far), from survivors among the prompt's and among all recent ones.

        The latter together count as one response of the prompt. 1 from `threshold` on; 0.5 where nobody got so far.
        """
        if so_far >= threshold:
            return 1.0
        if self._sorted is None:
            self._sorted = np.sort(self._recent)
        left = self._sorted.size - int(np.searchsorted(self._sorted, so_far, "right"))
        long = self._sorted.size - int(np.searchsorted(self._sorted, threshold, "left"))
        general = long / left if left else 0.5
        own = [x for visit in self._prompts.get(prompt.uid, {}).values() for x in visit.lengths if x > so_far]
        return (sum(x >= threshold for x in own) + general) / (len(own) + 1)

    # ---- how good that was ------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Predictions made before a prompt's visit against its responses' lengths, since the last call.

        Spearman's rank correlation, and the share of the longest fifth that is in the predicted longest fifth.
        """
        predicted, actual = (np.array(side) for side in self._judged)
        self._judged = ([], [])
        if predicted.size < 2:
            return {}
        return {
            "lengths/rank_correlation": rank_correlation(predicted, actual),
            "lengths/tail_recall": tail_recall(predicted, actual),
        }


class _Visit:
    """A prompt's responses at one visit."""

    __slots__ = ("lengths", "log_sum", "predicted")

    def __init__(self, predicted: float | None) -> None:
        self.predicted = predicted
        self.lengths: list[float] = []
        self.log_sum = 0.0


class _Regression:
    """Ridge regression of y on one feature, online, older observations fading."""

    RIDGE = 1.0

    def __init__(self) -> None:
        self.weight = 0.0
        self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def observe(self, x: float, y: float) -> None:
        self.weight = FORGET * self.weight + 1
        self._x = FORGET * self._x + x
        self._y = FORGET * self._y + y
        self._xx = FORGET * self._xx + x * x
        self._xy = FORGET * self._xy + x * y
        self._yy = FORGET * self._yy + y * y

    def predict(self, x: float) -> tuple[float, float]:
        """Mean of y at x, and the variance around it."""
        n = self.weight
        mean_x, mean_y = self._x / n, self._y / n
        sxx, sxy = self._xx - n * mean_x * mean_x, self._xy - n * mean_x * mean_y
        slope = sxy / (sxx + self.RIDGE)
        left = self._yy - n * mean_y * mean_y - 2 * slope * sxy + slope * slope * sxx
        return mean_y + slope * (x - mean_x), max(left / n, 0.0)


def _feature(prompt: Prompt) -> float:
    return log1p(prompt.token_ids.size)


def _ranks(values: FloatArray) -> FloatArray:
    """Mean ranks, equal values sharing theirs."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - 0.5 * (counts - 1))[where]


def rank_correlation(predicted: FloatArray, actual: FloatArray) -> float:
    """Spearman's; 0 where one side is constant. Both (n,)."""
    a, b = (_ranks(side) for side in (predicted, actual))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else 0.0


def tail_recall(predicted: FloatArray, actual: FloatArray, share: float = TAIL) -> float:
    """Share of the longest responses (a `share` of all) among as many that were predicted to be. Both (n,)."""
    n = max(1, round(share * predicted.size))
    longest, expected = (set(np.argsort(-side, kind="stable")[:n].tolist()) for side in (actual, predicted))
    return len(longest & expected) / n
