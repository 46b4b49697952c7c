"""What the embedded engine knows about its running requests, as columns; and who shares which prompt's row."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from stretto.errors import StrettoError
from stretto.records import IntArray, Request
from stretto.sampling import SamplingColumns


class Slots:
    """One entry per slot, meaningful while a request holds it. A step works on columns, never request by request."""

    def __init__(self, count: int, max_model_len: int, vocabulary: int) -> None:
        def column() -> IntArray:
            return np.zeros(count, np.int64)

        self.max_model_len = max_model_len
        self.tokens = np.zeros((count, max_model_len), np.int64)  # prompt and response
        self.id, self.attempt = column(), column()
        self.key = np.zeros(count, np.uint64)
        self.prompt_length = column()
        self.length = column()  # tokens known: prompt and response
        self.computed = column()  # tokens whose keys and values are kept
        self.limit = column()  # the request ends when length reaches it:
        self.chunked = np.zeros(count, np.bool_)  # only for now, with more of its response to come
        self.shared = column()  # positions kept in the prompt's row: all of the prompt but its last token
        self.shared_row = column()
        self.stop_set = column()  # which row of `stops`
        self.stops = np.zeros((0, vocabulary), np.bool_)
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self.sampling = SamplingColumns(np.zeros(count), column(), np.zeros(count), np.zeros(count))

    def fill(self, slot: int, request: Request, shared_row: int) -> None:
        """Give the slot to a request, none of whose tokens has been computed."""
        prompt, response, how = request.prompt_ids, request.token_ids, request.sampling
        length = prompt.size + response.size
        self.tokens[slot, : prompt.size] = prompt
        self.tokens[slot, prompt.size : length] = response
        self.id[slot], self.attempt[slot], self.key[slot] = request.id, request.attempt, request.key
        self.prompt_length[slot], self.length[slot], self.computed[slot] = prompt.size, length, 0
        whole = response_limit(request, self.max_model_len)
        self.limit[slot] = whole if request.max_new is None else min(whole, length + request.max_new)
        self.chunked[slot] = self.limit[slot] < whole
        self.shared[slot], self.shared_row[slot] = prompt.size - 1, shared_row
        self.stop_set[slot] = self._stop_set(how.stop_token_ids)
        self.sampling.temperature[slot], self.sampling.top_k[slot] = how.temperature, how.top_k
        self.sampling.top_p[slot], self.sampling.min_p[slot] = how.top_p, how.min_p

    def append(self, slots: IntArray, token_ids: IntArray) -> None:
        """Add one token to each of these slots, (R,)."""
        self.tokens[slots, self.length[slots]] = token_ids
        self.length[slots] += 1

    def _stop_set(self, token_ids: tuple[int, ...]) -> int:
        """Row of `stops` for these stop tokens; requests nearly always have the same ones."""
        if token_ids not in self._stop_sets:
            row = np.zeros((1, self.stops.shape[1]), np.bool_)
            row[0, list(token_ids)] = True
            self._stop_sets[token_ids] = len(self.stops)
            self.stops = np.concatenate([self.stops, row])
        return self._stop_sets[token_ids]


def plan(columns: Slots, prompts: PromptRows, slots: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Those of the running `slots` that a step of `most` tokens computes tokens of, and how many of each (both (R,),
    counts > 0).

    One of the requests that share a prompt computes it; the others wait for it. Those that need a single token
    go first, then prompts in order of admission, the last one as far as `most` reaches.
    """
    shared = columns.shared[slots]
    pending = columns.length[slots] - columns.computed[slots]
    behind = np.flatnonzero(columns.computed[slots] < shared)
    if behind.size:
        late = slots[behind]
        rows = columns.shared_row[late]
        columns.computed[late] = np.maximum(columns.computed[late], prompts.computed[rows])
        pending[behind] = columns.length[late] - columns.computed[late]
        unfinished = columns.computed[late] < columns.shared[late]
        waits = np.ones(behind.size, np.bool_)
        waits[np.unique(rows, return_index=True)[1]] = False
        pending[behind[unfinished & waits]] = 0
    if pending.sum() == slots.size <= most and not behind.size:
        return slots, pending
    order = np.argsort(pending > 1, kind="stable")
    slots, pending = slots[order], pending[order]
    before = np.cumsum(pending) - pending
    counts = np.clip(most - before, 0, pending)
    return slots[counts > 0], counts[counts > 0]


def refuse_unfit(request: Request, max_model_len: int, vocabulary: int, tokenizer: bool) -> None:
    """Raise `StrettoError` if this request could not be run as it is meant."""
    prompt, response, how = request.prompt_ids, request.token_ids, request.sampling
    what = f"request {request.id}"
    if prompt.size == 0:
        raise StrettoError(f"{what} has an empty prompt: the first token needs at least one before it")
    if prompt.size >= max_model_len:
        raise StrettoError(
            f"{what}: its prompt has {prompt.size} tokens and leaves no room for a response within "
            f"engine.max_model_len = {max_model_len}"
        )
    if prompt.size + response.size > max_model_len:
        raise StrettoError(
            f"{what} has {prompt.size} + {response.size} tokens, more than engine.max_model_len = "
            f"{max_model_len}"
        )
    for name, ids in (
        ("prompt", prompt),
        ("response", response),
        ("dropped tokens", request.draft_ids),
        ("earlier response", request.reuse.token_ids if request.reuse is not None else response[:0]),
        ("stop tokens", how.stop_token_ids),
    ):
        array = np.asarray(ids, np.int64)
        if array.size and not 0 <= array.min() <= array.max() < vocabulary:
            raise StrettoError(f"{what}: token ids of its {name} are outside 0 .. {vocabulary - 1}")
    if how.stop and not tokenizer:
        raise StrettoError(f"{what} has stop strings, but this engine has no tokenizer to find them with")


def response_limit(request: Request, max_model_len: int) -> int:
    """Tokens of prompt and response at which the response ends for its length."""
    return min(int(request.prompt_ids.size) + request.sampling.max_new_tokens, max_model_len)


class PromptRows:
    """Rows of keys and values that hold prompts, by their token ids; unused prompts stay until their row is needed.

    There are as many rows as slots, so a request that gets a slot always gets a row.
    """

    def __init__(self, first: int, count: int) -> None:
        self.computed = np.zeros(first + count, np.int64)  # by row: positions that are kept
        self._users = np.zeros(first + count, np.int64)
        self._free = list(range(first + count - 1, first - 1, -1))
        self._row_of: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # known and without users, least recently used first
        self._name: dict[int, bytes] = {}  # of rows in `_row_of`

    def take(self, prompt_ids: IntArray) -> int:
        """The row of this prompt (P,) for one more user."""
        name = prompt_ids.tobytes()
        row = self._row_of.get(name)
        if row is None:
            if not self._free:
                self._forget(next(iter(self._idle)))
            row = self._free.pop()
            self.computed[row] = 0
            self._row_of[name], self._name[row] = row, name
        self._idle.pop(name, None)
        self._users[row] += 1
        return row

    def release(self, row: int) -> None:
        """One user less."""
        self._users[row] -= 1
        if self._users[row] == 0:
            if row in self._name:
                self._idle[self._name[row]] = row
            else:
                self._free.append(row)

    def drop(self) -> None:
        """Let no later request find a prompt that is kept now; its present users keep theirs."""
        for name in list(self._row_of):
            self._forget(name)

    def _forget(self, name: bytes) -> None:
        row = self._row_of.pop(name)
        del self._name[row]
        if self._idle.pop(name, None) is not None:
            self._free.append(row)
