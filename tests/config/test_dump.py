"""Configuration out: what is written reads back as it was, and what differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config import Config, difference, dump_toml, load_config
from stretto.config.checks import USED_BY
from stretto.config.idle import RATIO, USED_WITH, recomputed
from stretto.config.keys import KEYS, Key
from stretto.errors import StrettoError

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
PLAIN_VALUES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXT


def values_of(key: Key) -> st.SearchStrategy[Any]:
    """Legal values of a key, however odd."""
    if key.name == "name":
        return st.none() | st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9.+_-]*\Z")
    if key.name in ("data.path", "eval.path", "model.tokenizer", "history.warm_from"):
        return st.none() | st.just("/there/rows.jsonl")
    if key.name == "model.path":
        return st.sampled_from(["demo", "/there/model", "org/name"])
    branches = [_values_of_type(branch, key) for branch in key.branches]
    return st.one_of(*([st.none()] if key.optional else []), *branches)


def _values_of_type(annotation: Any, key: Key) -> st.SearchStrategy[Any]:
    if choices := key.choices:
        return (
            st.sampled_from(choices)
            if get_origin(annotation) is not list
            else st.lists(st.sampled_from(choices), min_size=1, unique=True)
        )
    if get_origin(annotation) is list:
        return st.lists(
            {str: TEXT, float: st.floats(-9, 9)}.get(get_args(annotation)[0], st.integers(0, 99)), max_size=3
        )
    if get_origin(annotation) is tuple:
        return st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)
    if get_origin(annotation) is dict:
        finite = PLAIN_VALUES.filter(lambda value: value is not None)
        return st.dictionaries(TEXT, finite | st.lists(finite, max_size=3), max_size=3)
    if annotation is float:
        return st.floats(0.01, 0.99)
    return {int: st.integers(2, 1000), bool: st.booleans(), str: TEXT}[annotation]


@st.composite
def configs(draw: st.DrawFn) -> Config:
    names = draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True))
    overrides = {name: draw(values_of(KEYS[name])) for name in names}
    overrides |= {"learner.old_logprobs": "auto", "engine.max_model_len": None, "fleet.weights": "auto"}
    overrides |= {"data.chat_template": None, "reward.weights": None, "schedule.max_concurrent": None}
    # These belong together.
    overrides |= {"draft.nodes": 2, "draft.max_nodes": draw(st.integers(2, 64))}
    overrides["history.alternatives"] = draw(st.integers(0, 32))
    overrides["draft.step_ms"] = draw(st.none() | st.just([0.5, 1.0, 3.0]))
    overrides |= {
        "learner.baseline": "group",
        "learner.place": "here",
        "learner.shards": 1,
        "schedule.off_policy_strategy": "refresh",
        "schedule.unit": "group",
    }
    kind = overrides.get("schedule.kind", "synchronous")
    others = [f"schedule.{key}" for key, kinds in USED_BY.items() if kind not in kinds]
    overrides = {name: value for name, value in overrides.items() if name not in others}
    for name in ("schedule.outlier_factor", "schedule.max_prompts_ratio", "fleet.patience"):
        overrides |= {name: 1.0 + overrides[name]} if name in overrides else {}
    overrides |= {"schedule.max_num_return_sequences": None, "fleet.workers": 1, "fleet.threads": None}
    overrides |= {
        name: 1 for name in ("schedule.long_workers", "schedule.local_workers") if name in overrides
    }
    how = recomputed(overrides.get("deterministic", True), overrides["learner.old_logprobs"])
    for name in [name for name, used in RATIO.items() if used != how]:
        overrides.pop(f"learner.{name}", None)
    for name, (other, values) in USED_WITH.items():
        if overrides.get(other, KEYS[other].default) not in values:
            overrides.pop(name, None)
    if overrides.get("engine.kind") == "vllm":
        for name in ("model.dtype", "reuse.kind", "reuse.refresh", "reuse.lenience", "reuse.residual"):
            overrides.pop(name, None)
    if overrides.get("draft.sources") == ["dropped"]:
        overrides["draft.sources"] = ["dropped", "history"]
    overrides["sampling.stop"] = [text for text in overrides.get("sampling.stop", ()) if text]
    if overrides.get("data.path"):
        overrides["data.task"] = overrides["data.dataset"] = None
    elif overrides.get("data.task") is not None:
        overrides["data.dataset"] = None
    return load_config({}, overrides)


@settings(max_examples=100)
@given(config=configs())
def test_a_written_configuration_reads_back_as_it_was(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(dump_toml(config), "utf-8")
    again = load_config(path)
    assert again == config
    assert difference(again, config) == []
    assert dump_toml(again) == dump_toml(config)


def test_what_is_unset_against_its_default_is_written(tmp_path: Path) -> None:
    config = load_config({}, {"learner.importance_cap": None})
    assert 'importance_cap = "none"' in dump_toml(config)


def test_a_relative_path_is_written_as_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate({"data": {"path": "rows.jsonl"}})
    assert f'path = "{tmp_path / "rows.jsonl"}"' in dump_toml(config)


def test_arguments_that_toml_cannot_hold_are_refused() -> None:
    config = Config.model_validate({"data": {"args": {"x": None}}})
    with pytest.raises(StrettoError, match=r"data\.args or reward\.args"):
        dump_toml(config)


def test_differences_are_named() -> None:
    a = load_config({}, {"steps": 4, "model.lora": {"rank": 4}})
    b = load_config({}, {"steps": 5, "model.lora": {"rank": 8}, "learner.eps": 1e-6})
    assert difference(a, b) == ["steps", "model.lora.rank", "learner.eps"]
    assert "model.lora.rank" in difference(a, load_config({}, {"steps": 4}))
