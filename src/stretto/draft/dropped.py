"""Dropped work as a draft: a request that is started again under its key says much of what it said before.

Weights that have moved by a step or two draw nearly every token again (97 to 99.8 % of them, by the learning rate), so
while a response agrees with what was dropped, the rest of that is its draft, a single path.
"""

from __future__ import annotations

import numpy as np

from stretto.draft import MAX_NODES, SOURCES, Drafts
from stretto.draft.calibration import calibrated, depth_bucket
from stretto.records import FloatArray, IntArray, Request

DROPPED = SOURCES.index("dropped")
AGREES = 0.97
"""How often the next token is the dropped one while nothing is known: the raw estimate of every node, which calibration
corrects by depth."""


def path_estimates(table: FloatArray, length: int) -> FloatArray:
    """(length,): the estimated probability that a path is accepted up to its nodes; `table` is `Calibration.table`."""
    each = [calibrated(table, AGREES, DROPPED, depth_bucket(depth)) for depth in range(1, length + 1)]
    return np.array(each, np.float64).cumprod()


class DroppedWork:
    """What was dropped of the requests in `slots` slots, and which of them have so far said the same again."""

    def __init__(self, slots: int) -> None:
        self._texts = np.zeros((slots, 0), np.int64)
        self._length = np.zeros(slots, np.int64)  # of the text; 0: there is none, or the response has left it
        self._said = np.zeros(slots, np.int64)
        self.any = False
        """Whether a response agrees with what was dropped of it, and has some of that before it. Asked at every step,
        and seldom true: looked up where it may change."""

    def begin(self, slot: int, request: Request) -> None:
        """The slot has a new request, perhaps one with tokens."""
        said, text = request.token_ids, request.draft_ids
        self._length[slot] = 0
        if text.size > said.size and np.array_equal(text[: said.size], said):
            missing = text.size - self._texts.shape[1]
            if missing > 0:
                self._texts = np.pad(self._texts, ((0, 0), (0, missing)))
            self._texts[slot, : text.size] = text
            self._length[slot], self._said[slot] = text.size, said.size
        self.any = bool(self._length.any())

    def end(self, slot: int) -> None:
        """The slot is free again."""
        self._length[slot] = 0
        self.any = bool(self._length.any())

    def follow(self, slots: IntArray, counts: IntArray, token_ids: IntArray) -> None:
        """`slots` (R,) said `counts` (R,) more tokens each, of `token_ids` (T,)."""
        owner = np.repeat(slots, counts)
        place = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts) + self._said[owner]
        within = place < self._length[owner]
        owner, place, token_ids = owner[within], place[within], token_ids[within]
        self._length[owner[self._texts[owner, place] != token_ids]] = 0
        self._said[slots] += counts
        self.any = bool(self._length.any())

    def paths(
        self, slots: IntArray, room: IntArray, table: FloatArray, floor: float
    ) -> tuple[Drafts, FloatArray]:
        """The drafts of those of `slots` (R,) that still agree, at most `room` (R,) deep; and raw estimates (N,).

        `table` is `Calibration.table`; nodes of an estimate below `floor` are left out. Depth ends at MAX_NODES alone.
        """
        left = np.minimum(np.maximum(self._length[slots] - self._said[slots], 0), np.minimum(room, MAX_NODES))
        reach = path_estimates(table, int(left.max(initial=0)))
        left = np.minimum(left, np.count_nonzero(reach >= floor))
        place = np.arange(left.sum()) - np.repeat(np.cumsum(left) - left, left)
        owner = np.repeat(slots, left)
        drafts = Drafts(
            left,
            self._texts[owner, self._said[owner] + place],
            place - 1,
            place + 1,
            reach[place],
            np.full(place.size, DROPPED, np.int8),
        )
        return drafts, np.full(place.size, AGREES)
