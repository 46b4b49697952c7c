"""Group-relative advantages: how much better a response did than the other responses to its prompt."""

from __future__ import annotations

import numpy as np

from stretto.errors import StrettoError
from stretto.records import FloatArray, IntArray


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
