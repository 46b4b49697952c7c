"""Prefix reuse in the embedded engine: an earlier visit's response goes through the model in one pass and is kept as
far as the rule of `stretto.history.prefix` holds; from the first rejection on, plain sampling.

Its tokens are a path behind the newest token, like a draft. A draft's node is accepted where plain sampling draws it;
here the rule decides, and what it keeps is emitted. Behaviour log-probs are always those under the present weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stretto import sampling
from stretto.draft import Drafts, Verified, no_drafts
from stretto.engine.slots import Slots
from stretto.history.prefix import keeps, residual
from stretto.records import BoolArray, FloatArray, IntArray, Request, Reuse
from stretto.sampling import Sampled, SamplingColumns

_BLOCK = 1 << 23  # probabilities held at a time


@dataclass(slots=True)
class Ruling:
    """What is emitted instead of what plain sampling would draw, by row of logits (T,); and of each request (R,)."""

    token_ids: IntArray  # (T,), -1: nothing
    logprobs: FloatArray  # (T,)
    raw_logprobs: FloatArray  # (T,)
    tried: IntArray  # (R,) tokens that were tried,
    kept: IntArray  # (R,) how many of them, from the first on, are kept,
    left: IntArray  # (R,) and how many are still to be tried

    def apply(self, drawn: Sampled, rows: IntArray) -> None:
        """Replace what was drawn from these rows (A,)."""
        ruled = np.flatnonzero(self.token_ids[rows] >= 0)
        for name in ("token_ids", "logprobs", "raw_logprobs"):
            getattr(drawn, name)[ruled] = getattr(self, name)[rows[ruled]]

    def others(self, drafts: Drafts, verified: Verified) -> tuple[Drafts, Verified]:
        """Without the paths that were tried: the drafter's own trees."""
        own = np.repeat(self.tried == 0, drafts.counts)
        return drafts.select(own), Verified(verified.reached[own], verified.accepted[own], verified.emitted)


class PrefixReuse:
    """The requests in an engine's slots whose earlier responses have been kept so far."""

    def __init__(self) -> None:
        self._held: dict[int, Reuse] = {}  # by slot

    def begin(self, slot: int, request: Request) -> None:
        """The slot has a new request, perhaps one whose first tokens were kept before."""
        if request.reuse is not None and request.reuse.token_ids.size > request.token_ids.size:
            self._held[slot] = request.reuse

    def end(self, slot: int) -> None:
        """The slot is free again."""
        self._held.pop(slot, None)

    def held(self, slots: IntArray) -> BoolArray:
        """Which of `slots` (R,) have tokens to try."""
        if not self._held:
            return np.zeros(slots.size, np.bool_)
        return np.array([slot in self._held for slot in slots.tolist()], np.bool_)

    def paths(self, slots: IntArray, generated: IntArray, room: IntArray, most: int) -> Drafts:
        """What to try next behind `slots` (R,), which have `generated` (R,) tokens: up to `room` (R,) deep and `most`
        in all.

        A response's last token is tried without being computed, so it is not in a path.
        """
        drafts, paths = no_drafts(slots.size), []
        for place, reuse in self._of(slots):
            rest = reuse.token_ids[int(generated[place]) : -1]
            paths.append(rest[: max(0, min(int(room[place]), most))])
            drafts.counts[place] = paths[-1].size
            most -= paths[-1].size
        if paths:
            drafts.token_ids = np.concatenate(paths)
            begins = np.repeat(np.cumsum(drafts.counts) - drafts.counts, drafts.counts)
            drafts.depth = np.arange(begins.size) - begins + 1
            drafts.parents = drafts.depth - 2
            drafts.estimates = np.ones(begins.size)
            drafts.sources = np.zeros(begins.size, np.int8)
        return drafts

    def rule(self, columns: Slots, slots: IntArray, counts: IntArray, logits: torch.Tensor) -> Ruling | None:
        """Decide on the paths of `counts` (R,) nodes behind `slots` (R,). None where nothing is tried.

        `logits` (T, V) are those of each one's newest token with its nodes behind.
        """
        ruling: Ruling | None = None
        begin = np.cumsum(counts + 1) - counts - 1
        for place, reuse in self._of(slots):
            if ruling is None:
                ruling = _nothing(len(logits), slots.size)
            slot = int(slots[place])
            said = int(columns.length[slot] - columns.prompt_length[slot])
            tried = min(int(counts[place]) + 1, reuse.token_ids.size - said)
            rows = slice(int(begin[place]), int(begin[place]) + tried)
            how = columns.sampling[np.full(tried, slot)]
            kept = _keep(ruling, rows, logits[rows], how, reuse, said)
            if kept < tried and reuse.residual:
                row = rows.start + kept
                _draw(
                    ruling,
                    row,
                    logits[row : row + 1],
                    how[np.array([kept])],
                    reuse,
                    said + kept,
                    columns.key[slot],
                )
            ruling.tried[place], ruling.kept[place] = tried, kept
            ruling.left[place] = reuse.token_ids.size - said - tried
        return ruling

    def learn(self, slots: IntArray, ruling: Ruling, emitted: IntArray, ended: BoolArray) -> dict[str, int]:
        """`slots` (R,) emitted `emitted` (R,) tokens and those that `ended` (R,) have ended; what to count.

        `reuse_kept_tokens`; of the responses whose trial has come to its end, `reuse_tried`, those that had nothing
        rejected: `reuse_whole`.
        """
        found = dict.fromkeys(("reuse_kept_tokens", "reuse_tried", "reuse_whole"), 0)
        for place, _ in list(self._of(slots)):
            kept, said = int(ruling.kept[place]), int(emitted[place])
            rejected = said > kept and kept < ruling.tried[place]
            found["reuse_kept_tokens"] += min(kept, said)
            if rejected or ended[place] or not ruling.left[place]:
                found["reuse_tried"] += 1
                found["reuse_whole"] += not rejected
                self.end(int(slots[place]))
        return found

    def _of(self, slots: IntArray) -> Iterator[tuple[int, Reuse]]:
        """Places in `slots` (R,), with what is tried there."""
        if self._held:
            for place, slot in enumerate(slots.tolist()):
                if slot in self._held:
                    yield place, self._held[slot]


