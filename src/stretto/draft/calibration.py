"""What a source's estimates are worth: how often nodes of such an estimate were accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stretto.draft import SOURCES
from stretto.draft.isotonic import pool_adjacent, room_for_blocks
from stretto.errors import StrettoError
from stretto.records import BoolArray, FloatArray, IntArray
from stretto.sampling import kernel
from stretto.tally import Tally

ROWS = (*SOURCES, "siblings_beside_history", "prompt_beside_history")
"""Calibrated apart: each source, and what the others say where history has a match too. There they are asked for what
history lacks, and right far less often."""
BESIDE_HISTORY = len(SOURCES) - 1  # from a source to its row beside history

DEPTHS = ("1", "2", "3-4", "5-8", "9+")  # depth buckets
INNER_EDGES = 1.0 / (
    1.0 + np.exp(-np.linspace(-5.0, 5.0, 11))
)  # between bins, a logit apart: fine near 0 and 1
BINS = INNER_EDGES.size + 1
_EDGES = np.concatenate(([0.0], INNER_EDGES, [1.0]))
CENTRES = (_EDGES[:-1] + _EDGES[1:]) / 2
KNOTS = BINS + 2  # one per bin, and the ends 0 and 1
PRIOR = 10.0  # tests that a bin's prior counts for
TRUST = 3.0  # tests, each of estimate 1, that the prior of a row's or a depth's worth counts for
WORTH = np.array([{"history": 0.8, "dropped": 1.0}.get(name, 0.6) for name in ROWS])
"""By row, how often a node is accepted for its estimate while nothing is known. History repeats itself more reliably
than the others do; budgets would pay for all of them until enough were tested."""
IDLE = 16  # steps without a test, after which what was learnt is aged all the same
TESTED, ESTIMATED, ACCEPTED = 0, 1, 2  # columns: tests, sum of their estimates, how many were accepted


@kernel()
def depth_bucket(depth: int) -> int:
    """Index into DEPTHS of a node's depth (1, 2, ...)."""
    if depth <= 2:
        return depth - 1
    if depth <= 4:
        return 2
    return 3 if depth <= 8 else 4


@kernel()
def calibrated(table: FloatArray, raw: float, row: int, bucket: int) -> float:
    """Probability that a node of raw conditional estimate `raw` is accepted once its parent was.

    `table` (rows, depth buckets, 2 * KNOTS) is `Calibration.table`: positions of the knots, then values.
    Linear between knots, hence non-decreasing in `raw`; raw outside [0, 1] counts as the nearer end.
    """
    knots = table[row, bucket]
    right = 1
    while right < KNOTS - 1 and raw > knots[right]:
        right += 1
    low, high = knots[KNOTS + right - 1], knots[KNOTS + right]
    share = (raw - knots[right - 1]) / (knots[right] - knots[right - 1])
    return float(min(low + (high - low) * max(share, 0.0), high))


@kernel()
def _bin(estimate: float) -> int:
    return int(np.searchsorted(INNER_EDGES, estimate, side="right"))


@kernel()
def _learn(
    counts: FloatArray,
    tally: FloatArray,
    table: FloatArray,
    kept: float,
    raw: FloatArray,
    rows: IntArray,
    depth: IntArray,
    reached: BoolArray,
    accepted: BoolArray,
) -> None:
    """Age the counts to the share `kept`, add the tests of one step, and bring the table up to date."""
    counts *= kept
    for i in range(raw.size):
        if not reached[i]:
            continue
        bucket = depth_bucket(depth[i])
        outcome = 1.0 if accepted[i] else 0.0
        seen = counts[rows[i], bucket, _bin(raw[i])]
        seen[TESTED] += 1.0
        seen[ESTIMATED] += raw[i]
        seen[ACCEPTED] += outcome
        predicted = calibrated(table, raw[i], rows[i], bucket)
        told = tally[rows[i], _bin(predicted)]
        told[TESTED] += 1.0
        told[ESTIMATED] += predicted
        told[ACCEPTED] += outcome
    _refresh(counts, table)


@kernel(inline=True)
def _worth(seen: FloatArray, prior: float) -> float:
    """How often nodes were accepted for their estimates, at most 1, from counts (N, 3) and TRUST tests more."""
    expected, accepted = 0.0, 0.0
    for i in range(seen.shape[0]):
        expected += seen[i, ESTIMATED]
        accepted += seen[i, ACCEPTED]
    return min(1.0, (accepted + TRUST * prior) / (expected + TRUST))


