"""How long responses to each prompt were of late."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

PROMPTS = 1 << 16  # that are known; the one that was answered longest ago is forgotten first


@dataclass(slots=True)
class _Lengths:
    """Of the responses of a prompt's newest visit."""

    visit: int
    tokens: int = 0
    responses: int = 0


class MeanLengths:
    """Of each prompt's newest visit; of PROMPTS prompts, since on a server ever new ones come."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, _Lengths] = OrderedDict()  # by uid

    def add(self, uid: str, visit: int, sizes: Sequence[int]) -> None:
        """Responses of so many tokens each; those of an older visit than the newest count no more."""
        lengths = self._prompts.pop(uid, None)
        if lengths is None or visit > lengths.visit:
            lengths = _Lengths(visit)
        if visit == lengths.visit:
            lengths.tokens += sum(sizes)
            lengths.responses += len(sizes)
        self._prompts[uid] = lengths
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)

    def mean(self, uid: str) -> float | None:
        """Tokens; None for a prompt of which none is known."""
        lengths = self._prompts.get(uid)
        return lengths.tokens / lengths.responses if lengths else None