def _nothing(rows: int, requests: int) -> Ruling:
    counts = np.zeros((3, requests), np.int64)
    return Ruling(np.full(rows, -1), np.zeros(rows), np.zeros(rows), counts[0], counts[1], counts[2])


def _keep(
    ruling: Ruling, rows: slice, logits: torch.Tensor, how: SamplingColumns, reuse: Reuse, said: int
) -> int:
    """Enter the kept ones of the tokens that `rows` of `logits` (T, V) decide, the `said`-th and those behind it."""
    places = said + np.arange(len(logits))
    token_ids = reuse.token_ids[places]
    logprobs, raw_logprobs = np.empty((2, places.size))
    block = max(1, _BLOCK // logits.shape[1])
    for start in range(0, places.size, block):
        part = slice(start, start + block)
        processed, raw = log_probabilities(logits[part], how[np.arange(places.size)[part]])
        logprobs[part], raw_logprobs[part] = (
            np.take_along_axis(table, token_ids[part, None], axis=1)[:, 0] for table in (processed, raw)
        )
    keep = keeps(reuse.key, places, logprobs, reuse.logprobs[places], reuse.lenience)
    kept = int(np.argmin(keep)) if not keep.all() else keep.size
    to = slice(rows.start, rows.start + kept)
    ruling.token_ids[to] = token_ids[:kept]
    ruling.logprobs[to], ruling.raw_logprobs[to] = logprobs[:kept], raw_logprobs[:kept]
    return kept


def _draw(
    ruling: Ruling,
    row: int,
    logits: torch.Tensor,
    how: SamplingColumns,
    reuse: Reuse,
    place: int,
    key: np.uint64,
) -> None:
    """Enter for `row`, whose `logits` (1, V) have rejected the token at `place`, a draw from the residual."""
    processed, raw = log_probabilities(logits, how)
    token, then = int(reuse.token_ids[place]), float(reuse.logprobs[place])
    others = reuse.top[place : place + 1] if reuse.top is not None else None
    weights = residual(np.exp(processed[0]), token, then, others, reuse.lenience)
    with np.errstate(divide="ignore"):
        scores = np.log(weights)[None]
    plain = SamplingColumns(np.ones(1), np.zeros(1, np.int64), np.ones(1), np.zeros(1))
    drawn = int(sampling.sample(scores, np.array([key]), np.array([place]), plain).token_ids[0])
    ruling.token_ids[row] = drawn
    ruling.logprobs[row], ruling.raw_logprobs[row] = processed[0, drawn], raw[0, drawn]


def log_probabilities(logits: torch.Tensor, how: SamplingColumns) -> tuple[FloatArray, FloatArray]:
    """Of all tokens, processed and with the temperature only, (R, V) float64 each; see `stretto.sampling.Sampled`."""
    scores = logits.double().cpu().numpy()
    greedy = how.temperature == 0
    relative = (scores - scores.max(axis=1, keepdims=True)) / np.where(greedy, 1.0, how.temperature)[:, None]
    weights = np.exp(relative)
    total = weights.sum(axis=1, keepdims=True)
    kept = total.copy()
    cut = np.flatnonzero((how.top_k > 0) | (how.top_p < 1.0) | (how.min_p > 0.0))
    if cut.size:
        weights[cut], kept[cut, 0] = sampling.truncate(weights[cut], how[cut])
    processed = np.where(weights > 0, relative - np.log(kept), -np.inf)
    point = np.arange(scores.shape[1]) == scores.argmax(axis=1)[:, None]
    processed[greedy] = np.where(point[greedy], 0.0, -np.inf)
    return processed, relative - np.log(total)
