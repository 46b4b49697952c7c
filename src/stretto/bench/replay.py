"""Replaying recorded responses through a drafter: what would have been accepted, without a model.

The target says what is emitted next, as a model would; with keyed sampling that is exact, since drafts change no token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stretto.draft import Drafts, Verified
from stretto.draft.cost import CostModel
from stretto.engine import Drafter
from stretto.records import BoolArray, IntArray, Request, Rollout, SamplingParams
from stretto.sampling import kernel

LONGEST = 1 << 40  # tokens; no response has so many


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay counted."""

    tokens: int  # emitted
    checks: int  # verifications of one response's draft: engine steps, summed over responses
    steps: int  # engine steps
    drafted: int
    accepted: int
    seconds: float  # of the steps, by the cost model; nan without one

    @property
    def tokens_per_step(self) -> float:
        """The acceptance length: tokens emitted per verification."""
        return self.tokens / self.checks


@kernel()
def _walk(
    counts: IntArray,
    token_ids: IntArray,
    parents: IntArray,
    texts: IntArray,
    begins: IntArray,
    ends: IntArray,
    reached: BoolArray,
    accepted: BoolArray,
    emitted: IntArray,
) -> None:
    """Walk down each tree while the target's next token, `texts[begins[r]:ends[r]]`, is a child."""
    start = 0
    for r in range(counts.size):
        node, at = -1, begins[r]
        while at < ends[r]:
            found = -1
            for child in range(start, start + counts[r]):
                if parents[child] == node:
                    reached[child] = True
                    if token_ids[child] == texts[at]:
                        found = child
            at += 1
            if found < 0:
                break
            accepted[found] = True
            node = found - start
        emitted[r] = at - begins[r]
        start += counts[r]


class Texts:
    """The targets in slots, as one array."""

    def __init__(self, targets: Sequence[Rollout], slots: int) -> None:
        self.tokens = np.concatenate([t.token_ids for t in targets])
        lengths = np.array([t.token_ids.size for t in targets])
        self._ends = lengths.cumsum()
        self._begins = self._ends - lengths
        self._target = np.zeros(slots, np.int64)
        self.generated = np.zeros(slots, np.int64)

    def put(self, slot: int, target: int) -> None:
        self._target[slot], self.generated[slot] = target, 0

    def verify(self, slots: IntArray, drafts: Drafts, most: int = LONGEST) -> tuple[Verified, IntArray]:
        """What becomes of the drafts of `slots`, and the tokens that are emitted, at most `most` of each."""
        nodes, target = drafts.token_ids.size, self._target[slots]
        verified = Verified(
            np.zeros(nodes, np.bool_), np.zeros(nodes, np.bool_), np.zeros(slots.size, np.int64)
        )
        begins = self._begins[target] + self.generated[slots]
        ends = np.minimum(self._ends[target], begins + most)
        _walk(
            drafts.counts,
            drafts.token_ids,
            drafts.parents,
            self.tokens,
            begins,
            ends,
            verified.reached,
            verified.accepted,
            verified.emitted,
        )
        self.generated[slots] += verified.emitted
        emitted = verified.emitted
        shift = np.repeat(begins - (emitted.cumsum() - emitted), emitted)
        return verified, self.tokens[shift + np.arange(shift.size)]

    def ended(self, slots: IntArray) -> BoolArray:
        target = self._target[slots]
        done: BoolArray = self.generated[slots] == self._ends[target] - self._begins[target]
        return done


def request_of(rollout: Rollout, longest: int) -> Request:
    """The request that `rollout` answered."""
    sampling = SamplingParams(max_new_tokens=longest)
    none = np.empty(0, np.int64)
    return Request(
        rollout.request_id, 0, rollout.group_id, rollout.prompt.token_ids, none, 0, rollout.key, sampling
    )


def replay(
    drafter: Drafter, targets: Sequence[Rollout], slots: int, cost: CostModel | None = None
) -> Replayed:
    """Decode `targets` in this order in `slots` places, each free place taking the next one.

    A step emits for every running target the accepted tokens and one more. Prefill is left out.
    """
    longest = 2 * max(t.token_ids.size for t in targets)  # no target is cut off, or known by its limit
    texts, waiting, free = Texts(targets, slots), deque(range(len(targets))), list(range(slots))[::-1]
    active = np.zeros(slots, np.bool_)
    checks = steps = drafted = accepted = 0
    seconds = 0.0 if cost is not None else float("nan")
    while waiting or active.any():
        while waiting and free:
            slot, target = free.pop(), waiting.popleft()
            texts.put(slot, target)
            active[slot] = True
            drafter.begin(slot, request_of(targets[target], longest))
        here = np.flatnonzero(active)
        generated = texts.generated[here]
        drafts = drafter.propose(here, generated, longest - generated - 1, here.size, here.size * longest)
        nodes = drafts.token_ids.size
        verified, emitted = texts.verify(here, drafts)
        drafter.observe(here, drafts, verified, emitted)
        checks, steps, drafted = checks + here.size, steps + 1, drafted + nodes
        accepted += int(verified.accepted.sum())
        if cost is not None:
            seconds += float(cost.seconds(np.array([here.size + nodes]), nodes)[0])
        for slot in here[texts.ended(here)].tolist():
            active[slot] = False
            free.append(slot)
            drafter.end(slot, int(texts.generated[slot]))
    return Replayed(sum(t.token_ids.size for t in targets), checks, steps, drafted, accepted, seconds)
