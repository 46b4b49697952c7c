"""Rollouts to packed micro-batches: tokens end to end, no padding, each group's prompt once.

Responses of one group in the same micro-batch share the rows of their prompt, so the model computes it once. A
sequence is therefore a list of rows; attention (`stretto.learn.attention`) puts the sequences together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stretto.records import FloatArray, IntArray, Rollout


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The tokens of a batch that the policy sampled itself, rollout after rollout; all arrays are (n,)."""

    rollout: IntArray  # index of the rollout in the batch
    position: IntArray  # after the prompt
    targets: IntArray  # token ids
    logprobs: FloatArray  # under the distribution that it was sampled from
    raw_logprobs: FloatArray  # temperature only
    versions: IntArray

    @classmethod
    def joined(cls, parts: Sequence[TrainedTokens]) -> TrainedTokens:
        """Those of several batches, as if of one."""
        before = np.cumsum([0, *(int(part.rollout[-1]) + 1 for part in parts[:-1])])
        names = ("position", "targets", "logprobs", "raw_logprobs", "versions")
        rollout = np.concatenate([part.rollout + n for part, n in zip(parts, before, strict=True)])
        return cls(rollout, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """T packed tokens, in which S sequences predict n trained tokens."""

    token_ids: IntArray  # (T,)
    positions: IntArray  # (T,), within the token's own sequence
    sequences: list[IntArray]  # S arrays of row indices: the prompt's, then the response's own
    rows: IntArray  # (n,), the row whose output predicts each trained token
    tokens: IntArray  # (n,), where these stand in `TrainedTokens`


def trained_tokens(rollouts: Sequence[Rollout]) -> TrainedTokens:
    """Everything with `loss_mask` True."""
    masks = [np.flatnonzero(r.loss_mask) for r in rollouts]
    none = np.zeros(0)

    def gather(columns: Sequence[IntArray | FloatArray]) -> FloatArray:
        return np.concatenate([none, *(column[mask] for column, mask in zip(columns, masks, strict=True))])

    return TrainedTokens(
        rollout=np.repeat(np.arange(len(masks)), [m.size for m in masks]),
        position=np.concatenate([none, *masks]).astype(np.int64),
        targets=gather([r.token_ids for r in rollouts]).astype(np.int64),
        logprobs=gather([r.logprobs for r in rollouts]),
        raw_logprobs=gather([r.raw_logprobs for r in rollouts]),
        versions=gather([r.versions for r in rollouts]).astype(np.int64),
    )


def pack(
    rollouts: Sequence[Rollout], chosen: Sequence[int], tokens: TrainedTokens, tokens_per_micro_batch: int
) -> list[MicroBatch]:
    """Micro-batches of at most `tokens_per_micro_batch` tokens with the `chosen` rollouts, in this order.

    A prompt and response longer than that get a micro-batch of their own. Rollouts without trained tokens are
    left out. What follows the last trained token is not needed, nor is that token itself: nothing depends on it.
    """
    starts = np.searchsorted(tokens.rollout, np.arange(len(rollouts) + 1))
    packed: list[MicroBatch] = []
    draft = _Draft()
    for i in chosen:
        trained = np.arange(starts[i], starts[i + 1])
        if trained.size == 0:
            continue
        if (
            draft.sequences
            and draft.size + draft.added_by(rollouts[i], tokens, trained) > tokens_per_micro_batch
        ):
            packed.append(draft.finish())
            draft = _Draft()
        draft.add(rollouts[i], tokens, trained)
    if draft.sequences:
        packed.append(draft.finish())
    return packed


class _Draft:
    """A micro-batch being filled."""

    def __init__(self) -> None:
        self.size = 0
        self.token_ids: list[IntArray] = []
        self.positions: list[IntArray] = []
        self.sequences: list[IntArray] = []
        self.rows: list[IntArray] = []
        self.tokens: list[IntArray] = []
        self.prompts: dict[int, IntArray] = {}  # group -> rows of its prompt

    def added_by(self, rollout: Rollout, tokens: TrainedTokens, trained: IntArray) -> int:
        prompt = 0 if rollout.group_id in self.prompts else len(rollout.prompt.token_ids)
        return prompt + int(tokens.position[trained[-1]])

    def add(self, rollout: Rollout, tokens: TrainedTokens, trained: IntArray) -> None:
        prompt_ids = rollout.prompt.token_ids
        if rollout.group_id not in self.prompts:
            self.prompts[rollout.group_id] = self._append(prompt_ids, 0)
        response_ids = rollout.token_ids[: tokens.position[trained[-1]]]
        sequence = np.concatenate(
            [self.prompts[rollout.group_id], self._append(response_ids, len(prompt_ids))]
        )
        self.sequences.append(sequence)
        self.rows.append(sequence[len(prompt_ids) - 1 + tokens.position[trained]])
        self.tokens.append(trained)

    def _append(self, token_ids: IntArray, first_position: int) -> IntArray:
        rows = np.arange(self.size, self.size + len(token_ids))
        self.token_ids.append(token_ids)
        self.positions.append(np.arange(first_position, first_position + len(token_ids)))
        self.size += len(token_ids)
        return rows

    def finish(self) -> MicroBatch:
        return MicroBatch(
            np.concatenate(self.token_ids),
            np.concatenate(self.positions),
            self.sequences,
            np.concatenate(self.rows),
            np.concatenate(self.tokens),
        )
