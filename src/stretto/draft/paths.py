"""Paths: drafts without branches, for an engine that verifies nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stretto.records import BoolArray, IntArray
from stretto.sampling import kernel


@kernel()
def judge(
    counts: IntArray,
    drafted: IntArray,
    begins: IntArray,
    emitted: IntArray,
    said: npt.NDArray[np.int32] | IntArray,
) -> tuple[BoolArray, BoolArray, IntArray]:
    """`reached`, `accepted` (N,) of the paths of `counts` (R,) `drafted` tokens (N,), path after path; and what was
    emitted, request after request.

    Request r has emitted `emitted[r]` tokens, which `said` has from `begins[r]` on. A node that equals what was emitted
    was accepted, and one after accepted ones that does not was put to the test. An engine may cut a path short: its
    next node then looks accepted if the token that was sampled there was the same.
    """
    reached, accepted = np.zeros(drafted.size, np.bool_), np.zeros(drafted.size, np.bool_)
    tokens = np.empty(emitted.sum(), np.int64)
    at = end = 0
    for r in range(counts.size):
        tokens[end : end + emitted[r]] = said[begins[r] : begins[r] + emitted[r]]
        end += emitted[r]
        for i in range(min(counts[r], emitted[r])):
            reached[at + i] = True
            if drafted[at + i] != said[begins[r] + i]:
                break
            accepted[at + i] = True
        at += counts[r]
    return reached, accepted, tokens
