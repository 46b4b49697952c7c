"""Following requests through vLLM's batch, whose rows have no names.

vLLM hands a custom drafter the token ids of its batch's rows and how many each row has. Rows are re-used, moved and
swapped between steps; a request may leave the batch (finished, aborted, preempted, not scheduled) and come back. So a
row is known by what it says: it is the request whose text the row begins with. Two requests that have said the same so
far are interchangeable, and telling them apart would change nothing.

A request that is seen for the first time has just been sampled from its prompt: what is before its first tokens is the
prompt. Not so after steps in which vLLM did not ask for drafts, which rows show that have said more than was sampled
last: then its prompt is the longest known one that the text begins with, if any.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stretto.records import BoolArray, IntArray
from stretto.sampling import kernel

TokenArray = npt.NDArray[np.int32]

LEFT_REQUESTS = 256  # that have left the batch and are still known, should they come back
LEFT_TOKENS = 1 << 22  # of these together
KNOWN_PROMPTS = 1 << 14  # that are known again
TAIL = 64  # tokens at the end of a row that are compared in every step,
SPREAD = 16  # and how many before them, evenly spread


class Left(NamedTuple):
    """A request that is in no row any more."""

    serial: int
    slot: int  # that it had
    prompt: int  # tokens of its prompt
    tokens: TokenArray  # prompt and response; nothing after a stop token
    stopped: bool  # at one


class New(NamedTuple):
    """A request that is in the batch since this step."""

    row: int
    slot: int
    prompt: int  # tokens of its prompt
    back: Left | None  # None unless it had been here before


@dataclass(slots=True)
class Step:
    """What changed since the step before. R rows."""

    slots: IntArray  # (R,), of the request in each row; -1 where nothing was sampled yet
    left: list[Left]
    new: list[New]


@kernel()
def _goes_on(
    slots: IntArray,
    length: IntArray,
    texts: TokenArray,
    counts: IntArray,
    totals: IntArray,
    tokens: TokenArray,
    found: BoolArray,
) -> bool:
    """Whether each row still has the request in `slots` (R,), in `found` (R,); returns whether all have.

    It has if its text is as long as it was, ends as it did and is the same at some places before: whole texts are
    too much to read in every step. Another request of which all that is true would get worse drafts, no more.
    """
    every = True
    for row in range(slots.size):
        slot, before = slots[row], totals[row] - counts[row]
        same = slot >= 0 and counts[row] > 0 and length[slot] == before
        at = before - 1
        tail = max(before - TAIL, 0)
        while same and at >= tail:
            same = texts[slot, at] == tokens[row, at]
            at -= 1
        for i in range(SPREAD):
            at = tail * i // SPREAD
            same = same and (tail == 0 or texts[slot, at] == tokens[row, at])
        found[row] = same
        every = every and same
    return every


@kernel()
def _take(
    slots: IntArray,
    length: IntArray,
    last: IntArray,
    stopped: BoolArray,
    stops: TokenArray,
    texts: TokenArray,
    totals: IntArray,
    tokens: TokenArray,
) -> None:
    """Add what is new in each row to the text of its request, and whether a stop token is among it to `stopped`."""
    for row in range(slots.size):
        slot = slots[row]
        if slot >= 0:
            stopped[slot] = False
            for at in range(length[slot], totals[row]):
                texts[slot, at] = tokens[row, at]
                for stop in stops:
                    stopped[slot] |= tokens[row, at] == stop
            last[slot] = length[slot]
            length[slot] = totals[row]


class Rows:
    """Which request is in which row, step by step. A request has a slot, the same while it is in the batch."""

    def __init__(self, slots: int, longest: int, stops: Collection[int] = ()) -> None:
        """`slots`: rows at most; `longest`: tokens of a row at most; `stops`: ids that end a response."""
        self.texts: TokenArray = np.zeros((slots, longest), np.int32)  # by slot: prompt and response
        self.length: IntArray = np.zeros(slots, np.int64)  # of these
        self.prompt: IntArray = np.zeros(slots, np.int64)  # tokens that are the prompt's
        self.last: IntArray = np.zeros(slots, np.int64)  # where the tokens of the newest step begin
        self.stopped: BoolArray = np.zeros(slots, np.bool_)  # whether one of these is a stop token
        self._stops: TokenArray = np.array(sorted(stops), np.int32)
        self._serial: IntArray = np.zeros(slots, np.int64)
        self._next = 0  # serial number
        self._rows: IntArray = np.zeros(0, np.int64)  # (R,), the slots of the step before
        self._free = list(range(slots))[::-1]
        self._left: OrderedDict[int, Left] = OrderedDict()  # by serial, oldest first
        self._left_tokens = 0
        self._prompts: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # sizes by hash, the one seen longest ago first
        self._sizes: Counter[int] = Counter()  # of these
        self._skipped = False  # whether there was a step without a call before this one
        none, texts = self._rows, self.texts  # compiled now, so that no step has to
        _goes_on(none, self.length, texts, none, none, texts, self.stopped[:0])
        _take(none, self.length, self.last, self.stopped, self._stops, texts, none, texts)

    @property
    def running(self) -> list[int]:
        """Slots of the requests that were in the newest step."""
        return [int(slot) for slot in self._rows if slot >= 0]

    def follow(self, counts: IntArray, totals: IntArray | TokenArray, tokens: TokenArray) -> Step:
        """A step in which `counts` (R,) tokens were sampled for each row; `tokens` (R or more, longest) are the rows,
        of which `totals` (R or more,) tokens count.

        A row with none is being prefilled, and in no slot.
        """
        rows = counts.size
        totals = totals[:rows].astype(np.int64)
        slots, same = self._locate(counts, totals, tokens)
        left: list[Left] = []
        if not same:
            stay = {-1, *slots.tolist()}
            left = [self._leave(slot) for slot in self._rows.tolist() if slot not in stay]
        stopped, stops = self.stopped, self._stops
        _take(slots, self.length, self.last, stopped, stops, self.texts, totals, tokens)
        new: list[New] = []
        if not same:
            for row in np.flatnonzero((slots < 0) & (counts > 0)).tolist():
                new.append(self._begin(row, int(counts[row]), tokens[row, : totals[row]]))
                slots[row] = new[-1].slot
        self._rows = slots
        return Step(slots, left, new)

    def _locate(self, counts: IntArray, totals: IntArray, tokens: TokenArray) -> tuple[IntArray, bool]:
        """The slots of the rows, (R,), -1 where a row's request is in none; and whether nothing has changed."""
        slots = np.full(counts.size, -1, np.int64)
        before = self._rows[: counts.size]
        slots[: before.size] = before
        found = np.zeros(counts.size, np.bool_)
        self._skipped = False
        same = _goes_on(slots, self.length, self.texts, counts, totals, tokens, found)
        if not same:
            slots[~found] = -1
            self._search(slots, counts, totals, tokens)
        return slots, same and counts.size == self._rows.size

    def _search(self, slots: IntArray, counts: IntArray, totals: IntArray, tokens: TokenArray) -> None:
        """Find requests of the step before that are in another row now, or have said more than was sampled last.

        (The drafter is not called for steps in which a row comes near the longest that the model takes.)
        """
        taken = set(slots.tolist())
        lost = [slot for slot in self._rows.tolist() if slot >= 0 and slot not in taken]
        lost.sort(
            key=lambda slot: -int(self.length[slot])
        )  # the longest text that a row begins with is its own
        for row in np.flatnonzero((slots < 0) & (counts > 0)).tolist():
            text = tokens[row, : totals[row] - counts[row]]
            for slot in lost:
                length = int(self.length[slot])
                if (
                    length <= text.size
                    and self.texts[slot, length - 1] == text[length - 1]
                    and np.array_equal(self.texts[slot, :length], text[:length])
                ):
                    slots[row] = slot
                    self._skipped |= length < text.size
                    lost.remove(slot)
                    break

    def said(self, slot: int) -> tuple[TokenArray, bool]:
        """A copy of the prompt and response of the request in `slot`, and whether it ends with a stop token."""
        # What is accepted behind a stop token is in the row too, though nobody is given it.
        last, length = int(self.last[slot]), int(self.length[slot])
        at = np.flatnonzero(np.isin(self.texts[slot, last:length], self._stops))
        return self.texts[slot, : last + at[0] + 1 if at.size else length].copy(), at.size > 0

    def _leave(self, slot: int) -> Left:
        tokens, stopped = self.said(slot)
        left = Left(int(self._serial[slot]), slot, int(self.prompt[slot]), tokens, stopped)
        self._free.append(slot)
        self._left[left.serial] = left
        self._left_tokens += tokens.size
        while self._left_tokens > LEFT_TOKENS or len(self._left) > LEFT_REQUESTS:
            self._left_tokens -= self._left.popitem(last=False)[1].tokens.size
        return left

    def _begin(self, row: int, count: int, text: TokenArray) -> New:
        """The request of a row that nobody in the batch has said; `text` is all of the row."""
        slot = self._free.pop()
        back = self._back(text[: text.size - count])
        self.texts[slot, : text.size] = text
        self.length[slot] = text.size
        self.last[slot] = text.size - count
        self.stopped[slot] = np.isin(text[text.size - count :], self._stops).any()
        self.prompt[slot] = self._prompt_of(text, text.size - count) if back is None else back.prompt
        self._serial[slot] = self._next
        self._next += 1
        return New(row, slot, int(self.prompt[slot]), back)

    def _prompt_of(self, text: TokenArray, size: int) -> int:
        """The size of the prompt of a request that is new; `size`: unless it has had steps without a call."""
        if self._skipped:
            hashed, at, longest = blake2b(digest_size=16), 0, 0
            for known in sorted(+self._sizes):
                if known <= size:
                    hashed.update(text[at:known].tobytes())
                    at = known
                    longest = known if hashed.digest() in self._prompts else longest
            return longest or size
        key = blake2b(text[:size].tobytes(), digest_size=16).digest()
        if key not in self._prompts:
            self._prompts[key] = size
            self._sizes[size] += 1
        self._prompts.move_to_end(key)
        if len(self._prompts) > KNOWN_PROMPTS:
            self._sizes[self._prompts.popitem(last=False)[1]] -= 1
        return size

    def _back(self, text: TokenArray) -> Left | None:
        """The request that has left with this text, or with more than it or a part of it: it was preempted, or a
        client goes on from the tokens it has received, or with the next turn of a conversation.
        """
        best, size = None, 0
        for left in self._left.values():
            common = min(left.tokens.size, text.size)
            if (
                common > max(left.prompt, size)
                and left.tokens[common - 1] == text[common - 1]
                and np.array_equal(left.tokens[:common], text[:common])
            ):
                best, size = left, common
        if best is not None:
            del self._left[best.serial]
            self._left_tokens -= best.tokens.size
        return best
