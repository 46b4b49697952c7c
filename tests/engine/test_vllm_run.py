"""Training with vLLM, in the trainer's process and in workers of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm")

from stretto.config import Config, load_config
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.trainer import Trainer
from tests.fleet.test_process_run import During, processes_of_workers
from tests.test_trainer import metrics


def demo(folder: Path, name: str, **changes: Any) -> Config:
    """Three steps over four of the demo's puzzles, which come back every second step."""
    small = {
        "steps": 3,
        "threads": 1,
        "data.limit": 4,
        "schedule.prompts": 2,
        "schedule.samples": 4,
        "sampling.max_new_tokens": 120,
        "eval.enabled": False,
        "runs": str(folder),
        "name": name,
    }
    return load_config("demo", {**small, **changes})


def consumed(run: Path) -> list[list[list[int]]]:
    files = sorted((run / "consumed").glob("*.parquet"))
    return [[rollout.token_ids.tolist() for rollout in read_rollouts(file)] for file in files]


def test_it_trains_as_with_the_embedded_engine(tmp_path: Path) -> None:
    """The same puzzles, tokens and updates; drafts from the second visit on."""
    ours = Trainer(demo(tmp_path, "ours")).run().folder
    vllm = Trainer(demo(tmp_path, "vllm", **{"engine.kind": "vllm"})).run().folder
    assert consumed(vllm) == consumed(ours)
    lines = metrics(vllm)
    assert [line["off_policy/staleness_max"] for line in lines] == [0, 0, 0]
    assert all(line["off_policy/logprob_mismatch_max"] < 3e-4 for line in lines)
    assert all(line["off_policy/logprob_mismatch"] < 1e-5 for line in lines)
    assert sum(line["spec/accepted"] for line in lines) > 0
    for line, other in zip(lines, metrics(ours), strict=True):
        assert line["reward/mean"] == other["reward/mean"]
        assert line["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-4)


def test_a_run_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    """Two workers load each version from a file; one is killed and its responses go on in the other."""

    def kill_one() -> None:
        os.kill(min(processes_of_workers()), signal.SIGKILL)

    fleet = {"fleet.kind": "processes", "fleet.workers": 2, "fleet.threads": 1, "fleet.restarts": 0}
    config = demo(tmp_path, "killed", **{"engine.kind": "vllm", **fleet})
    folder = Trainer(config, reporter=During(2, kill_one)).run().folder
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["off_policy/logprob_mismatch"] < 1e-5 for line in lines)
    assert {r.worker for r in read_rollouts(folder / "consumed/step-000001.parquet")} == {0, 1}
    assert len({r.worker for r in read_rollouts(folder / "consumed/step-000003.parquet")}) == 1
    for step in (1, 2, 3):
        for rollout in read_rollouts(folder / f"consumed/step-{step:06d}.parquet"):
            assert set(rollout.versions.tolist()) == {step - 1}
    assert consumed(folder) == consumed(Trainer(demo(tmp_path, "ours")).run().folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gpu_memory_utilisation": 0.5}, r'engine\.vllm\.gpu_memory_utilisation.*"gpu_memory_utilization"'),
        ({"kv_cache_dtype": "int3"}, "cache_dtype.*int3"),
    ],
)
def test_wrong_arguments_are_said_and_leave_no_folder(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(StrettoError, match=said):
        Trainer(demo(tmp_path, "wrong", **{"engine.kind": "vllm", "engine.vllm": arguments})).run()
    assert not (tmp_path / "wrong").exists()


def test_step_times_are_measured_in_vllm(tmp_path: Path) -> None:
    config = demo(
        tmp_path,
        "measured",
        **{"engine.kind": "vllm", "draft.step_ms": None, "steps": 1, "engine.max_num_seqs": 4},
    )
    folder = Trainer(config).run().folder
    times = load_config(folder / "config.toml").draft.step_ms
    assert times is not None
    assert times == sorted(times)
