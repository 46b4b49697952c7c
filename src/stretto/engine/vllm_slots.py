"""Requests that vLLM has, and what is drafted for them: paths, since vLLM verifies no trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stretto.draft import Drafts, Verified, no_drafts
from stretto.draft.paths import judge
from stretto.engine import Drafter
from stretto.engine.stop_strings import StopStrings
from stretto.records import IntArray, Request


@dataclass(slots=True)
class VllmSlot:
    """A request that vLLM has."""

    number: int
    request: Request
    ticket: int  # what its draws are known by
    vllm_id: str
    generated: int  # tokens of the response
    limit: int  # of prompt and response, at which it ends:
    chunked: bool  # only for now, with more of its response to come
    stop_strings: StopStrings | None
    ready: bool = False  # it drew a token in the last step, and can be drafted for

    @property
    def name(self) -> tuple[int, int]:
        return self.request.id, self.request.attempt

    @property
    def room(self) -> int:
        """Tokens that can still come before the last."""
        return self.limit - int(self.request.prompt_ids.size) - self.generated - 1


@dataclass(slots=True)
class Proposal:
    """What was drafted in a step for the slots of these `numbers` (R,): a path each."""

    numbers: IntArray
    drafts: Drafts

    def token_ids(self, longest: int) -> list[list[int]]:
        """Of the paths, as far as vLLM takes them."""
        tokens, counts = self.drafts.token_ids.tolist(), self.drafts.counts
        begins, sizes = np.cumsum(counts) - counts, np.minimum(counts, longest)
        return [
            tokens[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)
        ]

    def learn(self, drafter: Drafter, drawn: IntArray, emitted: IntArray, token_ids: IntArray) -> None:
        """Tell the drafter what became of its paths, and of slots that had none.

        The slots of the numbers `drawn` (S,) emitted `emitted` (S,) tokens each of `token_ids` (T,).
        """
        drafts, numbers = self.drafts, self.numbers
        place = np.full(max(numbers.max(initial=-1), drawn.max(initial=-1)) + 1, -1, np.int64)
        place[drawn] = np.arange(drawn.size)
        had = np.zeros(place.size, np.bool_)
        had[numbers] = True
        others = np.flatnonzero(~had[drawn])
        at = np.concatenate([place[numbers], others])
        # One that vLLM has put off has said nothing.
        counts = np.where(at >= 0, emitted[at], 0)
        begins = (np.cumsum(emitted) - emitted)[at]
        paths = np.concatenate([drafts.counts, np.zeros(others.size, np.int64)])
        reached, accepted, tokens = judge(paths, drafts.token_ids, begins, counts, token_ids)
        drafter.observe(
            np.concatenate([numbers, drawn[others]]),
            replace(drafts, counts=paths),
            Verified(reached, accepted, counts),
            tokens,
        )


NOTHING = Proposal(np.zeros(0, np.int64), no_drafts(0))


def propose(drafter: Drafter, slots: Sequence[VllmSlot], tokens: int, most: int) -> Proposal:
    """Have `drafter` propose for these slots, as in `stretto.engine.Drafter`."""
    numbers = np.array([slot.number for slot in slots])
    generated = np.array([slot.generated for slot in slots])
    room = np.array([slot.room for slot in slots])
    return Proposal(numbers, drafter.propose(numbers, generated, room, tokens, most))
