"""What tests of the history index share: responses, what an automaton knows, and a thread that waits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from stretto.history import builds
from stretto.history.frozen import Frozen, find_frozen, freeze
from stretto.history.index import HistoryIndex, Response

Text = tuple[int, ...]


def response(tokens: Text, reward: float = 0.0) -> Response:
    """With log-probs that tell positions and tokens apart."""
    logprobs = [-0.1 * (i + 1) - 0.01 * (token % 7) for i, token in enumerate(tokens)]
    return Response(np.array(tokens, np.int64), np.array(logprobs, np.float64), reward)


def known(index: HistoryIndex, handle: int) -> dict[Text, tuple[float, float]]:
    """Count and weight of every string that the automaton of `handle` spells."""
    arrays = index.arrays()
    state_base, edge_base = (int(base[0]) for base in index.bases(np.array([handle])))
    states: dict[Text, int] = {(): 0}
    unexplored: list[Text] = [()]
    while unexplored:
        string = unexplored.pop()
        at = state_base + states[string]
        for edge in range(edge_base + int(arrays.first[at]), edge_base + int(arrays.first[at + 1])):
            longer = (*string, int(arrays.token[edge]))
            assert edge == find_frozen(arrays, state_base, edge_base, states[string], longer[-1])
            states[longer] = int(arrays.target[edge])
            unexplored.append(longer)
    return {
        string: (float(arrays.counts[state_base + s]), float(arrays.weight[state_base + s]))
        for string, s in states.items()
    }


class HeldUp:
    """`freeze` in the building thread begins, and goes on when it is told to; elsewhere it is not held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._caller = threading.current_thread()
        monkeypatch.setattr(builds, "freeze", self.freeze)

    def freeze(self, *arguments: Any) -> Frozen:
        if threading.current_thread() is not self._caller:
            self.begun.set()
            assert self.go.wait(30)
        return freeze(*arguments)
