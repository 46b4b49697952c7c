"""Growing a draft's tree: best first, from what followed the same text before.

Each source keeps, for every request, the longest match of its text. A node's children are the tokens that followed
the match. How probable one is given its parent is estimated from the match and, since a long match has few
occurrences, from its suffixes: at each level the share of occurrences followed by the token, blended with the next
shorter match's by N occurrences against T different successors (escape method C of prediction by partial matching,
Moffat 1990).

Sampling is keyed, so the noise that will decide is known beforehand: a token of probability p and noise g is the
sample with probability exp(-((1 - p) / p) * exp(-g)), the other tokens' noise left out. Its mean over g is p.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stretto.draft.calibration import calibrated, depth_bucket
from stretto.history.automaton import Pool, find_live, match_live
from stretto.history.frozen import Frozen, advance, find_frozen
from stretto.records import FloatArray, IntArray
from stretto.sampling import KeyArray, kernel, noise_of

BRANCHES = 6  # children looked at per node and source, the most frequent ones
LEVELS = 3  # matches that an estimate is blended from, the longest and its suffixes
HISTORY, SIBLINGS, PROMPT = 0, 1, 2  # index into `stretto.draft.SOURCES`


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
    floor: float  # no node with a smaller estimate
    noise_aware: bool
    probabilities: bool  # history weighs occurrences by their behaviour probability


class Grown(NamedTuple):
    """Room for R trees of up to `max_nodes` nodes: columns of `stretto.draft.Drafts`, (R, max_nodes) each."""

    token_ids: IntArray
    parents: IntArray
    depth: IntArray
    estimates: FloatArray
    raw: FloatArray  # given its parent was accepted, before calibration
    sources: IntArray


def room_for(requests: int, max_nodes: int) -> Grown:
    """Empty columns."""
    shape = (requests, max_nodes)
    numbers = [np.zeros(shape, np.int64) for _ in range(4)]
    return Grown(numbers[0], numbers[1], numbers[2], np.zeros(shape), np.zeros(shape), numbers[3])


@kernel()
def _frozen_share(
    frozen: Frozen, state_base: int, edge_base: int, state: int, token: int, probabilities: bool
) -> tuple[float, float, float]:
    """(share of `token` among what followed `state`, occurrences followed by anything, different successors)."""
    begin = edge_base + frozen.first[state_base + state]
    end = edge_base + frozen.first[state_base + state + 1]
    found = find_frozen(frozen, state_base, edge_base, state, token)
    total = float(frozen.counts[state_base + state])
    if found < 0:
        return 0.0, total, float(end - begin)
    child = state_base + frozen.target[found]
    if not probabilities:
        return frozen.weight[child] / frozen.weight[state_base + state], total, float(end - begin)
    # The token's probability where it was taken is known. Where another was, what that left over bounds it.
    own = frozen.weight[child] / frozen.counts[child]
    mass = float(frozen.weight[child])
    for edge in range(begin, min(end, begin + BRANCHES)):
        if edge != found:
            other = state_base + frozen.target[edge]
            left = 1.0 - frozen.weight[other] / frozen.counts[other]
            mass += frozen.counts[other] * max(0.0, min(own, left))
    return min(1.0, mass / total), total, float(end - begin)


@kernel()
def _frozen_estimate(
    frozen: Frozen, state_base: int, edge_base: int, state: int, token: int, probabilities: bool
) -> float:
    """Probability that `token` follows the text matched by `state`, from up to LEVELS matches."""
    shares, weights = np.zeros(LEVELS), np.zeros(LEVELS)
    levels = 0
    while levels < LEVELS and state > 0:
        share, total, kinds = _frozen_share(frozen, state_base, edge_base, state, token, probabilities)
        shares[levels], weights[levels] = share, total / (total + kinds)
        state = frozen.link[state_base + state]
        levels += 1
    estimate = shares[levels - 1] if levels else 0.0
    for level in range(levels - 1, -1, -1):
        estimate = weights[level] * shares[level] + (1.0 - weights[level]) * estimate
    return estimate


@kernel()
def _live_estimate(pool: Pool, group: int, state: int, token: int) -> float:
    """The same in a live automaton."""
    shares, weights = np.zeros(LEVELS), np.zeros(LEVELS)
    levels = 0
    while levels < LEVELS and pool.link[state] >= 0:
        total, kinds, own = 0.0, 0.0, 0.0
        edge = pool.head[state]
        while edge >= 0:
            count = pool.counts[pool.target[edge]]
            total += count
            kinds += 1.0
            if pool.token[edge] == token:
                own = count
            edge = pool.following[edge]
        if total > 0.0:
            shares[levels], weights[levels] = own / total, total / (total + kinds)
            levels += 1
        state = pool.link[state]
    estimate = shares[levels - 1] if levels else 0.0
    for level in range(levels - 1, -1, -1):
        estimate = weights[level] * shares[level] + (1.0 - weights[level]) * estimate
    return estimate


@kernel()
def _advance_live(pool: Pool, group: int, state: int, length: int, token: int) -> tuple[int, int]:
    """`frozen.advance` in a live automaton that does not contain the text."""
    while True:
        edge = find_live(pool, group, state, token)
        if edge >= 0:
            return int(pool.target[edge]), length + 1
        if pool.link[state] < 0:
            return state, 0
        state = int(pool.link[state])
        length = int(pool.length[state])


@kernel()
def advance_prompts(
    pool: Pool, prompt: IntArray, state: IntArray, length: IntArray, counts: IntArray, tokens: IntArray
) -> None:
    """Take each request r over its `counts[r]` new tokens in its prompt's automaton; states and lengths in place."""
    at = 0
    for r in range(prompt.size):
        for token in tokens[at : at + counts[r]]:
            state[r], length[r] = _advance_live(pool, prompt[r], state[r], length[r], token)
        at += counts[r]


