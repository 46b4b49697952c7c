"""Which slots follow their prompt's history, and the requests whose history is still to be opened.

To open a history is to copy it to those in use. Where many requests begin at once, a step opens some and leaves the
others to the next steps, so that it doesn't wait: they draft from their other sources until then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.history.index import HistoryIndex
from stretto.records import IntArray

OPENED = 1 << 17  # bytes copied in one step; a history that is larger is copied in one, too


@dataclass(slots=True)
class _Due:
    """A request whose history is to be opened."""

    uid: str
    said: list[IntArray]  # all its tokens so far, in pieces


class Openings:
    """Handles of `index` by slot. `wait`: histories that are being built are waited for."""

    def __init__(self, index: HistoryIndex, slots: int, wait: bool) -> None:
        self.handles = np.full(slots, -1, np.int64)
        self._index, self._wait = index, wait
        self._due: dict[int, _Due] = {}  # by slot, those that began first first

    def begin(self, slot: int, uid: str, tokens: IntArray) -> None:
        """A request of prompt `uid` that has said `tokens` (T,) is in `slot`: its history is due."""
        self._due[slot] = _Due(uid, [tokens])

    def end(self, slot: int) -> None:
        """The slot is free again."""
        self._due.pop(slot, None)
        if self.handles[slot] >= 0:
            self._index.close(int(self.handles[slot]))
            self.handles[slot] = -1

    def said(self, slots: IntArray, counts: IntArray, tokens: IntArray) -> None:
        """What `slots` (R,) said, `counts` (R,) tokens each of `tokens` (T,)."""
        if self._due and slots.size:
            pieces = np.split(tokens, np.cumsum(counts)[:-1])
            for slot, piece in zip(slots.tolist(), pieces, strict=True):
                if slot in self._due:
                    self._due[slot].said.append(piece)

    @property
    def due(self) -> bool:
        """Whether histories are still to be opened."""
        return bool(self._due)

    def open(self) -> list[tuple[int, IntArray]]:
        """Open histories that are due, as many as one step may; their slots, with all that was said there (T,).

        After the first that is too much, none is waited for: only requests of prompts that are open go on.
        """
        opened: list[tuple[int, IntArray]] = []
        copied, full, uids = 0, False, set[str]()
        for slot, due in list(self._due.items()):
            if due.uid not in uids:  # else it is there
                if full:
                    continue
                if self._wait:
                    self._index.wait([due.uid])
                size = self._index.opening(due.uid)
                if copied and copied + size > OPENED:
                    full = True
                    continue
                copied += size
                full = copied >= OPENED
                uids.add(due.uid)
            del self._due[slot]
            self.handles[slot] = self._index.open(due.uid)
            if self.handles[slot] >= 0:
                opened.append((slot, np.concatenate(due.said)))
        return opened
