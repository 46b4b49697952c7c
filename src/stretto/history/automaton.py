"""Suffix automata over token sequences, in flat arrays: which tokens followed a text before, and how often.

A suffix automaton (Blumer et al. 1985) has one state for each class of strings that end at the same positions. The
link of a state leads to the longest suffix of its strings that occurs in more places, so the longest match of a
growing text is kept in amortised O(1) per token. Several texts share one automaton (Blumer et al. 1987): each text
starts at the root again. n tokens make at most 2n states and 3n edges.

The automata here are *live*: they grow token by token while the responses of a group are being generated, and their
edges are linked lists. What is built from finished responses is packed into the arrays of `stretto.history.frozen`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stretto.records import IntArray
from stretto.sampling import GOLDEN_GAMMA, kernel

TokenArray = npt.NDArray[np.int32]
WeightArray = npt.NDArray[np.float32]

BUCKETS = 64  # edge lists of a root; a power of two
WIDE = 8  # edges of a list that are looked at before the hash table, where there is one
LINKS = 32  # suffixes of a live text that a new token is counted at, the longest ones
FREE_STATE, STATES, FREE_EDGE, EDGES = range(4)  # fields of Pool.top


class Pool(NamedTuple):
    """Automata that grow; states and edges are numbered over all groups, -1 is none.

    The edges of a root, which has one for every token id that was seen, are hashed into `buckets`; those of any
    other state start at `head`.
    """

    link: TokenArray  # (S,), state of the next shorter suffixes; -1 for a root
    length: TokenArray  # (S,), of the state's longest string
    head: TokenArray  # (S,), first edge
    counts: WeightArray  # (S,), occurrences, as `say` counts them; of a root: tokens of its group
    chain: TokenArray  # (S,), next state of the same group, or next free state
    token: TokenArray  # (E,)
    target: TokenArray  # (E,)
    following: TokenArray  # (E,), next edge of the same state or bucket, or next free edge
    owner: TokenArray  # (E,), the edge's state; with the next, only for builds at once: (0,) otherwise
    slots: TokenArray  # (power of two above E,), edges of lists longer than `WIDE`, hashed by state and token
    buckets: TokenArray  # (groups, power of two), first edge of a root by `token & (width - 1)`
    roots: TokenArray  # (groups,), -1 where the group is closed
    top: IntArray  # (4,): first free state, states ever used, first free edge, edges ever used


@kernel()
def find_live(pool: Pool, group: int, state: int, token: int) -> int:
    """The edge of a live `state` of `group` by `token`, or -1."""
    bucket = token & (pool.buckets.shape[1] - 1)
    edge = int(pool.buckets[group, bucket] if pool.link[state] < 0 else pool.head[state])
    steps = 0
    while edge >= 0 and pool.token[edge] != token:
        edge = int(pool.following[edge])
        steps += 1
        if steps == WIDE and len(pool.slots):
            return int(pool.slots[_slot(pool, state, token)])
    return edge


@kernel()
def _slot(pool: Pool, state: int, token: int) -> int:
    """Where the edge of `state` by `token` is in the hash table, or would be; linear probing."""
    mask = len(pool.slots) - 1
    mixed = np.uint64((state << 31) + token) * np.uint64(GOLDEN_GAMMA)
    slot = int(mixed >> np.uint64(33)) & mask
    edge = pool.slots[slot]
    while edge >= 0 and (pool.owner[edge] != state or pool.token[edge] != token):
        slot = (slot + 1) & mask
        edge = pool.slots[slot]
    return slot


@kernel()
def match_live(pool: Pool, last: int) -> int:
    """The state of the longest suffix of a text that occurred somewhere with a token after it, or the root.

    `last` is the state of the text itself. Its strings are followed by nothing where it has no edge, and then neither
    are the longer suffixes that share it.
    """
    state = last
    while pool.head[state] < 0 and pool.link[state] >= 0:
        state = pool.link[state]
    return state


@kernel()
def find_text(pool: Pool, group: int, tokens: IntArray) -> int:
    """The state of the string `tokens` (N,) in `group`, or -1."""
    state = int(pool.roots[group])
    for token in tokens:
        edge = find_live(pool, group, state, token)
        if edge < 0:
            return -1
        state = int(pool.target[edge])
    return state


@kernel()
def new_state(pool: Pool, root: int, length: int, count: float) -> int:
    state = int(pool.top[FREE_STATE])
    if state >= 0:
        pool.top[FREE_STATE] = pool.chain[state]
    else:
        state = int(pool.top[STATES])
        pool.top[STATES] += 1
    pool.link[state] = -1
    pool.length[state] = length
    pool.head[state] = -1
    pool.counts[state] = count
    if root >= 0:
        pool.chain[state] = pool.chain[root]
        pool.chain[root] = state
    else:
        pool.chain[state] = -1
    return state


@kernel()
def _hash_edges(pool: Pool, state: int, head: int, edge: int) -> None:
    """Put a new edge into the hash table if its list is wide, and the list before it if that was not yet."""
    steps, other = 0, head
    while other >= 0 and steps <= WIDE:
        other = pool.following[other]
        steps += 1
    other = head if steps == WIDE else -1
    while other >= 0:
        pool.owner[other] = state
        pool.slots[_slot(pool, state, pool.token[other])] = other
        other = pool.following[other]
    if steps >= WIDE:
        pool.owner[edge] = state
        pool.slots[_slot(pool, state, pool.token[edge])] = edge


@kernel()
def _new_edge(pool: Pool, group: int, state: int, token: int, target: int) -> None:
    edge = int(pool.top[FREE_EDGE])
    if edge >= 0:
        pool.top[FREE_EDGE] = pool.following[edge]
    else:
        edge = int(pool.top[EDGES])
        pool.top[EDGES] += 1
    bucket = token & (pool.buckets.shape[1] - 1)
    is_root = pool.link[state] < 0
    head = int(pool.buckets[group, bucket] if is_root else pool.head[state])
    pool.token[edge] = token
    pool.target[edge] = target
    pool.following[edge] = head
    if is_root:
        pool.buckets[group, bucket] = edge
    else:
        pool.head[state] = edge
    if len(pool.slots):
        _hash_edges(pool, state, head, edge)


@kernel()
def _split(pool: Pool, group: int, source: int, token: int, state: int) -> int:
    """Give the strings of `state` that end an edge of `source` or its suffixes a state of their own."""
    clone = new_state(pool, pool.roots[group], pool.length[source] + 1, pool.counts[state])
    pool.link[clone] = pool.link[state]
    pool.link[state] = clone
    edge = pool.head[state]
    while edge >= 0:
        _new_edge(pool, group, clone, pool.token[edge], pool.target[edge])
        edge = pool.following[edge]
    while source >= 0:
        edge = find_live(pool, group, source, token)
        if pool.target[edge] != state:
            break
        pool.target[edge] = clone
        source = pool.link[source]
    return clone


@kernel()
def append(pool: Pool, group: int, last: int, token: int) -> int:
    """Append one token to the text whose state is `last`; the state of the longer text."""
    edge = find_live(pool, group, last, token)
    if edge >= 0:  # another text begins with this one
        state = int(pool.target[edge])
        if pool.length[state] != pool.length[last] + 1:
            state = _split(pool, group, last, token, state)
        return state
    state = new_state(pool, pool.roots[group], pool.length[last] + 1, 0.0)
    pool.link[state] = pool.roots[group]  # not -1, which would make it a root
    source = last
    while source >= 0:
        edge = find_live(pool, group, source, token)
        if edge >= 0:
            break
        _new_edge(pool, group, source, token, state)
        source = pool.link[source]
    if source >= 0:
        suffix = pool.target[edge]
        if pool.length[suffix] != pool.length[source] + 1:
            suffix = _split(pool, group, source, token, suffix)
        pool.link[state] = suffix
    return state


@kernel()
def say(pool: Pool, group: int, last: int, tokens: IntArray) -> int:
    """Append `tokens` (N,) to the text whose state is `last`, and count what occurs in it; the state of the longer
    text. For `pool` there must be room: `LivePool.reserve`.

    A token is counted at its LINKS longest suffixes that have a state, and at the root. Few texts have more, but one
    that goes round in a loop has one for every round: counted at all of them, a token would cost ever more.
    """
    state, root = last, int(pool.roots[group])
    pool.counts[root] += len(tokens)
    for token in tokens:
        state = int(append(pool, group, state, token))
        suffix, links = state, 0
        while suffix != root and links < LINKS:
            pool.counts[suffix] += 1
            suffix = int(pool.link[suffix])
            links += 1
    return state


@kernel()
def _extend(pool: Pool, groups: IntArray, last: IntArray, counts: IntArray, tokens: IntArray) -> None:
    at = 0
    for request in range(len(groups)):
        last[request] = say(pool, groups[request], last[request], tokens[at : at + counts[request]])
        at += counts[request]


@kernel()
def _free_edges(pool: Pool, edge: int) -> None:
    while edge >= 0:
        following = pool.following[edge]
        pool.following[edge] = pool.top[FREE_EDGE]
        pool.top[FREE_EDGE] = edge
        edge = following


@kernel()
def _release(pool: Pool, group: int) -> None:
    for bucket in range(pool.buckets.shape[1]):
        _free_edges(pool, pool.buckets[group, bucket])
        pool.buckets[group, bucket] = -1
    state = pool.roots[group]
    pool.roots[group] = -1
    while state >= 0:
        following = pool.chain[state]
        _free_edges(pool, pool.head[state])
        pool.chain[state] = pool.top[FREE_STATE]
        pool.top[FREE_STATE] = state
        state = following


def allocate(states: int, edges: int, groups: int, hashed: bool = False) -> Pool:
    """An empty pool with room for so many states, edges and groups.

    `hashed`: with a hash table of the edges of wide states. It does not forget: for groups that are never closed.
    """
    i32 = np.int32
    return Pool(
        link=np.empty(states, i32),
        length=np.empty(states, i32),
        head=np.empty(states, i32),
        counts=np.empty(states, np.float32),
        chain=np.empty(states, i32),
        token=np.empty(edges, i32),
        target=np.empty(edges, i32),
        following=np.empty(edges, i32),
        owner=np.empty(edges if hashed else 0, i32),
        slots=np.full(1 << edges.bit_length() if hashed else 0, -1, i32),
        buckets=np.full((groups, BUCKETS), -1, i32),
        roots=np.full(groups, -1, i32),
        top=np.array([-1, 0, -1, 0]),
    )


class LivePool:
    """The live automata of all groups in flight, in one set of arrays that grows by doubling.

    Not thread-safe. `arrays` is replaced when it grows, in `open`, `extend` and `reserve`: read it anew after each.
    """

    def __init__(self) -> None:
        self.arrays = allocate(1024, 2048, 16)
        self._groups = 0  # open
        self._tokens = 0  # room for so many is taken up

    def open(self) -> int:
        """A new group's handle, at least 0. Its texts begin at `root(handle)`."""
        self._groups += 1
        pool = self.reserve(0)
        group = int(np.flatnonzero(pool.roots < 0)[0])
        pool.roots[group] = new_state(pool, -1, 0, 0.0)
        return group

    def root(self, group: int) -> int:
        """The state of the empty text of `group`; KeyError if the group is not open."""
        root = int(self.arrays.roots[group])
        if root < 0:
            raise KeyError(group)
        return root

    def extend(self, groups: IntArray, last: IntArray, counts: IntArray, tokens: IntArray) -> None:
        """Append `counts[r]` tokens to the text of each request r.

        `groups`, `last`, `counts` are (R,), `tokens` (counts.sum(),) request after request, all int64. `last` holds
        the states of the texts and is updated in place. KeyError if a group is not open.
        """
        total = int(counts.sum())
        if total != len(tokens):
            raise ValueError(f"counts add up to {total}, but there are {len(tokens)} tokens")
        for group in groups[self.arrays.roots[groups] < 0]:
            raise KeyError(int(group))
        _extend(self.reserve(total), groups, last, counts, tokens)

    def close(self, group: int) -> None:
        """Release the group and every state of it; KeyError if it is not open."""
        self._tokens -= int(self.arrays.counts[self.root(group)])
        self._groups -= 1
        _release(self.arrays, group)

    def metrics(self) -> dict[str, float]:
        """Groups and tokens in flight, bytes of the arrays."""
        return {
            "groups": self._groups,
            "tokens": self._tokens,
            "bytes": sum(array.nbytes for array in self.arrays),
        }

    def reserve(self, tokens: int) -> Pool:
        """Take up room for so many tokens more, which `say` must then append; the arrays, which have it.

        By the automaton's bounds on states and edges.
        """
        self._tokens += tokens
        old = self.arrays
        states, edges = 2 * self._tokens + self._groups, 3 * self._tokens
        if states <= len(old.link) and edges <= len(old.token) and self._groups <= len(old.roots):
            return old
        if 2 * edges > np.iinfo(np.int32).max:
            raise MemoryError(f"{self._tokens} tokens in flight need more than 2**31 edges")
        new = allocate(
            states=_grown(len(old.link), states),
            edges=_grown(len(old.token), edges),
            groups=_grown(len(old.roots), self._groups),
        )
        for name in Pool._fields:
            array = getattr(old, name)
            getattr(new, name)[: len(array)] = array
        self.arrays = new
        return new


def _grown(room: int, needed: int) -> int:
    return room if needed <= room else max(needed, 2 * room)
