"""The figures of one optimiser step and of one evaluation, as flat dictionaries. Pure functions: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from stretto.records import FinishReason, Rollout, UpdateBatch

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
VISITS = 8  # visits that drafts are counted for one by one; the last with all after it


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where one step's time went: parts that do not overlap, and add up to the total."""

    rollout: float
    reward: float
    update: float
    sync: float
    boundary: float  # writing and evaluating at the boundary before
    total: float  # wall time from the previous update's end to this one's, writing and evaluation included


@dataclass(frozen=True, slots=True)
class Generation:
    """Counters of generation over one step's window, summed over workers.

    `busy` and `available` are slot seconds: slots prefilling or decoding, and slots that could have been. A worker's
    slots are not available while its device trains or while it is away; during weight sync they are.
    """

    busy: float = 0.0
    available: float = 0.0
    discarded_tokens: int = 0  # generated and given up
    reverified_tokens: int = 0  # generated again for a request that had them already
    drafted: int = 0
    accepted: int = 0
    decoded_tokens: int = 0  # emitted by decoding steps, accepted drafts included
    decoding_steps: int = 0  # of one request each: verifications, where drafts were checked
    reward_errors: int = 0  # responses without a usable reward: it raised, or was no finite number
    reward_timeouts: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)  # a component's own, added as they are


def step_metrics(
    batch: UpdateBatch,
    *,
    step: int,
    epoch: float,
    seconds: Seconds,
    generation: Generation,
    learner: Mapping[str, float],
) -> dict[str, float]:
    """The line of metrics.jsonl for optimiser step `step` (from 1), which trained on `batch`.

    `version` is the policy's after the update. Ratios over nothing are NaN, which a JSON writer makes null. The
    learner's own figures come last and may replace ours (it knows `policy/*` and `off_policy/*`).
    """
    staleness = batch.staleness
    useful = sum(int(r.loss_mask.sum()) for r in batch.rollouts)
    return {
        "step": step,
        "version": batch.version + 1,
        "epoch": epoch,
        **_rewards(batch.rollouts),
        "reward/errors": generation.reward_errors,
        "reward/timeouts": generation.reward_timeouts,
        "groups/zero_variance": zero_variance_share(batch.rollouts),
        **length_metrics(batch.rollouts),
        "time/rollout": seconds.rollout,
        "time/reward": seconds.reward,
        "time/update": seconds.update,
        "time/sync": seconds.sync,
        "time/boundary": seconds.boundary,
        "time/total": seconds.total,
        "throughput/useful_tokens_per_s": _ratio(useful, seconds.total - seconds.boundary),
        "rollout/bubble_ratio": bubble_ratio(generation.busy, generation.available),
        "rollout/discarded_tokens": generation.discarded_tokens,
        "rollout/reverified_tokens": generation.reverified_tokens,
        "spec/drafted": generation.drafted,
        "spec/accepted": generation.accepted,
        "spec/mean_acceptance_length": _ratio(generation.decoded_tokens, generation.decoding_steps),
        **visit_metrics(batch.rollouts),
        "off_policy/staleness_mean": _mean(staleness),
        "off_policy/staleness_max": max(staleness, default=math.nan),
        **generation.extra,
        **learner,
    }


def visit_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """How drafts did in the responses of each visit, from 1: the share of drafted nodes that was right, and the model's
    tokens per step.
    """
    visits: dict[int, tuple[int, int, int, int]] = {}
    for rollout in rollouts:
        visit = min(rollout.visit + 1, VISITS)
        drafted, accepted, tokens, steps = visits.get(visit, (0, 0, 0, 0))
        visits[visit] = (
            drafted + rollout.drafted,
            accepted + rollout.accepted,
            tokens + int(np.count_nonzero(rollout.loss_mask)),
            steps + rollout.decode_steps,
        )
    found: dict[str, float] = {}
    for visit, (drafted, accepted, tokens, steps) in sorted(visits.items()):
        found[f"spec/visit/{visit}/acceptance"] = _ratio(accepted, drafted)
        found[f"spec/visit/{visit}/mean_acceptance_length"] = _ratio(tokens, steps)
    return found


def drafting_seconds(drafter: Mapping[str, float]) -> float:
    """What drafting took of the engines' time, from a drafter's figures; none where no drafter has reported."""
    return sum(drafter.get(f"spec/{part}_seconds", 0.0) for part in ("begin", "propose", "observe", "end"))


