"""The figures of a step and of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stretto.metrics_file import plain
from stretto.observe.metrics import (
    Generation,
    Seconds,
    bubble_ratio,
    drafting_metrics,
    evaluation_metrics,
    length_metrics,
    step_metrics,
    wilson_interval,
    zero_variance_share,
)
from stretto.records import FinishReason, Prompt, RewardStatus, Rollout, UpdateBatch


def rollout(
    group: int,
    reward: float,
    length: int = 4,
    *,
    version: int = 0,
    status: RewardStatus = "ok",
    reason: FinishReason = FinishReason.STOP,
    parts: Mapping[str, float] | None = None,
    environment: int = 0,
) -> Rollout:
    """A response of `length` tokens, the last `environment` of them not the model's."""
    mask = np.ones(length, dtype=bool)
    mask[length - environment :] = False
    return Rollout(
        request_id=0,
        group_id=group,
        prompt=Prompt(group, f"uid{group}", 0, np.array([1, 2]), {}),
        sample_index=0,
        visit=0,
        key=0,
        token_ids=np.arange(length),
        logprobs=np.zeros(length),
        raw_logprobs=np.zeros(length),
        versions=np.full(length, version),
        loss_mask=mask,
        reward=reward,
        reward_status=status,
        reward_parts=parts or {},
        finish_reason=reason,
    )


def metrics_of(batch: UpdateBatch, **generation: float) -> dict[str, float]:
    return step_metrics(
        batch,
        step=batch.version + 1,
        epoch=1.5,
        seconds=Seconds(rollout=3.0, reward=0.5, update=2.0, sync=0.1, boundary=1.0, total=6.0),
        generation=Generation(**generation),  # type: ignore[arg-type]
        learner={"policy/loss": 0.25, "off_policy/ratio_mean": 1.0},
    )


def test_a_step_has_every_key_of_the_contract() -> None:
    found = metrics_of(UpdateBatch(3, [rollout(0, 1.0, version=3)]))
    keys = (
        "step version epoch reward/mean reward/std reward/errors reward/timeouts response_length/mean "
        "response_length/p50 response_length/p90 response_length/p99 response_length/max response_length/truncated "
        "time/rollout time/reward time/update time/sync time/boundary time/total throughput/useful_tokens_per_s "
        "rollout/bubble_ratio rollout/discarded_tokens rollout/reverified_tokens spec/drafted spec/accepted "
        "spec/mean_acceptance_length off_policy/staleness_mean off_policy/staleness_max groups/zero_variance"
    ).split()
    assert set(keys) <= set(found)
    assert (found["step"], found["version"], found["epoch"]) == (4, 4, 1.5)
    assert found["policy/loss"] == 0.25


def test_rewards_leave_out_what_has_none() -> None:
    batch = UpdateBatch(
        0,
        [
            rollout(0, 1.0, parts={"exact": 1.0, "format": 0.0}),
            rollout(0, 0.0, parts={"exact": 0.0}),
            rollout(0, math.nan, status="timeout"),
        ],
    )
    found = metrics_of(batch, reward_timeouts=1, reward_errors=2)
    assert (found["reward/mean"], found["reward/std"]) == (0.5, 0.5)
    assert (found["reward/parts/exact"], found["reward/parts/format"]) == (0.5, 0.0)
    assert (found["reward/timeouts"], found["reward/errors"]) == (1, 2)


def test_only_the_models_own_tokens_are_useful() -> None:
    found = metrics_of(UpdateBatch(0, [rollout(0, 1.0, 10, environment=4), rollout(0, 0.0, 9)]))
    assert found["throughput/useful_tokens_per_s"] == (6 + 9) / 5.0
    assert found["response_length/mean"] == 9.5


def test_staleness_is_of_the_oldest_trained_token() -> None:
    old = rollout(0, 1.0, version=2)
    old.versions[0] = 1
    found = metrics_of(UpdateBatch(4, [old, rollout(0, 1.0, version=4)]))
    assert (found["off_policy/staleness_mean"], found["off_policy/staleness_max"]) == (1.5, 3)


def test_ratios_over_nothing_are_no_number() -> None:
    found = metrics_of(UpdateBatch(0, []))
    for key in ("reward/mean", "rollout/bubble_ratio", "spec/mean_acceptance_length", "response_length/p99"):
        assert math.isnan(found[key])
    assert plain(found)["reward/mean"] is None


def test_idle_slots_and_acceptance_are_ratios_of_sums() -> None:
    found = metrics_of(
        UpdateBatch(0, [rollout(0, 1.0)]), busy=30.0, available=40.0, decoded_tokens=12, decoding_steps=8
    )
    assert found["rollout/bubble_ratio"] == bubble_ratio(30.0, 40.0) == 0.25
    assert found["spec/mean_acceptance_length"] == 1.5