@kernel()
def _refresh(counts: FloatArray, table: FloatArray) -> None:
    """Knots from counts: each bin's mean estimate against its share of accepted tests, the prior included.

    Called at nearly every step, for all rows: bin by bin, since arrays of a dozen take longer to make than to fill.
    """
    values, weights = np.empty(BINS), np.empty(BINS)
    room = room_for_blocks(BINS)
    for row in range(counts.shape[0]):
        worth_of_row = _worth(counts[row].reshape(-1, 3), WORTH[row])
        for bucket in range(counts.shape[1]):
            seen, knots = counts[row, bucket], table[row, bucket]
            prior = PRIOR * _worth(seen, worth_of_row)
            for i in range(BINS):
                weights[i] = seen[i, TESTED] + PRIOR
                values[i] = (seen[i, ACCEPTED] + prior * CENTRES[i]) / weights[i]
                knots[1 + i] = (seen[i, ESTIMATED] + PRIOR * CENTRES[i]) / weights[i]
            pool_adjacent(values, weights, room)
            for i in range(BINS):
                knots[KNOTS + 1 + i] = values[i]
            # The ends are the outermost bins with their priors at 0 and 1: a line while nothing is known, and flat
            # beyond the bin's knot when much is.
            knots[0], knots[KNOTS - 1] = 0.0, 1.0
            knots[KNOTS] = min(seen[0, ACCEPTED] / weights[0], values[0])
            knots[-1] = max((seen[-1, ACCEPTED] + prior) / weights[-1], values[-1])


class Calibration:
    """Online map from raw to calibrated conditional acceptance, one per row and depth bucket.

    "Conditional": given that the node's parent was accepted; a path's acceptance is the product. Twelve bins over
    the raw estimate keep decayed counts, with a prior of PRIOR tests that says a part of the estimate is right: the
    part that was right so far at this depth, which is estimated from the row's, and that from WORTH. So a source
    that turns out to be of no use is found out in a few tests, at all depths and estimates.
    A bin's knot lies at the mean raw estimate of its tests, so that any linear relation is met without bias; isotonic
    regression keeps the map non-decreasing.
    Counts decay by steps, with or without tests: what was given up is tried again after a while. Deterministic: the
    same tests in the same steps give the same bits.
    """

    table: FloatArray  # (rows, depth buckets, 2 * KNOTS), for `calibrated`; kept up to date in place

    def __init__(self, half_life: float = 256.0) -> None:
        """`half_life`: after this many further steps a test counts half."""
        self._decay = 0.5 ** (1.0 / half_life)
        self._idle = 0  # steps without a test that the counts were not yet aged for
        self._counts = np.zeros((len(ROWS), len(DEPTHS), BINS, 3))
        self._tally = np.zeros((len(ROWS), BINS, 3))
        self.table = np.empty((len(ROWS), len(DEPTHS), 2 * KNOTS))
        self.refresh()

    def learn(
        self, raw: FloatArray, rows: IntArray, depth: IntArray, reached: BoolArray, accepted: BoolArray
    ) -> None:
        """Take in what became of one step's nodes, all arrays (N,). Only `reached` nodes count: the others were not
        tested.

        `raw` are conditional estimates before `calibrated`; `rows` index ROWS, `depth` as in `Drafts`. The table is
        brought up to date; in steps without nodes, every IDLE of them. Raises ValueError if N is not the same.
        """
        sizes = raw.size, rows.size, depth.size, reached.size, accepted.size
        if len(set(sizes)) > 1:  # the kernel would read beyond an array's end
            raise ValueError(f"calibration: arrays of {', '.join(map(str, sizes))} nodes are not of one step")
        self._idle += 1
        if raw.size or self._idle == IDLE:
            kept, self._idle = self._decay**self._idle, 0
            _learn(self._counts, self._tally, self.table, kept, raw, rows, depth, reached, accepted)

    def refresh(self) -> None:
        """Compute `table` anew, in place, from the counts."""
        _refresh(self._counts, self.table)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self._counts.tolist(), "tally": self._tally.tolist(), "idle": self._idle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises StrettoError where the state is one of other rows, depths or bins; nothing is changed then."""
        counts, tally = (np.array(state[name], np.float64) for name in ("counts", "tally"))
        for name, found, ours in (("counts", counts, self._counts), ("tally", tally, self._tally)):
            if found.shape != ours.shape:
                raise StrettoError(
                    f"calibration: stored {name} have shape {found.shape}, this version's {ours.shape}"
                )
        self._counts, self._tally, self._idle = counts, tally, int(state["idle"])
        self.refresh()

    def counts(self) -> Tally:
        """Since the last call, of the nodes tested, overall and by row (left out where there were none).

        `error` is the expected calibration error (Naeini et al. 2015): mean distance of predicted from observed over
        bins of the prediction, weighted by tests. Each prediction is the one made before its outcome was learnt.
        """
        tally, self._tally = self._tally, np.zeros_like(self._tally)
        groups = {"": tally.sum(axis=0)} | {f"/{name}": tally[i] for i, name in enumerate(ROWS)}
        found = Tally()
        for suffix, bins in groups.items():
            tested, predicted, accepted = bins.sum(axis=0)
            if tested > 0.0:
                off = np.abs(bins[:, ESTIMATED] - bins[:, ACCEPTED]).sum()
                for name, value in (("error", off), ("predicted", predicted), ("observed", accepted)):
                    found.ratios[f"spec/calibration/{name}{suffix}"] = (float(value), float(tested))
        return found

    def metrics(self) -> dict[str, float]:
        """`counts`, as shares."""
        return self.counts().figures()
