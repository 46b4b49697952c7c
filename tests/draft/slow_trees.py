"""The tree that a request may get, by reading all texts slowly: what the kernels are checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stretto.draft.calibration import BESIDE_HISTORY, Calibration, calibrated, depth_bucket
from stretto.draft.estimates import LEVELS
from stretto.draft.tree import HISTORY, PROMPT, SIBLINGS
from stretto.sampling import gumbel
from tests.draft.trees import Text

START = 99
KEY, POSITION = 12345, 7


class Sources(NamedTuple):
    """What a request may look into; texts begin with START, the prompt does not."""

    history: Sequence[Text] = ()
    probabilities: Sequence[Sequence[float]] | None = None  # of the history's tokens
    siblings: Sequence[Text] = ()  # texts besides the request's own
    prompt: Text = ()


class Node(NamedTuple):
    path: Text
    estimate: float
    raw: float
    source: int
    row: int


def noise_of(depth: int, token: int) -> float:
    """Of a token `depth` below the request's newest one."""
    return float(gumbel(np.array([KEY], np.uint64), np.array([POSITION + depth]), np.array([token]))[0])


def places(texts: Sequence[Text], string: Text) -> list[tuple[int, int]]:
    """(text, place after it) of every occurrence of `string`."""
    size = len(string)
    return [
        (t, end)
        for t, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if text[end - size : end] == string
    ]


def levels(texts: Sequence[Text], context: Text, followed: bool) -> list[Text]:
    """The longest suffix of `context` in the texts, with a token after it if `followed`; then its suffixes that occur
    in more places, LEVELS in all, the empty one left out.
    """
    found: list[Text] = []
    seen = -1
    for begin in range(len(context)):
        string = context[begin:]
        occurrences = places(texts, string)
        if followed and not found and not any(end < len(texts[t]) for t, end in occurrences):
            continue
        if len(occurrences) > max(seen, 0):
            found.append(string)
            seen = len(occurrences)
    return found[:LEVELS]


def successors(texts: Sequence[Text], string: Text) -> dict[int, list[tuple[int, int]]]:
    """Where `string` is followed by each token: (text, place of the token)."""
    after: dict[int, list[tuple[int, int]]] = {}
    for t, end in places(texts, string):
        if end < len(texts[t]):
            after.setdefault(texts[t][end], []).append((t, end))
    return after


def share(
    texts: Sequence[Text], values: Sequence[Sequence[float]] | None, string: Text, token: int, ends: bool
) -> float:
    """Of `token` after `string`. `ends`: an occurrence at the end of a text counts as one."""
    after = successors(texts, string)
    total = len(places(texts, string)) if ends else sum(map(len, after.values()))
    if values is None:
        return len(after.get(token, ())) / total
    means = {v: sum(values[t][at] for t, at in where) / len(where) for v, where in after.items()}
    mass = means[token] * len(after[token])
    mass += sum(len(after[v]) * max(0.0, min(means[token], 1.0 - means[v])) for v in after if v != token)
    return min(1.0, mass / total)


def estimates(
    texts: Sequence[Text],
    values: Sequence[Sequence[float]] | None,
    context: Text,
    live: bool,
    followed: bool = False,
) -> dict[int, float]:
    """The probability of each token that followed the longest match of `context`."""
    strings = levels(texts, context, followed)
    if not strings:
        return {}
    found: dict[int, float] = {}
    for token in successors(texts, strings[0]):
        estimate = share(texts, values, strings[-1], token, not live)
        for string in reversed(strings):
            after = successors(texts, string)
            total = sum(map(len, after.values())) if live else len(places(texts, string))
            weight = total / (total + len(after))
            estimate = weight * share(texts, values, string, token, not live) + (1.0 - weight) * estimate
        found[token] = estimate
    return found


def left_over(sources: Sources, context: Text) -> float:
    """What history leaves to tokens that it does not have after `context`."""
    string = levels(sources.history, context, False)[0]
    after = successors(sources.history, string)
    if sources.probabilities is None:
        total = len(places(sources.history, string))
        return 1.0 - total / (total + len(after))
    means = [sum(sources.probabilities[t][at] for t, at in where) / len(where) for where in after.values()]
    return max(0.0, 1.0 - sum(means))


def children(
    sources: Sources, own: Text, below: Text, calibration: Calibration, noise_aware: bool, needed: float
) -> list[Node]:
    """Of the node with path `below`, by token; estimates given the node."""
    context = own + below
    offers: list[tuple[int, float, int, int]] = []
    known = estimates(sources.history, sources.probabilities, context, False)
    offers += [(token, p, HISTORY, HISTORY) for token, p in known.items()]
    if not known or left_over(sources, context) >= needed:
        beside = BESIDE_HISTORY if known else 0
        if sources.siblings:
            texts = (*sources.siblings, own)
            found = estimates(texts, None, context, True, followed=not below)  # its own end says nothing
            offers += [(v, p, SIBLINGS, SIBLINGS + beside) for v, p in found.items()]
        if max(map(len, levels((sources.prompt,), context, False)), default=0) >= 2:
            found = estimates((sources.prompt,), None, context, True)
            offers += [(v, p, PROMPT, PROMPT + beside) for v, p in found.items()]
    best: dict[int, Node] = {}
    for token, p, source, row in offers:
        raw = p
        if noise_aware and 0.0 < p < 1.0:
            noise = noise_of(len(below), token)
            raw = math.exp(-((1.0 - p) / p) * math.exp(-noise))
        value = calibrated(calibration.table, raw, row, depth_bucket(len(below) + 1))
        if token not in best or value > best[token].estimate:
            best[token] = Node((*below, token), float(value), raw, source, row)
    return list(best.values())


def full_tree(
    sources: Sources,
    own: Text,
    depth: int,
    calibration: Calibration,
    noise_aware: bool = False,
    floor: float = 0.0,
) -> list[Node]:
    """All nodes down to `depth` with at least `floor`, their estimates multiplied along their paths."""
    found, level = [], [Node((), 1.0, 1.0, -1, -1)]
    for _ in range(depth):
        level = [
            child._replace(estimate=parent.estimate * child.estimate)
            for parent in level
            for child in children(
                sources, own, parent.path, calibration, noise_aware, floor / parent.estimate
            )
        ]
        level = [node for node in level if node.estimate >= floor]
        found += level
    return found