@kernel()
def _push(heap: IntArray, estimates: FloatArray, size: int, entry: int) -> None:
    """Sift `entry` up a heap of entries, largest estimate first, ties to the earlier entry."""
    at = size
    while at > 0:
        above = (at - 1) // 2
        other = heap[above]
        if estimates[other] > estimates[entry] or (estimates[other] == estimates[entry] and other < entry):
            break
        heap[at] = other
        at = above
    heap[at] = entry


@kernel()
def _pop(heap: IntArray, estimates: FloatArray, size: int) -> int:
    """Take the first of `size` entries."""
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
    return int(first)


@kernel()
def _offer(
    candidates: tuple[IntArray, FloatArray, FloatArray, IntArray],
    count: int,
    token: int,
    probability: float,
    source: int,
    how: tuple[bool, np.uint64, int, FloatArray, int],
) -> int:
    """Add a child, or raise the estimate of one that another source named; returns how many there are."""
    noise_aware, key, position, table, bucket = how
    raw = probability
    if noise_aware and 0.0 < probability < 1.0:
        noise = noise_of(key, position, token)
        raw = math.exp(-((1.0 - probability) / probability) * math.exp(-noise))
    value = calibrated(table, raw, source, bucket)
    tokens, values, raws, sources = candidates
    place = count
    for i in range(count):
        if tokens[i] == token:
            place = i
            break
    if place == count:
        if count == tokens.size:
            return count
        tokens[count], values[count] = token, -1.0
        count += 1
    if value > values[place]:
        values[place], raws[place], sources[place] = value, raw, source
    return count


