from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cli import run as stretto
from stretto.config import dump_toml, load_config
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts, write_rollouts
from stretto.records import FinishReason, Prompt, Rollout, State
from stretto.simulate.calibrate import calibration, non_negative
from stretto.simulate.scenario import load_scenario

TRUE = {"base": 0.004, "per_token": 5e-5, "per_context": 2e-7, "per_prefill": 3e-5}


def rollout(number: int, tokens: int, prompt: int) -> Rollout:
    ids, zeros = np.zeros(tokens, np.int64), np.zeros(tokens)
    row = Prompt(number, f"{number:032x}", 0, np.zeros(prompt, np.int64), {})
    return Rollout(
        number, number, row, 0, 0, number, ids, zeros, zeros, ids, np.ones(tokens, np.bool_),
        reward=0.0, finish_reason=FinishReason.STOP, outcome=State.CONSUMED,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose times are a step model's."""
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    config = load_config("demo", {"steps": 12, "seed": 7, "schedule.prompts": 4, "schedule.samples": 2})
    (folder / "config.toml").write_text(dump_toml(config))
    random, lines = np.random.default_rng(0), []
    for step in range(1, 13):
        lengths, prompts = random.integers(5, 400, 8), random.integers(4, 60, 8)
        rollouts = [
            rollout(100 * step + i, int(n), int(p))
            for i, (n, p) in enumerate(zip(lengths, prompts, strict=True))
        ]
        write_rollouts(folder / "rollouts" / f"step-{step:06d}.parquet", rollouts, step=step)
        read = float((lengths * prompts + lengths * (lengths + 1) / 2).sum())
        work = [int(lengths.max()), int(lengths.sum()), read, int(prompts.sum())]
        lines.append(
            {
                "step": step,
                "engine/steps": work[0],
                "engine/prefill_tokens": work[3],
                "spec/drafted": 0,
                "spec/accepted": 0,
                "spec/mean_acceptance_length": 1.0,
                "time/rollout": sum(c * w for c, w in zip(TRUE.values(), work, strict=True)),
                "time/update": 0.5 + 1e-4 * float((lengths + prompts).sum()),
                "time/boundary": 0.25,
                "time/sync": 0.125,
                "time/reward": 0.0625,
            }
        )
    waits = [0.01, *11 * [0.0625]]
    spans = [
        {"ph": "X", "name": f"waiting for rewards {i}", "ts": 0.0, "dur": 1e6 * w}
        for i, w in enumerate(waits)
    ]
    (folder / "timeline.json").write_text("[\n" + "".join(json.dumps(span) + ",\n" for span in spans))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_fit_finds_the_step_model_that_made_the_run(run: Path) -> None:
    measured = calibration(run)
    assert measured["cost"] == pytest.approx(
        TRUE | {"train_base": 0.75, "train_per_token": 1e-4, "sync": 0.125, "reward": 0.0625}
    )
    assert measured["drafts"] == {"tokens_per_step": [1.0], "nodes": 0.0}
    assert measured["between_steps"] == 0.0
    assert measured["relative_error"] == pytest.approx({"rollout": 0.0, "update": 0.0}, abs=1e-9)


def test_busy_slots_tell_a_steps_price_where_long_updates_have_more_of_everything(run: Path) -> None:
    """Nearly the same mix in each update, on a machine whose speed drifts by a tenth."""
    random = np.random.default_rng(3)
    path, lines = run / "metrics.jsonl", []
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        rollouts = read_rollouts(run / "rollouts" / f"step-{line['step']:06d}.parquet")
        ends = np.array([rollout.token_ids.size for rollout in rollouts])
        ends.sort()
        running = (ends > np.arange(ends[-1])[:, None]).sum(axis=1)
        step_seconds = (0.004 + 0.001 * running) * random.lognormal(0.0, 0.1)
        lines.append(
            line
            | {
                "engine/steps": running.size,
                "engine/prefill_tokens": 0,
                "engine/decode_steps": int(running.sum()),
                "engine/busy_squares": int((running**2).sum()),
                "engine/busy_prefill_tokens": 0,
                "engine/busy_slot_seconds": float((running * step_seconds).sum()),
                "engine/worker_seconds": float(step_seconds.sum()),
                "time/rollout": float(step_seconds.sum()),
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cost = calibration(run)["cost"]
    assert cost["base"] == pytest.approx(0.004, rel=0.1)
    assert cost["per_token"] == pytest.approx(0.001, rel=0.1)
    path.write_text("".join(json.dumps(_older(line)) + "\n" for line in lines))
    assert calibration(run)["cost"]["base"] != pytest.approx(0.004, rel=0.2)


def test_two_workers_steps_cost_what_one_workers_do(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    two = [
        line | {"engine/worker_seconds": line["time/rollout"], "time/rollout": line["time/rollout"] / 2}
        for line in lines
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in two))
    assert calibration(run)["cost"]["base"] == pytest.approx(TRUE["base"])


def _older(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("engine/busy")}


def test_the_command_prints_a_scenario_that_replays_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stretto(["simulate", "--calibrate", str(run)]) == 0
    path = tmp_path / "s.toml"
    path.write_text(capsys.readouterr().out)
    scenario = load_scenario(path)
    assert (scenario.run.seed, scenario.run.steps, scenario.candidates[0].config.prompts) == (7, 12, 4)
    assert scenario.cost.base == pytest.approx(TRUE["base"], rel=1e-4)
    assert stretto(["simulate", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found["responses"] == 12 * 8


def test_what_cannot_be_calibrated_is_refused(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(StrettoError, match="3 updates; a calibration needs at least 5"):
        calibration(run)
    old: list[dict[str, Any]] = [json.loads(line) for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": line["step"]}) + "\n" for line in old))
    with pytest.raises(StrettoError, match="without engine/steps"):
        calibration(run)


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000))
def test_no_other_non_negative_coefficients_fit_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    columns, wanted = random.normal(size=(8, 3)), random.normal(size=8)
    found = non_negative(columns, wanted)
    assert (found >= 0).all()
    least = ((columns @ found - wanted) ** 2).sum()
    for _ in range(50):
        other = np.maximum(0.0, found + random.normal(scale=0.3, size=3))
        assert ((columns @ other - wanted) ** 2).sum() >= least - 1e-9
