"""Suffix automata of finished responses, packed: built at once, read by many requests, never changed.

They are built as live automata (`stretto.history.automaton`) and packed into five numbers per state and two per edge,
and where alternatives are kept (`stretto.history.mixtures`) one more per state and two per token of its row.
An `Arena` keeps several behind one another, so that one kernel serves requests of different prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stretto.history.automaton import (
    EDGES,
    STATES,
    Pool,
    TokenArray,
    WeightArray,
    allocate,
    append,
    new_state,
)
from stretto.history.mixtures import Rows, ShareArray, mix, no_mixtures
from stretto.records import FloatArray, IntArray
from stretto.sampling import kernel

FIRST = 1 << 19  # entries of an arena's arrays: 2 MiB, which the operating system may give at once
SHRINK = 2.25  # from one gap of the Shell sort to the next


class Frozen(NamedTuple):
    """A compact automaton, or several behind one another; state 0 is the root, -1 its link.

    Edges of the root are sorted by token, those of other states by their target's weight, greatest first, ties to
    the smaller token. An edge occurs as often, and weighs as much, as its target.
    """

    link: TokenArray  # (S,)
    length: TokenArray  # (S,), of the state's longest string
    first: TokenArray  # (S + 1,), edges of state s: first[s] .. first[s + 1]
    counts: WeightArray  # (S,), occurrences
    weight: WeightArray  # (S,), sum of the values of their last tokens; `counts` itself if each is 1
    token: TokenArray  # (E,)
    target: TokenArray  # (E,)
    row: TokenArray  # of `stretto.history.mixtures.Mixtures`
    likely: TokenArray
    share: ShareArray

    @property
    def states(self) -> int:
        """S."""
        return len(self.link)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, each counted once."""
        return sum({id(a): a.nbytes for a in self}.values())


@kernel()
def _trace(pool: Pool, tokens: TokenArray, offsets: IntArray) -> TokenArray:
    """Build the automaton of all texts; the state of the text before and with each token, (N,)."""
    ends = np.empty(len(tokens), np.int32)
    pool.roots[0] = new_state(pool, -1, 0, 0.0)
    for text in range(len(offsets) - 1):
        state = int(pool.roots[0])
        for i in range(offsets[text], offsets[text + 1]):
            state = int(append(pool, 0, state, int(tokens[i])))
            ends[i] = state
    return ends


@kernel()
def _shortest_first(length: TokenArray) -> TokenArray:
    """The states in order of their longest strings, by counting sort; (S,)."""
    start = np.zeros(length.max() + 2, np.int64)
    for state in range(len(length)):
        start[length[state] + 1] += 1
    for longest in range(1, len(start)):
        start[longest] += start[longest - 1]
    order = np.empty(len(length), np.int32)
    for state in range(len(length)):
        order[start[length[state]]] = state
        start[length[state]] += 1
    return order


@kernel()
def _sum_up(link: TokenArray, order: TokenArray, ends: TokenArray, values: FloatArray) -> WeightArray:
    """Sum of `values` over the occurrences of each state, (S,); of empty `values`, their number."""
    sums = np.zeros(len(link), np.float64)
    for i in range(len(ends)):
        sums[ends[i]] += values[i] if len(values) else 1.0
    for i in range(len(order) - 1, 0, -1):  # a link leads to a shorter string; order[0] is the root
        sums[link[order[i]]] += sums[order[i]]
    return sums.astype(np.float32)


@kernel()
def _sort_edges(token: TokenArray, target: TokenArray, weight: WeightArray) -> None:
    """Sort one state's edges by weight, greatest first, ties to the smaller token; by token if there are no weights.

    In place, by Shell sort (1959): most states have one to three edges, some have thousands.
    """
    gap = len(token)
    while gap > 1:
        gap = max(1, int(gap / SHRINK))
        for i in range(gap, len(token)):
            a, b = token[i], target[i]
            w = weight[b] if len(weight) else np.float32(0)
            j = i
            while j >= gap:
                other = weight[target[j - gap]] if len(weight) else np.float32(0)
                if other > w or (other == w and token[j - gap] < a):
                    break
                token[j], target[j] = token[j - gap], target[j - gap]
                j -= gap
            token[j], target[j] = a, b


