"""Advantages: how much better a response did than others to its prompt, or than the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.errors import StrettoError
from stretto.records import FloatArray, IntArray, Prompt


def group_advantages(rewards: FloatArray, group_ids: IntArray, *, normalize: bool) -> FloatArray:
    """Advantages (R,) of R rollouts from their `rewards` (R,) and `group_ids` (R,), any integers, in any order.

    A_i = r_i - mean(group), divided by the group's standard deviation (population, no epsilon) if `normalize`:
    GRPO (DeepSeekMath, 2402.03300, section 4.1.2). Without the division it is Dr. GRPO's (2503.20783, section 3.1),
    which does not weight nearly solved and nearly unsolved prompts up.

    A reward of nan marks an excluded rollout: it gets 0 and its group's statistics are over the others. Groups
    with one rollout left, or with equal rewards, get 0. Raises ValueError for infinite rewards, StrettoError if
    their spread is beyond float64.
    """
    if np.isinf(rewards).any():
        raise ValueError("rewards must be finite, or nan for excluded rollouts")
    advantages = np.zeros(len(rewards), dtype=np.float64)
    for group in np.unique(group_ids):
        members = np.flatnonzero((group_ids == group) & ~np.isnan(rewards))
        # Compared by equality: the rounded mean of equal rewards may differ from them by one ulp, which the
        # division would blow up to an advantage of 1.
        if members.size == 0 or (rewards[members] == rewards[members[0]]).all():
            continue
        own = rewards[members]
        with np.errstate(all="ignore"):
            centred = own - own.mean()
            spread = own.std() if normalize else 1.0
        if not (np.isfinite(centred).all() and np.isfinite(spread)):
            raise StrettoError(
                f"rewards between {own.min():g} and {own.max():g} in one group: their mean or deviation is beyond "
                "what a number can hold; scale the reward down"
            )
        advantages[members] = centred / spread
    return advantages


def batch_advantages(rewards: FloatArray, baseline: FloatArray, *, normalize: bool) -> FloatArray:
    """Advantages (R,) of R rollouts whose groups may be incomplete, from `rewards` (R,) and what is known beforehand of
    their prompts, `baseline` (R,): nan where nothing is, which is compared with the batch's mean reward.

    Without any baseline it is batch-wise normalisation: A_i = (r_i - mean(batch)) / std(batch) (REINFORCE++,
    2501.03262, section 3). With `normalize` advantages are divided by their standard deviation over the batch
    (population).

    A reward of nan marks an excluded rollout, which gets 0. Raises ValueError for infinite rewards.
    """
    if np.isinf(rewards).any():
        raise ValueError("rewards must be finite, or nan for excluded rollouts")
    advantages = np.zeros(len(rewards), dtype=np.float64)
    usable = ~np.isnan(rewards)
    own = rewards[usable]
    if not own.size:
        return advantages
    # Equal rewards have this mean exactly, not up to an ulp that the division would blow up.
    mean = own[0] if (own == own[0]).all() else own.mean()
    centred = own - np.where(np.isnan(baseline[usable]), mean, baseline[usable])
    if normalize:
        spread = 0.0 if (centred == centred[0]).all() else float(centred.std())
        centred = centred / spread if spread > 0 else centred
    advantages[usable] = centred
    return advantages


class PromptMeans:
    """Mean reward of each prompt's responses at earlier visits: a baseline that no response of this visit enters."""

    def __init__(self) -> None:
        # prompt -> newest visit, sum and number of its rewards, sum and number of those before
        self._seen: dict[str, tuple[int, float, int, float, int]] = {}

    def before(self, prompt: Prompt, visit: int) -> float:
        """The mean over visits before `visit`; nan if there were none."""
        newest, total, count, earlier, earlier_count = self._seen.get(_name(prompt), (-1, 0.0, 0, 0.0, 0))
        if newest < visit:
            earlier, earlier_count = earlier + total, earlier_count + count
        return earlier / earlier_count if earlier_count else float("nan")

    def observe(self, prompt: Prompt, visit: int, reward: float) -> None:
        """A usable reward that has been trained on."""
        newest, total, count, earlier, earlier_count = self._seen.get(_name(prompt), (-1, 0.0, 0, 0.0, 0))
        if newest < visit:
            newest, earlier, earlier_count = visit, earlier + total, earlier_count + count
            total, count = 0.0, 0
        if newest == visit:
            total, count = total + reward, count + 1
        else:
            earlier, earlier_count = earlier + reward, earlier_count + 1
        self._seen[_name(prompt)] = (newest, total, count, earlier, earlier_count)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {name: list(seen) for name, seen in self._seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._seen = {name: (v, t, n, e, m) for name, (v, t, n, e, m) in state.items()}


def _name(prompt: Prompt) -> str:
    return f"{prompt.uid}#{prompt.occurrence}"
