"""What the schedules say of themselves: reasons for discards, sizes of updates, how long a row waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from stretto.config import ScheduleConfig
from stretto.records import Rollout
from stretto.schedule import ON_POLICY, ledger_options

QUEUEING = ("synchronous",)
"""Kinds that hand workers more than they have slots for."""


def reasons(config: ScheduleConfig) -> set[str]:
    """For which reasons requests may be discarded."""
    declared = set[str]()
    if config.drop_zero_variance:
        declared.add("zero_variance")
    if config.off_policy_strategy == "drop" and config.kind not in ON_POLICY:
        declared.add("stale")
    if config.kind == "tail_batching":
        declared.add("overlaunch")
    return declared


def on_policy(config: ScheduleConfig) -> bool:
    """Whether all staleness is 0."""
    paced = config.off_policy_strategy == "paced"
    return config.kind in ON_POLICY or (config.max_staleness == 0 and not paced)


def check_size(config: ScheduleConfig, update: Sequence[Rollout], alive: int) -> None:
    """An update, all its parts together, is as large as stated; `alive` requests are left."""
    groups = Counter(rollout.group_id for rollout in update)
    assert update, "an update takes something"
    if config.unit == "group":
        wrong = {group: count for group, count in groups.items() if count != config.samples}
        assert not wrong, f"groups of other sizes than {config.samples}: {wrong}"
    if config.drop_zero_variance:
        rewards: dict[int, set[float]] = {group: set() for group in groups}
        for rollout in update:
            if rollout.reward == rollout.reward:
                rewards[rollout.group_id].add(rollout.reward)
        assert min(map(len, rewards.values())) > 1, f"groups of equal rewards: {rewards}"
    if config.tokens_per_update is not None:
        _check_tokens(config, update, alive)
        return
    found = len(groups) if config.unit == "group" else len(update)
    size = config.prompts if config.unit == "group" else config.prompts * config.samples
    if config.kind == "histopipe":
        return
    rest = config.kind == "sorted" and alive == 0  # the last harvest of a load takes what is left
    assert found == size or (rest and found < size), f"an update of {found}, not {size}"


def _check_tokens(config: ScheduleConfig, update: Sequence[Rollout], alive: int) -> None:
    """Enough tokens, and too few without the largest unit (or, by whole loads, without the last `prompts`)."""
    if config.kind == "histopipe":
        return  # as many groups as have so many tokens on average
    assert config.tokens_per_update is not None
    units = Counter[int]()
    for rollout in update:
        units[rollout.group_id if config.unit == "group" else rollout.request_id] += rollout.token_ids.size
    total = units.total()
    rest = config.kind == "sorted" and alive == 0
    assert total >= config.tokens_per_update or rest, f"an update of {total} tokens"
    if config.kind == "stream":
        return  # beyond them it waits for what has been refreshed too often
    whole = config.kind in ("synchronous", "divided", "tail_batching")  # they go on by `prompts`
    last = config.prompts if config.unit == "group" else config.prompts * config.samples
    least = sum(sorted(units.values())[:-last]) if whole else total - max(units.values())
    assert least < config.tokens_per_update, f"an update of {total} tokens, of which {least} were enough"


def updates_within(config: ScheduleConfig, alive: int) -> int | None:
    """How many updates after its admission a row is trained on at the latest, 0: by the next; None: not bounded.

    `alive`: requests that were at once, at most.
    """
    if config.kind in ("synchronous", "divided"):
        return 0
    if config.tokens_per_update is not None:
        return None
    if config.kind == "stream":
        return 0
    if config.kind == "sorted":
        # All of a load, before the next; which is let in during the last update of the one before, if that may be.
        return config.load_prompts - on_policy(config)
    if config.kind == "tail_batching":
        launched = ceil(config.prompts * config.max_prompts_ratio - 1e-9)
        rounds = ceil(config.prompts / max(1, launched - config.prompts))  # until the queue makes a long one
        return 2 * rounds + 1
    if config.max_staleness is None or config.off_policy_strategy == "paced":
        return None
    # Each time it is begun it is taken before it gets too old, or refreshed, which happens so often to each response.
    refreshes = ledger_options(config)["refresh_budget"] * (config.samples if config.unit == "group" else 1)
    within = (config.max_staleness + 1) * (2 + refreshes)
    if config.kind == "concurrency":  # what is in flight, or waits for its rewards, may be many batches
        within += ceil(alive / (config.prompts * config.samples))
    return within