@kernel()
def _children(
    frozen: Frozen,
    pool: Pool,
    matches: Matches,
    r: int,
    at: IntArray,
    rules: Rules,
    how: tuple[bool, np.uint64, int, FloatArray, int],
    candidates: tuple[IntArray, FloatArray, FloatArray, IntArray],
) -> int:
    """The children of a node of request r whose places in the sources are `at` (5,); returns how many."""
    count = 0
    state_base, edge_base = matches.state_base[r], matches.edge_base[r]
    if state_base >= 0 and at[1] > 0:
        begin = edge_base + frozen.first[state_base + at[0]]
        end = edge_base + frozen.first[state_base + at[0] + 1]
        for edge in range(begin, min(end, begin + BRANCHES)):
            token = int(frozen.token[edge])
            p = _frozen_estimate(frozen, state_base, edge_base, at[0], token, rules.probabilities)
            count = _offer(candidates, count, token, p, HISTORY, how)
    for source in (SIBLINGS, PROMPT):
        group = matches.group[r] if source == SIBLINGS else matches.prompt[r]
        state = at[2] if source == SIBLINGS else at[3]
        if group < 0 or pool.link[state] < 0 or (source == PROMPT and at[4] < 2):
            continue
        edge, looked = int(pool.head[state]), 0
        while edge >= 0 and looked < BRANCHES:
            token = int(pool.token[edge])
            p = _live_estimate(pool, group, state, token)
            count = _offer(candidates, count, token, p, source, how)
            edge, looked = int(pool.following[edge]), looked + 1
    return count


@kernel()
def _step(
    frozen: Frozen, pool: Pool, matches: Matches, r: int, above: IntArray, token: int, at: IntArray
) -> None:
    """Where a node is in each source, `at` (5,), from where its parent is."""
    if matches.state_base[r] >= 0:
        at[0], at[1] = advance(frozen, matches.state_base[r], matches.edge_base[r], above[0], above[1], token)
    if matches.group[r] >= 0:
        at[2] = _advance_live(pool, matches.group[r], above[2], 0, token)[0]
    if matches.prompt[r] >= 0:
        at[3], at[4] = _advance_live(pool, matches.prompt[r], above[3], above[4], token)


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
    grown: Grown,
) -> IntArray:
    """Trees of R requests, whose next token has `keys` and `positions` (R,) and which may be `room` (R,) deep.

    `table` is `Calibration.table`. Fills `grown`; returns the number of nodes of each, (R,). Nodes come in order of
    falling estimate, so any first part of a tree is the best tree of its size.
    """
    requests, most = keys.size, rules.max_nodes
    entries = most * 3 * BRANCHES
    counts = np.zeros(requests, np.int64)
    heap, at = np.empty(entries, np.int64), np.zeros((most + 1, 5), np.int64)
    estimates, raws = np.empty(entries), np.empty(entries)
    token_ids, parents, sources = (
        np.empty(entries, np.int64),
        np.empty(entries, np.int64),
        np.empty(entries, np.int64),
    )
    width = 3 * BRANCHES
    found = (np.empty(width, np.int64), np.empty(width), np.empty(width), np.empty(width, np.int64))
    for r in range(requests):
        size, used, nodes = 0, 0, 0
        at[most, 0], at[most, 1] = matches.state[r], matches.length[r]
        at[most, 2] = match_live(pool, matches.last[r]) if matches.group[r] >= 0 else -1
        at[most, 3], at[most, 4] = matches.prompt_state[r], matches.prompt_length[r]
        node, reach, depth = -1, 1.0, 0
        while True:
            if depth < room[r] and used + width <= entries:
                bucket = depth_bucket(depth + 1)
                how = (rules.noise_aware, keys[r], positions[r] + depth, table, bucket)
                here = at[most] if node < 0 else at[node]
                count = _children(frozen, pool, matches, r, here, rules, how, found)
                for i in range(count):
                    value = reach * found[1][i]
                    if value >= rules.floor:
                        estimates[used], raws[used] = value, found[2][i]
                        token_ids[used], parents[used], sources[used] = found[0][i], node, found[3][i]
                        _push(heap, estimates, size, used)
                        used, size = used + 1, size + 1
            if size == 0 or nodes == most:
                break
            entry = _pop(heap, estimates, size)
            size -= 1
            parent = parents[entry]
            above = at[most] if parent < 0 else at[parent]
            _step(frozen, pool, matches, r, above, token_ids[entry], at[nodes])
            node, reach = nodes, estimates[entry]
            depth = 1 if parent < 0 else grown.depth[r, parent] + 1
            grown.token_ids[r, node], grown.parents[r, node] = token_ids[entry], parent
            grown.depth[r, node], grown.estimates[r, node] = depth, reach
            grown.raw[r, node], grown.sources[r, node] = raws[entry], sources[entry]
            nodes += 1
        counts[r] = nodes
    return counts