def drafting_metrics(drafter: Mapping[str, float], worker_seconds: float) -> dict[str, float]:
    """A drafter's figures, and the share of drafting in the seconds of the engines' steps, both summed over workers."""
    return {**drafter, "spec/time_share": _ratio(drafting_seconds(drafter), worker_seconds)}


def reuse_metrics(engine: Mapping[str, float]) -> dict[str, float]:
    """What prefix reuse kept over one step's window, from the engines' counters: tokens; of the responses with an
    earlier one, the share that was kept whole, and the tokens kept of each.
    """
    tried = engine["reuse_tried"]
    return {
        "reuse/kept_tokens": engine["reuse_kept_tokens"],
        "reuse/skip_ratio": _ratio(engine["reuse_whole"], tried),
        "reuse/mean_kept": _ratio(engine["reuse_kept_tokens"], tried),
    }


def _rewards(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean and population standard deviation of the usable rewards, and the mean of each function's."""
    scored = [r for r in rollouts if r.reward_status == "ok"]
    rewards = [r.reward for r in scored]
    parts: dict[str, list[float]] = {}
    for rollout in scored:
        for name, value in rollout.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {
        "reward/mean": _mean(rewards),
        "reward/std": float(np.std(rewards)) if rewards else math.nan,
        **{f"reward/parts/{name}": _mean(values) for name, values in sorted(parts.items())},
    }


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Quantiles of the responses' tokens (environment turns included), and the share cut off by the limit."""
    lengths = np.array([r.token_ids.size for r in rollouts], dtype=np.float64)
    if not lengths.size:
        return {f"response_length/{name}": math.nan for name in ("mean", *QUANTILES, "max", "truncated")}
    truncated = [r.finish_reason == FinishReason.LENGTH for r in rollouts]
    return {
        "response_length/mean": float(lengths.mean()),
        **{f"response_length/{name}": float(np.quantile(lengths, q)) for name, q in QUANTILES.items()},
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(np.mean(truncated)),
    }


def zero_variance_share(rollouts: Iterable[Rollout]) -> float:
    """The share of groups whose usable rewards are all equal: a group-relative advantage learns nothing there."""
    groups: dict[int, set[float]] = {}
    for rollout in rollouts:
        rewards = groups.setdefault(rollout.group_id, set())
        if rollout.reward_status == "ok":
            rewards.add(rollout.reward)
    return _mean([len(rewards) <= 1 for rewards in groups.values()])


def bubble_ratio(busy: float, available: float) -> float:
    """The slot idle ratio of a window: 1 - busy / available slot seconds, both summed before they are divided."""
    return 1.0 - _ratio(busy, available)


def evaluation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What an evaluation reports: mean score per prompt with its 95 % interval, lengths, and what failed.

    Several responses to a prompt are no independent observations, so a prompt's mean score counts as one. For
    scores within 0 and 1 the interval is Wilson's: exact in form for 0 and 1, conservative in between, where the
    variance is at most p(1 - p). Otherwise it is the mean's, plus and minus 1.96 standard errors.
    A response without a usable reward is left out, and counted.
    """
    by_prompt: dict[int, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward_status == "ok":
            by_prompt.setdefault(rollout.group_id, []).append(rollout.reward)
    means = np.array([np.mean(scores) for scores in by_prompt.values()], dtype=np.float64)
    low, high = _interval(means)
    return {
        "accuracy": _mean(means),
        "accuracy/low": low,
        "accuracy/high": high,
        "prompts": len(means),
        "responses": len(rollouts),
        "reward/errors": sum(r.reward_status in ("error", "invalid") for r in rollouts),
        "reward/timeouts": sum(r.reward_status == "timeout" for r in rollouts),
        **length_metrics(rollouts),
    }


def _interval(means: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    if not means.size:
        return math.nan, math.nan
    if means.min() >= 0.0 and means.max() <= 1.0:
        return wilson_interval(float(means.sum()), means.size)
    if means.size == 1:
        return -math.inf, math.inf
    margin = NormalDist().inv_cdf(0.975) * float(means.std(ddof=1)) / math.sqrt(means.size)
    return float(means.mean()) - margin, float(means.mean()) + margin


def wilson_interval(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) for a probability, from `successes` in `trials`; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / trials
    scale = 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / scale
    margin = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, centre - margin), min(1.0, centre + margin)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else math.nan


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
