"""Requests that vLLM has, and what is drafted for them: of a drafter's trees vLLM verifies one path each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stretto.draft import Drafts, Verified, no_drafts
from stretto.engine import Drafter
from stretto.engine.stop_strings import StopStrings
from stretto.records import BoolArray, IntArray, Request


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
    """What was drafted in a step for `slots` (R,)."""

    slots: Sequence[VllmSlot]
    drafts: Drafts
    paths: list[IntArray]  # the nodes of each tree that vLLM is given, an array each

    def token_ids(self) -> list[list[int]]:
        """Of the paths."""
        return [self.drafts.token_ids[path].tolist() for path in self.paths]

    def learn(
        self,
        drafter: Drafter,
        drawn: Sequence[VllmSlot],
        emitted: IntArray,
        token_ids: IntArray,
    ) -> None:
        """Tell the drafter what became of its trees, and of those that had none.

        The slots `drawn` (S,) emitted `emitted` (S,) tokens each of `token_ids` (T,). These judge nodes beside the
        path, too: whether a tree's verification would have accepted them.
        """
        place = {slot.number: at for at, slot in enumerate(drawn)}
        starts = np.cumsum(emitted) - emitted
        said = [
            token_ids[start : start + count].tolist() for start, count in zip(starts, emitted, strict=True)
        ]
        drafts = self.drafts
        reached = np.zeros(drafts.token_ids.size, np.bool_)
        accepted = np.zeros(drafts.token_ids.size, np.bool_)
        begins = np.cumsum(drafts.counts) - drafts.counts
        for slot, begin, count in zip(self.slots, begins.tolist(), drafts.counts.tolist(), strict=True):
            if slot.number in place:
                nodes = slice(begin, begin + count)
                tokens = said[place[slot.number]]
                _judge(
                    drafts.parents[nodes], drafts.token_ids[nodes], tokens, reached[nodes], accepted[nodes]
                )
        had = {slot.number for slot in self.slots}
        order = [*self.slots, *(slot for slot in drawn if slot.number not in had)]
        # One that vLLM has put off has said nothing.
        tokens_of = [said[place[slot.number]] if slot.number in place else [] for slot in order]
        none = np.zeros(len(order) - len(self.slots), np.int64)
        counts = np.concatenate([drafts.counts, none])
        rest = (drafts.token_ids, drafts.parents, drafts.depth, drafts.estimates, drafts.sources)
        drafter.observe(
            np.array([slot.number for slot in order]),
            Drafts(counts, *rest),
            Verified(reached, accepted, np.array([len(tokens) for tokens in tokens_of])),
            np.array([token for tokens in tokens_of for token in tokens], np.int64),
        )


def _judge(
    parents: IntArray, token_ids: IntArray, said: Sequence[int], reached: BoolArray, accepted: BoolArray
) -> None:
    """Mark the nodes of a tree that its request's tokens `said` put to the test, and those that these are."""
    here = -1
    for token in said:
        children = np.flatnonzero(parents == here)
        reached[children] = True
        right = children[token_ids[children] == token]
        if not right.size:
            return
        here = int(right[0])
        accepted[here] = True


NOTHING = Proposal((), no_drafts(0), [])


def propose(drafter: Drafter, slots: Sequence[VllmSlot], tokens: int, most: int, longest: int) -> Proposal:
    """Have `drafter` propose for these slots, as in `stretto.engine.Drafter`; paths have at most `longest` nodes."""
    drafts = drafter.propose(
        np.array([slot.number for slot in slots]),
        np.array([slot.generated for slot in slots]),
        np.array([slot.room for slot in slots]),
        tokens,
        most,
    )
    begins = np.cumsum(drafts.counts) - drafts.counts
    paths = [
        begin + best_path(drafts.parents[begin : begin + count])[:longest]
        for begin, count in zip(begins.tolist(), drafts.counts.tolist(), strict=True)
    ]
    return Proposal(slots, drafts, paths)


def best_path(parents: IntArray) -> IntArray:
    """Nodes of the path that begins at the newest token and goes on at the best child each time: those of a tree are in
    order of falling estimate.
    """
    path: list[int] = []
    here = -1
    for node, parent in enumerate(parents.tolist()):
        if parent == here:
            path.append(node)
            here = node
    return np.array(path, np.int64)