@kernel()
def _pack_edges(pool: Pool, weight: WeightArray) -> tuple[TokenArray, TokenArray, TokenArray]:
    """`first` (S + 1,), `token` and `target` (E,) of a frozen automaton."""
    states, edges = len(weight), pool.top[EDGES]
    first = np.empty(states + 1, np.int32)
    token, target = np.empty(edges, np.int32), np.empty(edges, np.int32)
    at = 0
    for state in range(states):
        first[state] = at
        for bucket in range(pool.buckets.shape[1] if state == 0 else 1):
            edge = int(pool.buckets[0, bucket] if state == 0 else pool.head[state])
            while edge >= 0:
                token[at], target[at] = pool.token[edge], pool.target[edge]
                at += 1
                edge = int(pool.following[edge])
        start = first[state]
        if at - start > 1:
            _sort_edges(token[start:at], target[start:at], weight if state else weight[:0])
    first[states] = at
    return first, token, target


def freeze(
    tokens: TokenArray, offsets: IntArray, values: FloatArray | None = None, rows: Rows | None = None
) -> Frozen:
    """The frozen automaton of K texts: text k is `tokens[offsets[k]:offsets[k + 1]]`.

    `tokens` is (N,) int32, not negative; `offsets` (K + 1,) int64; `values` (N,) float64, what an occurrence that ends
    at this token weighs (None: 1, and `weight` is `counts`); `rows` are what tokens were drawn from (None: unknown).
    Takes O(N) time, but for sorting edges.
    """
    pool = allocate(2 * len(tokens) + 1, 3 * len(tokens), 1, hashed=True)
    ends = _trace(pool, tokens, offsets)
    states = int(pool.top[STATES])
    link, length = pool.link[:states].copy(), pool.length[:states].copy()
    order = _shortest_first(length)
    counts = _sum_up(link, order, ends, np.empty(0))
    weight = counts if values is None else _sum_up(link, order, ends, values)
    first, token, target = _pack_edges(pool, weight)
    mixtures = no_mixtures() if rows is None else mix(link, counts, order, ends, offsets, rows)
    return Frozen(link, length, first, counts, weight, token, target, *mixtures)


@kernel()
def find_frozen(frozen: Frozen, state_base: int, edge_base: int, state: int, token: int) -> int:
    """The edge of a frozen `state` by `token`, as an index into `frozen.token`, or -1.

    States and the values of `first` count from the automaton's own bases, which are 0 where it stands alone.
    """
    edge = int(edge_base + frozen.first[state_base + state])
    end = int(edge_base + frozen.first[state_base + state + 1])
    if state == 0:
        while end - edge > 1:
            middle = (edge + end) // 2
            if frozen.token[middle] > token:
                end = middle
            else:
                edge = middle
    while edge < end:
        if frozen.token[edge] == token:
            return edge
        edge += 1
    return -1


@kernel()
def advance(
    frozen: Frozen, state_base: int, edge_base: int, state: int, length: int, token: int
) -> tuple[int, int]:
    """The state and length of the longest match after one more token; (0, 0) where the token is unknown.

    A match is the longest suffix of a text that occurs in the automaton; its length is at most its state's, so a
    match of any text, not only of those inside, costs amortised O(1) steps per token.
    """
    while True:
        edge = find_frozen(frozen, state_base, edge_base, state, token)
        if edge >= 0:
            return int(frozen.target[edge]), length + 1
        if state == 0:
            return 0, 0
        state = int(frozen.link[state_base + state])
        length = int(frozen.length[state_base + state])


