"""Growing a draft's tree: best first, from what followed the same text before.

Each source keeps, for every request, the longest match of its text. A node's children are the tokens that followed
the match, with the probabilities of `stretto.draft.estimates`.

Sampling is keyed, so the noise that will decide is known beforehand: a token of probability p and noise g is the
sample with probability exp(-((1 - p) / p) * exp(-g)), the other tokens' noise left out. Its mean over g is p.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stretto.draft.calibration import BESIDE_HISTORY, calibrated, depth_bucket
from stretto.draft.contenders import (
    CONTENDERS,
    NEGLIGIBLE,
    Contenders,
    frozen_contenders,
    room_for_contenders,
)
from stretto.draft.estimates import (
    BRANCHES,
    Successors,
    advance_live,
    frozen_successors,
    live_successors,
    room_for_successors,
)
from stretto.history.automaton import Pool, match_live
from stretto.history.frozen import Frozen, advance
from stretto.records import FloatArray, IntArray
from stretto.sampling import KeyArray, exponential_of, kernel

HISTORY, SIBLINGS, PROMPT = 0, 1, 2  # index into `stretto.draft.SOURCES`
SHORTEST_PROMPT_MATCH = 2  # tokens; a single one says too little
UNKNOWN = -2  # where a node is in the live automata: not needed so far
WIDTH = CONTENDERS + 2 * BRANCHES  # children of a node at most


class Matches(NamedTuple):
    """Where R requests are in each source, (R,) each; -1 bases or groups: not there."""

    state_base: IntArray  # history: the automaton's place in the arena,
    edge_base: IntArray
    state: IntArray  # the match's state, and its length
    length: IntArray
    group: IntArray  # siblings: the group's automaton, and the state of the request's whole text in it
    last: IntArray
    prompt: IntArray  # prompt: its automaton, the match's state and length
    prompt_state: IntArray
    prompt_length: IntArray


class Rules(NamedTuple):
    """How trees are grown."""

    max_nodes: int
    noise_aware: bool
    probabilities: bool  # history weighs occurrences by their behaviour probability
    branches: bool = True  # False: the tree is a path, of the best child of each node


class Grown(NamedTuple):
    """Nodes of R trees, request after request: columns of `stretto.draft.Drafts`, (R * max_nodes,) each."""

    token_ids: IntArray
    parents: IntArray
    depth: IntArray
    estimates: FloatArray
    sources: IntArray
    raw: FloatArray  # given its parent was accepted, before calibration
    rows: IntArray  # of the calibration


class _Frontier(NamedTuple):
    """Nodes that one tree may take next: a heap of places in the other columns, largest estimate first."""

    heap: IntArray
    estimates: FloatArray
    raw: FloatArray
    token_ids: IntArray
    parents: IntArray
    sources: IntArray
    rows: IntArray
    sizes: IntArray  # (2,): of the heap, of the other columns


class _Children(NamedTuple):
    """Of one node, (WIDTH,) each: token ids, calibrated and raw estimates given the node, sources, rows."""

    token_ids: IntArray
    values: FloatArray
    raw: FloatArray
    sources: IntArray
    rows: IntArray


class _Place(NamedTuple):
    """What decides which child is drawn, and how well that is known."""

    key: np.uint64
    position: int
    bucket: int  # of the depth
    noise_aware: bool


def room_for(requests: int, max_nodes: int) -> Grown:
    """Empty columns."""
    nodes = requests * max_nodes
    ids = [np.zeros(nodes, np.int64) for _ in range(5)]
    return Grown(ids[0], ids[1], ids[2], np.zeros(nodes), ids[3], np.zeros(nodes), ids[4])


@kernel()
def _frontier(max_nodes: int) -> _Frontier:
    entries = max_nodes * WIDTH  # children of the root, and of all nodes but the last
    ids, halves = np.empty((5, entries), np.int64), np.empty((2, entries))
    sizes = np.zeros(2, np.int64)
    return _Frontier(ids[0], halves[0], halves[1], ids[1], ids[2], ids[3], ids[4], sizes)


@kernel()
def _no_children() -> _Children:
    ids, halves = np.empty((3, WIDTH), np.int64), np.empty((2, WIDTH))
    return _Children(ids[0], halves[0], halves[1], ids[1], ids[2])


@kernel(inline=True)
def _push(frontier: _Frontier, entry: int) -> None:
    """Sift `entry` up the heap; ties go to the earlier entry."""
    heap, estimates = frontier.heap, frontier.estimates
    at = frontier.sizes[0]
    while at > 0:
        above = (at - 1) // 2
        other = heap[above]
        if estimates[other] > estimates[entry] or (estimates[other] == estimates[entry] and other < entry):
            break
        heap[at] = other
        at = above
    heap[at] = entry
    frontier.sizes[0] += 1


@kernel(inline=True)
def _pop(frontier: _Frontier) -> int:
    """Take the first of the heap."""
    heap, estimates = frontier.heap, frontier.estimates
    size = frontier.sizes[0]
    first, entry = heap[0], heap[size - 1]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1:
            a, b = heap[child], heap[child + 1]
            if estimates[b] > estimates[a] or (estimates[b] == estimates[a] and b < a):
                child += 1
        other = heap[child]
        if estimates[entry] > estimates[other] or (estimates[entry] == estimates[other] and entry < other):
            break
        heap[at] = other
        at = child
    heap[at] = entry
    frontier.sizes[0] = size - 1
    return int(first)


@kernel(inline=True)
def _given_noise(probability: float, token: int, place: _Place) -> float:
    """The probability that a token of this probability is the sample, whatever noise the others have."""
    if place.noise_aware and 0.0 < probability < 1.0:
        exponential = exponential_of(place.key, place.position, token)
        return math.exp(-((1.0 - probability) / probability) * exponential)
    return probability


@kernel(inline=True)
def _offer(
    children: _Children,
    count: int,
    token: int,
    raw: float,
    source: int,
    row: int,
    place: _Place,
    table: FloatArray,
) -> int:
    """Add a child, or raise the estimate of one that another source named; returns how many there are."""
    value = calibrated(table, raw, row, place.bucket)
    at = 0
    while at < count and children.token_ids[at] != token:
        at += 1
    if at == count:
        children.token_ids[at], children.values[at] = token, -1.0
        count += 1
    if value > children.values[at]:
        children.values[at], children.raw[at] = value, raw
        children.sources[at], children.rows[at] = source, row
    return count


@kernel(inline=True)
def _history_children(
    frozen: Frozen,
    bases: tuple[int, int],
    at: IntArray,
    rules: Rules,
    place: _Place,
    table: FloatArray,
    found: Successors,
    contenders: Contenders,
    children: _Children,
) -> tuple[int, float]:
    """Children of a node where history is `at`: how many, and what they leave to other tokens; -1.0: no match."""
    if bases[0] < 0:
        return 0, -1.0
    if place.noise_aware and len(frozen.row):
        likely, left = frozen_contenders(frozen, bases, at[0], at[1], place.key, place.position, contenders)
        count = 0
        for i in range(likely):
            if contenders.estimates[i] > NEGLIGIBLE:
                token, chance = contenders.tokens[i], contenders.estimates[i]
                count = _offer(children, count, token, chance, HISTORY, HISTORY, place, table)
        return count, left if count else -1.0
    if at[0] == 0:
        return 0, -1.0
    count, left = frozen_successors(frozen, bases, at[0], rules.probabilities, found)
    for i in range(count):
        raw = _given_noise(found.estimates[i], found.tokens[i], place)
        _offer(children, i, found.tokens[i], raw, HISTORY, HISTORY, place, table)
    return count, left if count else -1.0


@kernel(inline=True)
def _live_children(
    pool: Pool,
    groups: tuple[int, int],
    at: IntArray,
    beside: int,
    place: _Place,
    table: FloatArray,
    found: Successors,
    children: _Children,
    count: int,
) -> int:
    """Add those of siblings and prompt to the `count` of history; how many there are then."""
    for source in (SIBLINGS, PROMPT):
        group = groups[0] if source == SIBLINGS else groups[1]
        state = at[2] if source == SIBLINGS else at[3]
        if group < 0 or pool.link[state] < 0 or (source == PROMPT and at[4] < SHORTEST_PROMPT_MATCH):
            continue
        for i in range(live_successors(pool, state, found)):
            token = found.tokens[i]
            raw = _given_noise(found.estimates[i], token, place)
            count = _offer(children, count, token, raw, source, source + beside, place, table)
    return count


@kernel(inline=True)
def _locate(
    pool: Pool, groups: tuple[int, int], grown: Grown, begin: int, node: int, at: IntArray, path: IntArray
) -> None:
    """Find where `node` is in the live automata, and its ancestors whose place nobody needed to know so far."""
    steps = 0
    while node >= 0 and at[node, 2] == UNKNOWN:
        path[steps] = node
        node = grown.parents[begin + node]
        steps += 1
    for i in range(steps - 1, -1, -1):
        above, here = at[node], at[path[i]]
        token = grown.token_ids[begin + path[i]]
        here[2] = -1
        if groups[0] >= 0:
            here[2] = advance_live(pool, groups[0], above[2], 0, token)[0]
        if groups[1] >= 0:
            here[3], here[4] = advance_live(pool, groups[1], above[3], above[4], token)
        node = path[i]


@kernel(inline=True)
def _best_first(children: _Children, count: int) -> None:
    """Put the best of `count` children first; ties to the earlier one."""
    best = 0
    for i in range(1, count):
        if children.values[i] > children.values[best]:
            best = i
    children.token_ids[0], children.values[0] = children.token_ids[best], children.values[best]
    children.raw[0], children.rows[0] = children.raw[best], children.rows[best]
    children.sources[0] = children.sources[best]


@kernel(inline=True)
def _consider(
    frontier: _Frontier, children: _Children, count: int, node: int, reach: float, floor: float
) -> None:
    """Put the children of `node`, which is accepted with probability `reach`, into the heap."""
    for i in range(count):
        value = reach * children.values[i]
        if value >= floor:
            entry = frontier.sizes[1]
            frontier.estimates[entry], frontier.raw[entry] = value, children.raw[i]
            frontier.token_ids[entry], frontier.parents[entry] = children.token_ids[i], node
            frontier.sources[entry], frontier.rows[entry] = children.sources[i], children.rows[i]
            _push(frontier, entry)
            frontier.sizes[1] = entry + 1


@kernel(inline=True)
def _take(frontier: _Frontier, grown: Grown, begin: int, node: int) -> None:
    """The best of the frontier becomes node number `node` of the tree whose nodes begin at `begin`."""
    entry, to = _pop(frontier), begin + node
    parent = frontier.parents[entry]
    grown.token_ids[to], grown.parents[to] = frontier.token_ids[entry], parent
    grown.depth[to] = 1 if parent < 0 else grown.depth[begin + parent] + 1
    grown.estimates[to], grown.sources[to] = frontier.estimates[entry], frontier.sources[entry]
    grown.raw[to], grown.rows[to] = frontier.raw[entry], frontier.rows[entry]


@kernel()
def grow(
    frozen: Frozen,
    pool: Pool,
    matches: Matches,
    keys: KeyArray,
    positions: IntArray,
    room: IntArray,
    table: FloatArray,
    rules: Rules,
    floor: float,
    grown: Grown,
) -> IntArray:
    """Trees of R requests, whose next token has `keys` and `positions` (R,) and which may be `room` (R,) deep.

    `table` is `Calibration.table`; no node's estimate is below `floor`. Fills `grown` from its start; returns the
    number of nodes of each request, (R,). They come in order of falling estimate, so any first part of a tree is the
    best tree of its size.
    """
    most, frontier, children = rules.max_nodes, _frontier(rules.max_nodes), _no_children()
    found, contenders = room_for_successors(), room_for_contenders()
    at = np.zeros((most + 1, 5), np.int64)  # of each node; the last, number -1 too, is the tree's root
    path, counts = np.empty(most, np.int64), np.zeros(keys.size, np.int64)
    begin = 0
    for r in range(keys.size):
        bases, groups = (matches.state_base[r], matches.edge_base[r]), (matches.group[r], matches.prompt[r])
        frontier.sizes[:] = 0
        at[most, 0], at[most, 1] = matches.state[r], matches.length[r]
        at[most, 2] = match_live(pool, matches.last[r]) if groups[0] >= 0 else -1
        at[most, 3], at[most, 4] = matches.prompt_state[r], matches.prompt_length[r]
        node, depth, reach = -1, 0, 1.0
        while True:
            if depth < room[r] and node < most - 1:
                place = _Place(keys[r], positions[r] + depth, depth_bucket(depth + 1), rules.noise_aware)
                here = at[node]
                count, left = _history_children(
                    frozen, bases, here, rules, place, table, found, contenders, children
                )
                if left < 0.0 or left * reach >= floor:  # what history leaves to others is worth asking for
                    _locate(pool, groups, grown, begin, node, at, path)
                    beside = BESIDE_HISTORY if count and here[0] else 0
                    count = _live_children(pool, groups, here, beside, place, table, found, children, count)
                if not rules.branches and count > 1:
                    _best_first(children, count)
                    count = 1
                _consider(frontier, children, count, node, reach, floor)
            if frontier.sizes[0] == 0 or node == most - 1:
                break
            node += 1
            _take(frontier, grown, begin, node)
            above, token = at[grown.parents[begin + node]], grown.token_ids[begin + node]
            depth, reach = grown.depth[begin + node], grown.estimates[begin + node]
            at[node, 2] = UNKNOWN
            if bases[0] >= 0:
                at[node, 0], at[node, 1] = advance(frozen, *bases, above[0], above[1], token)
        counts[r] = node + 1
        begin += node + 1
    return counts