def test_drafts_are_told_apart_by_visit() -> None:
    first, again, later = rollout(0, 1.0, 10), rollout(0, 1.0, 12, environment=4), rollout(1, 0.0, 6)
    first.decode_steps = 10
    again.visit, again.drafted, again.accepted, again.decode_steps = 1, 8, 6, 2
    later.visit, later.drafted, later.accepted, later.decode_steps = 30, 4, 1, 5
    last = replace(later, visit=7, drafted=1, accepted=1)
    unknown = replace(
        later, visit=2, drafted=0, accepted=0, decode_steps=0
    )  # simulated: tokens come in leaps
    found = {
        name.removeprefix("spec/visit/"): value
        for name, value in metrics_of(UpdateBatch(0, [first, again, later, last, unknown])).items()
        if name.startswith("spec/visit/")
    }
    for name in ("1/acceptance", "3/acceptance", "3/mean_acceptance_length"):
        assert math.isnan(found.pop(name))
    assert found == {
        "1/mean_acceptance_length": 1.0,
        "2/acceptance": 0.75,
        "2/mean_acceptance_length": 4.0,  # the model's eight tokens in two steps
        "8/acceptance": 0.4,
        "8/mean_acceptance_length": 1.2,
    }


def test_the_share_of_drafting_is_of_all_workers_time() -> None:
    parts = {"spec/begin_seconds": 1.0, "spec/propose_seconds": 2.0}
    parts |= {"spec/observe_seconds": 0.5, "spec/end_seconds": 0.5, "spec/longest_wait": 9.0}
    assert drafting_metrics(parts, 16.0) == {**parts, "spec/time_share": 0.25}
    assert math.isnan(drafting_metrics({}, 0.0)["spec/time_share"])  # no worker has reported


@given(st.lists(st.integers(0, 500), min_size=1, max_size=50))
def test_lengths_are_in_order(lengths: list[int]) -> None:
    found = length_metrics([rollout(0, 0.0, length) for length in lengths])
    p50, p90, p99, longest = (found[f"response_length/{name}"] for name in ("p50", "p90", "p99", "max"))
    assert min(lengths) <= p50 <= p90 <= p99 <= longest == max(lengths)
    assert found["response_length/mean"] == pytest.approx(np.mean(lengths))
    assert found["response_length/p50"] == np.median(lengths)


def test_truncated_is_the_share_ended_by_the_limit() -> None:
    cut = [rollout(0, 0.0, reason=FinishReason.LENGTH), *(rollout(0, 0.0) for _ in range(3))]
    assert length_metrics(cut)["response_length/truncated"] == 0.25


def test_zero_variance_counts_groups() -> None:
    rollouts = [rollout(0, 1.0), rollout(0, 1.0), rollout(1, 1.0), rollout(1, 0.0)]
    rollouts += [rollout(2, 0.5), rollout(2, math.nan, status="error")]
    assert zero_variance_share(rollouts) == 2 / 3


@pytest.mark.parametrize("trials", [1, 7, 400])
def test_wilson_agrees_with_the_score_test(trials: int) -> None:
    for successes in range(0, trials + 1, max(1, trials // 7)):
        expected = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
        assert wilson_interval(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_without_trials_knows_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_an_evaluation_counts_prompts_not_responses() -> None:
    rollouts = [rollout(group, float(group % 2)) for group in range(10) for _ in range(4)]
    found = evaluation_metrics(rollouts)
    assert (found["accuracy"], found["prompts"], found["responses"]) == (0.5, 10, 40)
    assert (found["accuracy/low"], found["accuracy/high"]) == wilson_interval(5, 10)


def test_an_evaluation_leaves_out_and_counts_what_has_no_reward() -> None:
    nothing = math.nan
    found = evaluation_metrics(
        [rollout(0, 1.0), rollout(1, nothing, status="error"), rollout(2, nothing, status="invalid"),
         rollout(3, nothing, status="timeout")]
    )  # fmt: skip
    assert (found["accuracy"], found["prompts"], found["reward/errors"], found["reward/timeouts"]) == (
        1.0,
        1,
        2,
        1,
    )


def test_scores_beyond_0_and_1_get_the_means_interval() -> None:
    found = evaluation_metrics([rollout(group, score) for group, score in enumerate((-1.0, 0.0, 1.0, 2.0))])
    margin = 1.959963984540054 * np.std([-1, 0, 1, 2], ddof=1) / 2
    assert found["accuracy/low"] == pytest.approx(0.5 - margin)
    assert found["accuracy/high"] == pytest.approx(0.5 + margin)
    assert plain(evaluation_metrics([rollout(0, 3.0)]))["accuracy/low"] is None
    assert plain(evaluation_metrics([]))["accuracy"] is None


def test_figures_for_json_are_plain_numbers() -> None:
    found = plain(
        {"a": np.float32(0.5), "b": np.int64(3), "c": np.float32("nan"), "d": math.inf, "e": "text"}
    )
    assert found == {"a": 0.5, "b": 3, "c": None, "d": None, "e": "text"}
    assert [type(value) for value in found.values()] == [float, int, type(None), type(None), str]
