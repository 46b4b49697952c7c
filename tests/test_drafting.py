"""A run drafts from histories of its own and of other runs, and is the same run without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stretto.assemble import read_inputs, step_costs
from stretto.config import DataConfig, load_config
from stretto.drafting import find_earlier
from stretto.errors import StrettoError
from stretto.trainer import Trainer
from tests.test_trainer import assert_same_run, metrics, small


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Trainer(small(tmp_path_factory.mktemp("runs"), "undisturbed")).run().folder


@pytest.mark.parametrize("budget", ["none", "fixed", "aimd", "length_class", "marginal"])
def test_the_run_is_the_same_with_any_drafts_and_with_none(
    budget: str, undisturbed: Path, tmp_path: Path
) -> None:
    other = Trainer(small(tmp_path, budget, **{"draft.budget": budget})).run().folder
    assert_same_run(undisturbed, other)
    drafted = [line["spec/drafted"] for line in metrics(other)]
    assert all(drafted) == (budget != "none")


def test_history_is_warm_from_another_runs_log(undisturbed: Path, tmp_path: Path) -> None:
    cold = {"draft.sources": ["history"], "steps": 1}
    assert metrics(Trainer(small(tmp_path, "cold", **cold)).run().folder)[0]["spec/drafted"] == 0
    warm = {**cold, "history.warm_from": str(undisturbed)}
    line = metrics(Trainer(small(tmp_path, "warm", **warm)).run().folder)[0]
    assert line["spec/accepted"] > 0.5 * line["spec/drafted"] > 0  # the same prompts, weights and keys
    other = small(tmp_path, "other", **warm).model_copy(update={"data": DataConfig()})
    with pytest.raises(StrettoError, match=r"history\.warm_from: none of the 18 responses in"):
        Trainer(other, data=[{"prompt": "Ann says Bo is a knave ."}]).run()
    config = small(tmp_path, "vocabulary", **warm)
    with pytest.raises(StrettoError, match=r"history\.warm_from: .* but this model has 10 tokens"):
        find_earlier(config, replace(read_inputs(config), vocabulary=10))
    nonsense = small(tmp_path, "nonsense", **{**cold, "history.warm_from": str(tmp_path / "nothing")})
    with pytest.raises(StrettoError, match=r"history\.warm_from: .*nothing is not a run folder"):
        Trainer(nonsense).run()
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "nonsense").exists()


def test_a_resumed_run_is_warm_as_well(undisturbed: Path, tmp_path: Path) -> None:
    warm = {"draft.sources": ["history"], "history.warm_from": str(undisturbed)}
    whole = Trainer(small(tmp_path, "whole", **warm)).run().folder
    halves = Trainer(small(tmp_path, "halves", **{**warm, "steps": 1})).run().folder
    Trainer.resume(halves, {"steps": 3}).run()
    drafted = [line["spec/drafted"] for line in metrics(whole)]
    assert [line["spec/drafted"] for line in metrics(halves)] == drafted
    assert all(drafted)


def test_a_damaged_log_costs_drafts_and_nothing_else(
    undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Trainer(small(tmp_path, "damaged", steps=2, **{"checkpoint.keep": 1})).run().folder
    log = folder / "consumed/step-000001.parquet"
    content = bytearray(log.read_bytes())
    content[len(content) // 3] ^= 255
    log.write_bytes(content)
    Trainer.resume(folder, {"steps": 3}).run()
    assert "nothing is drafted from step 1" in caplog.text
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (undisturbed / "latest" / name).read_bytes() == (folder / "latest" / name).read_bytes()


def test_steps_cost_more_with_more_tokens_whatever_was_measured() -> None:
    assert step_costs([[0.001, 0.003, 0.002], [0.002, 0.003, 0.004], [0.001, 0.004, 0.008]]) == [
        1.0,
        3.0,
        4.0,
    ]
    flat = step_costs([[0.0201, 0.02, 0.0199]] * 3)
    assert flat[0] == flat[1] == 20.1 < flat[2] < 20.2


def test_steps_are_measured_where_the_budget_weighs_them(tmp_path: Path) -> None:
    changes = {"draft.step_ms": None, "sampling.max_new_tokens": 40}
    folder = Trainer(small(tmp_path, "measured", **changes)).run().folder
    measured = load_config(folder / "config.toml").draft.step_ms
    assert measured is not None
    assert 0 < measured[0] < measured[-1]
    short = Trainer(small(tmp_path, "short", **{**changes, "engine.max_model_len": 70, "steps": 1}))
    assert load_config(short.run().folder / "config.toml").draft.step_ms is not None
