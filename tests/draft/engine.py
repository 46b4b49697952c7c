"""What tests of the drafter do in place of a run and its engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from stretto.draft import SOURCES, Drafts, Verified
from stretto.draft.budget import Budget, Fixed
from stretto.draft.drafter import GENERATION, HistoryDrafter
from stretto.history.index import HistoryIndex
from stretto.records import IntArray, Prompt, Request, Rollout, SamplingParams, prompt_uid

PROMPT = (5, 6, 7, 8, 9)


def drafter(
    *,
    budget: Budget | None = None,
    sources: Collection[str] = SOURCES,
    slots: int = 4,
    max_nodes: int = 8,
    pause: int = 1,
    generation: int = GENERATION,
) -> HistoryDrafter:
    return HistoryDrafter(
        HistoryIndex(window=2, weight="probability"),
        budget or Fixed(64),
        slots=slots,
        sources=sources,
        max_nodes=max_nodes,
        pause=pause,
        generation=generation,
    )


def request(id: int, group: int = 0, prompt: Sequence[int] = PROMPT, tokens: Sequence[int] = ()) -> Request:
    ids = np.array(prompt, np.int64), np.array(tokens, np.int64)
    return Request(id, 0, group, *ids, 0, 1000 + id, SamplingParams(max_new_tokens=64))


def rollout(
    tokens: Sequence[int], visit: int = 0, prompt: Sequence[int] = PROMPT, probability: float = 0.9
) -> Rollout:
    ids, size = np.array(prompt, np.int64), len(tokens)
    logprobs = np.log(np.full(size, probability))
    return Rollout(
        0,
        0,
        Prompt(0, prompt_uid(ids), 0, ids, {}),
        0,
        visit,
        0,
        np.array(tokens, np.int64),
        logprobs,
        logprobs,
        np.zeros(size, np.int64),
        np.ones(size, np.bool_),
    )


def propose(
    it: HistoryDrafter, slots: Sequence[int], known: Sequence[int], room: int = 8, most: int = 999
) -> Drafts:
    chosen = np.array(slots, np.int64)
    return it.propose(chosen, np.array(known, np.int64), np.full(chosen.size, room), chosen.size, most)


def verify(drafts: Drafts, futures: Sequence[Sequence[int]]) -> tuple[Verified, IntArray]:
    """What an engine finds whose plain decoding would go on with `futures`."""
    reached, accepted = np.zeros((2, drafts.token_ids.size), np.bool_)
    emitted: list[int] = []
    counts: list[int] = []
    begin = 0
    for count, future in zip(drafts.counts.tolist(), futures, strict=True):
        here, depth = -1, 0
        while depth < len(future):
            below = [n for n in range(begin, begin + count) if drafts.parents[n] == here]
            reached[below] = True
            hits = [n for n in below if drafts.token_ids[n] == future[depth]]
            assert len(hits) <= 1
            depth += 1
            if not hits:
                break
            accepted[hits] = True
            here = hits[0] - begin
        emitted += future[:depth]
        counts.append(depth)
        begin += count
    return Verified(reached, accepted, np.array(counts, np.int64)), np.array(emitted, np.int64)


def step(
    it: HistoryDrafter, slots: Sequence[int], known: Sequence[int], futures: Sequence[Sequence[int]]
) -> list[int]:
    """One engine step; how many tokens each got."""
    drafts = propose(it, slots, known)
    verified, tokens = verify(drafts, futures)
    it.observe(np.array(slots, np.int64), drafts, verified, tokens)
    return [int(count) for count in verified.emitted]


def write(it: HistoryDrafter, slot: int, tokens: Sequence[int], known: int = 0) -> None:
    """The request in `slot` says `tokens`."""
    while tokens:
        (count,) = step(it, [slot], [known], [tokens])
        tokens, known = tokens[count:], known + count


def columns(drafts: Drafts) -> list[list[float]]:
    return [getattr(drafts, name).tolist() for name in Drafts.__slots__]
