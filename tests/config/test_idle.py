"""Keys that do nothing beside another key's value: refused when set, with what they are for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from stretto.config import dump_toml, load_config, preset_names
from stretto.config.idle import RATIO, USED_WITH
from stretto.config.keys import KEYS
from stretto.errors import StrettoError

SET: dict[str, tuple[Any, dict[str, Any]]] = {
    "reuse.refresh": (0.5, {}),
    "reuse.lenience": (1.0, {"reuse.kind": "noise"}),
    "reuse.residual": (True, {}),
    "engine.vllm": ({"block_size": 16}, {}),
    "draft.nodes": (4, {}),
    "draft.aimd": ("multiplicative", {}),
    "draft.sources": (["history"], {"draft.budget": "none"}),
    "draft.noise_aware": (False, {"draft.budget": "none"}),
    "draft.max_nodes": (12, {"draft.budget": "none"}),
    "eval.every": (5, {"eval.enabled": False}),
    "eval.split": ("held_out", {"eval.enabled": False}),
    "eval.path": ("/rows.jsonl", {"eval.enabled": False}),
    "eval.limit": (7, {"eval.enabled": False}),
    "eval.samples": (3, {"eval.enabled": False}),
    "eval.temperature": (0.5, {"eval.enabled": False}),
    "fleet.restarts": (0, {}),
    "fleet.patience": (5.0, {}),
    "fleet.address": ("auto", {"fleet.kind": "processes"}),
    "fleet.gpus": (1.0, {}),
    "schedule.outlier_quantile": (0.5, {"schedule.kind": "histopipe", "schedule.outlier": "none"}),
    "schedule.outlier_factor": (2.0, {"schedule.kind": "histopipe", "schedule.outlier": "none"}),
    "schedule.outlier_share": (0.5, {"schedule.kind": "histopipe", "schedule.outlier": "none"}),
    "schedule.max_num_gen_batches": (None, {}),
    "schedule.refresh_budget": (1, {"schedule.kind": "async", "schedule.off_policy_strategy": "paced"}),
}
"""Every such key, away from its default, with what makes it idle."""


def test_every_such_key_is_tried_here() -> None:
    assert set(SET) == set(USED_WITH)
    assert [key for key, (value, _) in SET.items() if KEYS[key].default == value] == []


@pytest.mark.parametrize("key", SET)
def test_an_idle_key_is_refused_and_legal_where_it_is_used(key: str) -> None:
    value, idle = SET[key]
    with pytest.raises(StrettoError) as caught:
        load_config("demo", {**idle, key: value})
    other, values = USED_WITH[key]
    assert f"{key} = " in str(caught.value)
    assert f"does nothing with {other} = " in str(caught.value)
    load_config("demo", {**idle, other: values[0], key: value})


def test_what_a_file_meant_for_another_choice_is_left_with_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[draft]\nbudget = "fixed"\nnodes = 4\n[fleet]\nkind = "processes"\nrestarts = 0\n')
    assert load_config(path).draft.nodes == 4
    changed = load_config(path, {"draft.budget": "none", "fleet.kind": "in_process"})
    assert (changed.draft.nodes, changed.fleet.restarts) == (8, 3)
    with pytest.raises(StrettoError, match=r"draft\.nodes = 5 does nothing"):
        load_config(path, {"draft.budget": "none", "draft.nodes": 5})
    with pytest.raises(StrettoError, match=r"draft\.noise_aware = false does nothing"):
        load_config(path, {"draft.budget": "none", "draft.noise_aware": False})


@pytest.mark.parametrize("key", SET)
def test_a_runs_own_file_is_read_without_what_does_nothing(key: str, tmp_path: Path) -> None:
    value, idle = SET[key]
    other, values = USED_WITH[key]
    written = dump_toml(load_config("demo", {**idle, other: values[0], key: value}))
    used = tomllib.loads(written)
    config = load_config("demo", idle)
    section, _, name = other.partition(".")
    used[section][name] = getattr(getattr(config, section), name)
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(used))
    with pytest.raises(StrettoError, match="does nothing"):
        load_config(path)
    assert load_config(path, saved=True) == config


def test_what_a_run_did_not_use_is_there_again_when_it_is_wanted(tmp_path: Path) -> None:
    used = tomllib.loads(dump_toml(load_config("demo", {"eval.limit": 50, "eval.samples": 2})))
    used["eval"]["enabled"] = False
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(used))
    wanted = load_config(path, {"eval.enabled": True}, saved=True).eval
    assert (wanted.limit, wanted.samples) == (50, 2)


@pytest.mark.parametrize("preset", preset_names())
def test_a_written_preset_says_all_defaults_and_loads(preset: str) -> None:
    config = load_config(preset)
    assert load_config(tomllib.loads(dump_toml(config))) == config


@pytest.mark.parametrize(("kind", "knob"), [("stream", "long_workers"), ("elastic", "local_workers")])
def test_workers_set_apart_must_be_there(kind: str, knob: str) -> None:
    fleet = {"fleet.kind": "processes", "fleet.workers": 2, "schedule.kind": kind}
    load_config("demo", {**fleet, f"schedule.{knob}": 2})
    with pytest.raises(StrettoError, match=rf"schedule\.{knob} = 3, but fleet\.workers = 2; use at most 2"):
        load_config("demo", {**fleet, f"schedule.{knob}": 3})


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "synchronous"},
        {"kind": "divided"},
        {"kind": "async", "off_policy_strategy": "drop"},
        {"kind": "async", "off_policy_strategy": "paced"},
        {"kind": "sorted", "max_staleness": None},
    ],
)
def test_dropped_tokens_are_no_only_source_where_none_are_dropped(schedule: dict[str, Any]) -> None:
    how = {f"schedule.{key}": value for key, value in schedule.items()}
    with pytest.raises(StrettoError, match=r'draft\.sources = \["dropped"\] does nothing with schedule\.'):
        load_config("demo", {**how, "draft.sources": ["dropped"]})
    load_config("demo", {**how, "draft.sources": ["dropped", "prompt"]})


@pytest.mark.parametrize("kind", ["async", "sorted", "tail_batching", "stream"])
def test_dropped_tokens_may_be_the_only_source_where_some_are(kind: str) -> None:
    config = load_config("demo", {"schedule.kind": kind, "draft.sources": ["dropped"]})
    assert config.draft.sources == ["dropped"]


RECOMPUTED: tuple[dict[str, Any], ...] = (
    {},
    {"deterministic": False, "learner.old_logprobs": "recompute"},
)
ENGINES: tuple[dict[str, Any], ...] = (
    {"deterministic": False},
    {"deterministic": False, "learner.old_logprobs": "behaviour"},
)
RATIO_SET: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.3, "importance_cap": None}


@pytest.mark.parametrize("name", RATIO)
def test_a_clip_of_ratios_of_1_is_refused_and_so_is_a_cap_of_no_weights(name: str) -> None:
    set_to = {f"learner.{name}": RATIO_SET[name]}
    used, idle = (RECOMPUTED, ENGINES) if RATIO[name] else (ENGINES, RECOMPUTED)
    for how in used:
        assert getattr(load_config({}, {**how, **set_to}).learner, name) == RATIO_SET[name]
    for how in idle:
        with pytest.raises(
            StrettoError, match=rf"learner\.{name} = .* does nothing with learner\.old_logprobs = "
        ):
            load_config({}, {**how, **set_to})


@pytest.mark.parametrize("name", RATIO)
def test_a_clip_or_cap_that_a_file_meant_for_other_log_probs_is_left_with_it(
    name: str, tmp_path: Path
) -> None:
    used, idle = (True, False) if RATIO[name] else (False, True)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(load_config({}, {"deterministic": used, f"learner.{name}": RATIO_SET[name]})))
    changed = load_config(path, {"deterministic": idle})
    assert getattr(changed.learner, name) == KEYS[f"learner.{name}"].default
    text = path.read_text()
    assert f"deterministic = {str(used).lower()}" in text
    path.write_text(
        text.replace(f"deterministic = {str(used).lower()}", f"deterministic = {str(idle).lower()}")
    )
    with pytest.raises(StrettoError, match="does nothing"):
        load_config(path)
    assert load_config(path, saved=True) == changed  # a run of a version that took it
