"""In which steps the sources are asked for nodes: seldom, while none is worth checking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATELY, HARDLY = 1 / 32, 1 / 16
"""What one step that was asked weighs among those of late, and the share of them with a node below which begins of
requests are nothing new.
"""


class Pauses:
    """While no node is worth checking, the 1st, 2nd, 4th, ... such step is asked, and at least every `longest`th.

    A request that begins takes this back to the 2nd: it may have another history. Not so where of late hardly any step
    had a node: with many in flight one begins at nearly every step, and all would be asked.
    """

    def __init__(self, longest: int) -> None:
        self.paused = False  # this step is not asked
        self._longest = longest
        self._fruitless = 0  # steps in a row without a node
        self._fruitful = 0.0  # of the steps of late that were asked, the share that had one

    def begin(self) -> None:
        """A request begins."""
        if self._fruitful >= HARDLY:
            self._fruitless = min(self._fruitless, 2)

    def ask(self, needed: bool) -> bool:
        """Whether this step is to be asked; `needed`: in any case. If so, `found` is to be called."""
        fruitless = self._fruitless
        self.paused = not needed and bool(fruitless & (fruitless - 1) and fruitless % self._longest)
        self._fruitless += self.paused
        return not self.paused

    def found(self, nodes: int) -> None:
        """The step that was asked had so many nodes that are worth checking."""
        self._fruitless = 0 if nodes else self._fruitless + 1
        self._fruitful += LATELY * ((nodes > 0) - self._fruitful)

    def state_dict(self) -> dict[str, Any]:
        return {"fruitless": self._fruitless, "fruitful": self._fruitful}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An empty one is that of the beginning."""
        self._fruitless, self._fruitful = int(state.get("fruitless", 0)), float(state.get("fruitful", 0.0))
