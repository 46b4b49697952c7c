"""What a step of vLLM costs with and without drafts, learnt while it runs.

Nobody tells a drafter what the model's steps take, and it differs by machine, model and load. But a drafter is called
once per step, so the time between two calls is the first one's step. A linear model of the last steps', fitted by least
squares, is the price that the budget `goodput` weighs drafted tokens against.
"""

from __future__ import annotations

import numpy as np

from stretto.draft.cost import CostModel, Curve
from stretto.records import FloatArray

PRIOR = np.array(
    [1.0, 0.02, 0.02, 0.1]
)  # per step, row, drafted token and step with any, relative to the first
TRUST = 0.25  # steps that the prior counts for
WINDOW = 512  # steps
REFIT = 16  # steps between two fits
OUTLIER = 3.0  # times what is usual: an interruption
LEAST = 1e-3  # of the prior's fixed part: no step is for nothing


class StepTimes(CostModel):
    """Seconds of a step ~ fixed + per row + per drafted token + if anything is drafted."""

    def __init__(self) -> None:
        super().__init__()
        self._features = np.zeros((WINDOW, 4))  # of the last steps, in a ring
        self._seconds = np.zeros(WINDOW)
        self._seen = 0
        self._weights: FloatArray = PRIOR
        self.at(1)

    def observe(self, rows: int, nodes: int, seconds: float) -> None:
        """A step of `rows` requests that checked `nodes` drafted tokens."""
        place = self._seen % WINDOW
        self._features[place] = 1.0, rows, nodes, nodes > 0
        self._seconds[place] = seconds
        self._seen += 1
        if self._seen < REFIT or self._seen % REFIT == 0:
            self._fit()

    def at(self, rows: int) -> None:
        """The next step has so many requests: the curve is the price of what is drafted for them."""
        fixed, per_row, per_node, per_draft = self._weights.tolist()
        plain = fixed + per_row * rows
        # Beside rows, tokens are drafted ones: the curve is a line of their slope.
        self._curve = Curve(
            np.array([rows, rows + 1], np.float64),
            np.array([plain, plain + per_node]),
            per_node,
            0.0,
            per_draft,
        )

    def expected(self, rows: int, nodes: int) -> float:
        """Seconds of such a step."""
        return float(np.array([1.0, rows, nodes, nodes > 0]) @ self._weights)

    def _fit(self) -> None:
        """Ridge regression towards the prior; relative errors count, interruptions are cut, nothing is below zero."""
        seen = min(self._seen, WINDOW)
        scale = self._features[:seen] @ PRIOR
        relative = self._seconds[:seen] / scale
        usual = float(np.median(relative))
        features = self._features[:seen] / scale[:, None]
        ridge = np.diag(TRUST / PRIOR**2)
        gram = features.T @ features + ridge
        moment = features.T @ np.minimum(relative, OUTLIER * usual) + ridge @ PRIOR * usual
        free, weights = np.ones(4, np.bool_), np.zeros(4)
        while free.any():
            weights[:] = 0.0
            weights[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            if (weights >= 0.0).all():
                break
            free &= weights > 0.0
        weights[0] = max(weights[0], LEAST * usual)
        self._weights = weights