class Arena:
    """Frozen automata in one set of arrays, for those that are in use.

    A state has the same number in here and outside; handles are small integers, used again after `remove`. Not
    thread-safe. `arrays` and bases may change in `add` and `remove`: read them anew after either.
    """

    def __init__(self, weighted: bool, mixed: bool = False, reserve: int = 0) -> None:
        """`weighted`: the automata have weights of their own; otherwise `arrays.weight` is `arrays.counts`. `mixed`:
        all have rows; otherwise none has.

        `reserve`: bytes that are taken up before anything has to move. The operating system gives memory to pages
        when they are first written, so what is reserved costs nothing until it is used.
        """
        self._weighted, self._mixed = weighted, mixed
        self._reserve = reserve
        self._placed: dict[int, Frozen] = {}
        self._state_base = np.empty(0, np.int64)
        self._edge_base = np.empty(0, np.int64)
        self._row_base = np.empty(0, np.int64)
        self._clear(0, 0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays as far as they were ever written."""
        states, edges, likely = self._written
        return states * (16 + 4 * self._weighted + 4 * self._mixed) + edges * 8 + likely * 6

    def bases(self, handles: IntArray) -> tuple[IntArray, IntArray]:
        """Where each automaton's states and edges begin, (R,) each; -1 for a handle of -1.

        Automaton h has its per-state entries from its state base on, `first` with one more than the others.
        """
        if not len(self._state_base):
            return np.full(len(handles), -1), np.full(len(handles), -1)
        none = handles < 0
        return np.where(none, -1, self._state_base[handles]), np.where(none, -1, self._edge_base[handles])

    def add(self, frozen: Frozen) -> int:
        """Copy an automaton in; its handle. Moves what is there only when the arrays are full."""
        handle = next(h for h in range(len(self._placed) + 1) if h not in self._placed)
        if handle == len(self._state_base):
            self._state_base = np.append(self._state_base, -1)
            self._edge_base = np.append(self._edge_base, -1)
            self._row_base = np.append(self._row_base, -1)
        placed = self._placed.items()
        bases = (
            _gap([(int(self._state_base[h]), len(f.first)) for h, f in placed], len(frozen.first)),
            _gap([(int(self._edge_base[h]), len(f.token)) for h, f in placed], len(frozen.token)),
            _gap([(int(self._row_base[h]), len(f.likely)) for h, f in placed], len(frozen.likely)),
        )
        self._placed[handle] = frozen
        rooms = (len(self.arrays.link), len(self.arrays.token), len(self.arrays.likely))
        if all(base + size <= room for base, size, room in zip(bases, _sizes(frozen), rooms, strict=True)):
            self._place(handle, *bases)
        else:
            self._repack()
        return handle

    def remove(self, handle: int) -> None:
        """Forget an automaton; its place is free for others. KeyError if there is none."""
        del self._placed[handle]
        if not self._placed and self._grown:  # what was reserved stays: to give it back costs milliseconds
            self._clear(0, 0, 0)

    def _clear(self, states: int, edges: int, likely: int) -> None:
        """New arrays with room for at least so much, and at least what is reserved."""
        # Four edges to three states and, where there are rows, six tokens of them: as in text.
        states = max(states, self._reserve // (48 if self._mixed else 32))
        edges = max(edges, self._reserve // (36 if self._mixed else 24))
        likely = max(likely, self._reserve // 24 if self._mixed else 0)
        i32 = np.int32
        link, length, first = np.zeros(states, i32), np.zeros(states, i32), np.zeros(states, i32)
        counts = np.zeros(states, np.float32)
        weight = np.zeros(states, np.float32) if self._weighted else counts
        token, target = np.zeros(edges, i32), np.zeros(edges, i32)
        rows = np.zeros(states if self._mixed else 0, i32), np.zeros(likely, i32), np.zeros(likely, np.uint16)
        self.arrays = Frozen(link, length, first, counts, weight, token, target, *rows)
        for array in self.arrays:
            array[:FIRST] = 0  # else the first steps would wait for the memory
        self._written = (0, 0, 0)
        self._grown = False

    def _repack(self) -> None:
        """Everything into new arrays, twice as large as what is in use."""
        sizes = np.array([_sizes(frozen) for frozen in self._placed.values()])
        self._clear(*(2 * sizes.sum(axis=0)).tolist())
        self._grown = True
        for handle in self._placed:
            self._place(handle, *self._written)

    def _place(self, handle: int, states: int, edges: int, likely: int) -> None:
        frozen, arrays = self._placed[handle], self.arrays
        self._state_base[handle], self._edge_base[handle] = states, edges
        self._row_base[handle] = likely
        for into, array in zip(arrays[:5], frozen[:5], strict=True):
            into[states : states + len(array)] = array
        for into, array in zip(arrays[5:7], frozen[5:7], strict=True):
            into[edges : edges + len(array)] = array
        if self._mixed:
            arrays.row[states : states + frozen.states] = np.where(frozen.row < 0, -1, frozen.row + likely)
            arrays.likely[likely : likely + len(frozen.likely)] = frozen.likely
            arrays.share[likely : likely + len(frozen.share)] = frozen.share
        sizes, before = _sizes(frozen), self._written
        self._written = (
            max(states + sizes[0], before[0]),
            max(edges + sizes[1], before[1]),
            max(likely + sizes[2], before[2]),
        )


def _sizes(frozen: Frozen) -> tuple[int, int, int]:
    """Places per state, per edge and per token of rows that an automaton takes."""
    return len(frozen.first), len(frozen.token), len(frozen.likely)


def _gap(taken: list[tuple[int, int]], size: int) -> int:
    """The lowest start of `size` places that no (start, size) of `taken` covers."""
    end = 0
    for start, length in sorted(taken):
        if start - end >= size:
            break
        end = max(end, start + length)
    return end
