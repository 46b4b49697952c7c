"""In which steps the sources are asked for nodes: seldom, while none is worth checking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CREDIT, EARNED, RENEWED = 16, 4, 8
"""Steps that may be asked in vain because requests began: at most, for each step that had a node, and at least where
there is new history.
"""


class Pauses:
    """While no node is worth checking, the 1st, 2nd, 3rd, 5th, 9th, ... step is asked (after 0, 1, 2, 4, 8, ... in
    vain), and at least every `longest`th.

    A request that begins takes this back to 2 in vain: it may have another history. Not so once that has been in vain
    often: with many in flight one begins at nearly every step, and all would be asked.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._fruitless = 0  # steps in a row without a node
        self._credit = CREDIT

    def begin(self) -> None:
        """A request begins."""
        if self._credit:
            self._fruitless = min(self._fruitless, 2)

    def renew(self) -> None:
        """There is new history."""
        self._credit = max(self._credit, RENEWED)

    def ask(self, needed: bool) -> bool:
        """Whether this step is to be asked; `needed`: in any case. If so, `found` is to be called."""
        fruitless = self._fruitless
        paused = not needed and bool(fruitless & (fruitless - 1) and fruitless % self._longest)
        self._fruitless += paused
        return not paused

    def found(self, nodes: int) -> None:
        """The step that was asked had so many nodes that are worth checking."""
        if nodes:
            self._fruitless, self._credit = 0, min(self._credit + EARNED, CREDIT)
        else:
            self._fruitless, self._credit = self._fruitless + 1, max(self._credit - 1, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"fruitless": self._fruitless, "credit": self._credit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An empty one is that of the beginning."""
        self._fruitless, self._credit = int(state.get("fruitless", 0)), int(state.get("credit", CREDIT))
