"""Knobs of schedules and what they need elsewhere: what is refused, and what is said to use instead."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from stretto.config import ScheduleConfig, load_config
from stretto.config.checks import USED_BY, warnings
from stretto.config.schedules import Kind
from stretto.errors import StrettoError

SET: dict[str, Any] = {
    "unit": "response",
    "max_staleness": 3,
    "off_policy_strategy": "wait",
    "refresh_budget": 1,
    "running": "continue",
    "max_concurrent": 64,
    "longest_first": True,
    "load_prompts": 2,
    "post_hoc": True,
    "bands": 4,
    "tier": "linear",
    "token_cost": 0.5,
    "outlier": "none",
    "outlier_quantile": 0.5,
    "outlier_factor": 2.0,
    "outlier_share": 0.5,
    "max_prompts_ratio": 1.5,
    "max_num_return_sequences": 12,
    "concurrency": 64,
    "refill": False,
    "chunk_size": 16,
    "long_share": 0.5,
    "long_workers": 1,
    "local_workers": 0,
    "window_floor": 1.0,
}
"""Every knob that only some kinds have, away from its default."""


def refused(**keys: Any) -> str:
    with pytest.raises(StrettoError) as caught:
        load_config("demo", {key.replace("__", "."): value for key, value in keys.items()})
    return str(caught.value)


def test_every_knob_of_some_kinds_is_tried_here() -> None:
    assert set(SET) == set(USED_BY)
    defaults = ScheduleConfig()
    assert [key for key, value in SET.items() if getattr(defaults, key) == value] == []


@pytest.mark.parametrize("key", SET)
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_knob_is_legal_with_the_kinds_that_use_it_and_refused_with_the_others(kind: Kind, key: str) -> None:
    keys = {"schedule__kind": kind, f"schedule__{key}": SET[key]}
    if kind in USED_BY[key]:
        wide = {"max_staleness": 3} if key == "post_hoc" else {}  # a load is as old as it is long
        ScheduleConfig.model_validate({"kind": kind, key: SET[key], **wide})
        return
    said = refused(**keys)
    assert f"schedule.{key} = " in said
    assert f'schedule.kind = "{kind}"' in said
    assert f"it is for {', '.join(USED_BY[key])}" in said


RESPONSE: dict[str, Any] = {"schedule__kind": "async", "schedule__unit": "response"}


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        (RESPONSE, ['schedule.unit = "response"', 'learner.baseline = "batch" or "history"']),
        (
            {"schedule__kind": "sorted", "schedule__off_policy_strategy": "paced"},
            ['"paced" is for schedule.kind = "async" only', 'with "sorted" use "refresh"'],
        ),
        (
            {
                "schedule__kind": "async",
                "schedule__off_policy_strategy": "paced",
                "schedule__max_staleness": "none",
            },
            ["needs schedule.max_staleness"],
        ),
        (
            {"schedule__kind": "sorted", "schedule__post_hoc": True, "schedule__max_staleness": 2},
            ["the last of the 4 updates of a load is 3 steps behind"],
        ),
        (
            {
                "schedule__kind": "sorted",
                "schedule__post_hoc": True,
                "schedule__tokens_per_update": 100,
                "schedule__max_staleness": 9,
            },
            ["schedule.post_hoc with schedule.tokens_per_update", 'use schedule.max_staleness = "none"'],
        ),
        *(
            (
                {"schedule__kind": kind, "fleet__weights": "shared"},
                [f'fleet.weights = "shared" with schedule.kind = "{kind}"', "they overlap"],
            )
            for kind in ("async", "sorted", "histopipe", "elastic")
        ),
        (
            RESPONSE | {"learner__baseline": "batch", "schedule__drop_zero_variance": True},
            ["schedule.drop_zero_variance", 'use schedule.unit = "group"'],
        ),
        (
            {"schedule__kind": "tail_batching", "schedule__max_num_return_sequences": 7},
            ["schedule.max_num_return_sequences = 7 is less than schedule.samples = 8"],
        ),
        (
            {"learner__baseline": "history", "schedule__kind": "stream"},
            ['learner.baseline = "history" with schedule.kind = "stream"', 'use "group"'],
        ),
        (
            {"learner__baseline": "batch", "schedule__drop_zero_variance": True},
            ['learner.baseline = "batch"', "use one of the two"],
        ),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], messages: list[str]) -> None:
    said = refused(**keys)
    for message in messages:
        assert message in said


def test_what_they_ask_for_instead_is_legal() -> None:
    for baseline in ("batch", "history"):
        load_config(
            "demo", {"schedule.kind": "async", "schedule.unit": "response", "learner.baseline": baseline}
        )
    load_config("demo", {"schedule.kind": "sorted", "schedule.post_hoc": True, "schedule.max_staleness": 3})
    load_config("demo", {"schedule.samples": 1, "learner.baseline": "batch"})
    any_age = {"schedule.tokens_per_update": 100, "schedule.max_staleness": "none"}
    load_config("demo", {"schedule.kind": "sorted", "schedule.post_hoc": True, **any_age})


@pytest.mark.parametrize("kind", get_args(Kind))
def test_weights_may_be_shared_where_nothing_overlaps(kind: Kind) -> None:
    config: dict[str, Any] = {"schedule.kind": kind, "fleet.weights": "shared"}
    if kind == "sorted":
        config["schedule.max_staleness"] = 0
    if kind not in ("async", "histopipe", "elastic"):
        load_config("demo", config)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("processes", [False, True])
def test_a_run_that_will_not_be_the_same_again_is_said(kind: Kind, processes: bool) -> None:
    fleet = {"fleet.kind": "processes"} if processes else {}
    for drop in (False, True):
        keys: dict[str, Any] = {"schedule.kind": kind, "schedule.drop_zero_variance": drop, **fleet}
        said = [
            text for text in warnings(load_config("demo", keys)) if "not the same run bit for bit" in text
        ]
        kept = not drop and (kind == "synchronous" or (kind == "divided" and not processes))
        assert len(said) == (not kept)
        assert not any(
            "deterministic" in t for t in warnings(load_config("demo", keys | {"deterministic": False}))
        )
