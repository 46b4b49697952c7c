"""What one engine step costs, measured: the price that a budget weighs drafted nodes against."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stretto.draft.isotonic import isotonic
from stretto.errors import StrettoError
from stretto.records import FloatArray, IntArray
from stretto.sampling import kernel


class Curve(NamedTuple):
    """What steps cost."""

    tokens: FloatArray  # (K,), packed into a step: the knots
    seconds: FloatArray  # (K,), non-decreasing
    slope: float  # seconds per token beyond the last knot
    per_node: float  # seconds per drafted node besides
    per_draft: float  # seconds that any draft adds to a step, whatever its size


@kernel()
def price(curve: Curve, tokens: IntArray, nodes: IntArray, out: FloatArray) -> None:
    """Seconds of steps of `tokens` (N,) packed tokens, `nodes` (N,) of which are drafted.

    Linear between knots, flat before the first. Fastest for ascending tokens.
    """
    knots, values = curve.tokens, curve.seconds
    right = 0  # first knot that is not left of the tokens
    for i in range(tokens.size):
        x = float(tokens[i])
        if right > 0 and x <= knots[right - 1]:
            right = 0
        while right < knots.size and knots[right] < x:
            right += 1
        if right == 0:
            out[i] = values[0]
        elif right == knots.size:
            out[i] = values[-1] + curve.slope * (x - knots[-1])
        else:
            low, high = values[right - 1], values[right]
            share = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
            out[i] = min(low + (high - low) * share, high)
        out[i] += nodes[i] * curve.per_node
        if nodes[i] > 0:
            out[i] += curve.per_draft


class CostModel:
    """Seconds of one engine step by the number of tokens packed into it, and what a drafted node costs besides.

    A non-decreasing piecewise linear curve through measured points. It knows nothing until `fit`.
    """

    def __init__(self, per_node: float = 0.0, per_draft: float = 0.0) -> None:
        """`per_node`: seconds that drafting and checking one node takes, beyond its place in the model's pass;
        `per_draft`: what checking adds to a step that has any.
        """
        for what, seconds in (("drafted node", per_node), ("step with a draft", per_draft)):
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise StrettoError(f"cost model: seconds per {what} must be 0 or more, not {seconds}")
        self.per_node, self.per_draft = per_node, per_draft
        self._curve: Curve | None = None

    def fit(self, points: Sequence[tuple[int, float]]) -> None:
        """Fit to measured (tokens, seconds): the median at each token count, then isotonic regression over them.

        Raises StrettoError with fewer than two token counts, or where one of the numbers makes no sense.
        """
        measured: defaultdict[int, list[float]] = defaultdict(list)
        for tokens, seconds in points:
            if not (tokens >= 1 and math.isfinite(seconds) and seconds > 0.0):
                raise StrettoError(
                    f"cost model: a step of {tokens} tokens in {seconds} s cannot be; "
                    "tokens must be 1 or more, seconds positive"
                )
            measured[tokens].append(seconds)
        if len(measured) < 2:
            raise StrettoError(
                f"cost model: measurements at {len(measured)} token counts, but a curve needs two or more"
            )
        counts = sorted(measured)
        medians = np.array([statistics.median(measured[count]) for count in counts])
        weights = np.array([float(len(measured[count])) for count in counts])
        knots, fitted = np.array(counts, dtype=np.float64), isotonic(medians, weights)
        rise, run = fitted[-1] - fitted, knots[-1] - knots
        slope = float(max(rise[0] / run[0], rise[-2] / run[-2]))
        self._curve = Curve(knots, fitted, slope, self.per_node, self.per_draft)

    def seconds(self, tokens: IntArray, nodes: IntArray | int = 0) -> FloatArray:
        """Seconds of steps of `tokens` (N,) packed tokens, `nodes` (N,) of which are drafted.

        Fewer tokens than measured cost as much as the fewest measured; more go on linearly, at the slope of the last
        segment or of the whole curve, whichever is steeper: an end that noise made flat must not make tokens free.
        Raises StrettoError while nothing was measured.
        """
        seconds = np.empty(tokens.size)
        price(self.curve, tokens, np.full(tokens.size, nodes), seconds)
        return seconds

    @property
    def curve(self) -> Curve:
        """For `price`. Raises StrettoError while nothing was measured."""
        if self._curve is None:
            raise StrettoError("cost model: nothing was measured yet, so there is no price for a step")
        return self._curve
