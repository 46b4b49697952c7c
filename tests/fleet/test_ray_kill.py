"""A few cases of `studies/ray_kill.py`: a worker of a whole run killed at random moments; and the driver itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray")

from stretto.trainer import Trainer
from studies import ray_kill

REWARD = f"{Path(__file__).parents[1] / 'rewards.py'}:vowels"
SMALL: dict[str, Any] = {"steps": 3, "sampling.max_new_tokens": 48, "reward.functions": [REWARD]}


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with ray_kill.a_ray():
        yield


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize(("kind", "seed"), [("synchronous", 1), ("async", 2), ("histopipe", 3)])
def test_a_worker_killed_at_a_random_moment_costs_no_response(kind: str, seed: int, tmp_path: Path) -> None:
    folder, killer = ray_kill.run(ray_kill.configured(kind, tmp_path, "undisturbed", SMALL), None, 0)
    assert ray_kill.problems(folder, ray_kill.configured(kind, tmp_path, "x", SMALL)) == []
    found = ray_kill.case(kind, seed, tmp_path, (folder, killer.seconds), SMALL)
    assert found["problems"] == []


def test_a_run_whose_driver_was_killed_goes_on(tmp_path: Path) -> None:
    """With a Ray of its own, which is gone with it; the resumed one starts another."""
    keys = {**ray_kill.SETTINGS, **SMALL, "runs": str(tmp_path), "name": "run", "steps": 30}
    words = [f"--{key}={REWARD if key == 'reward.functions' else value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "stretto", "train", "demo", *words]
    command = [word.replace("=False", "=false") for word in command]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    checkpoint = tmp_path / "run" / "latest"
    with subprocess.Popen(command, env=path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        end = time.monotonic() + 180
        while not checkpoint.exists() and driver.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert checkpoint.exists()
        driver.send_signal(signal.SIGKILL)
    made = int(checkpoint.resolve().name.removeprefix("step-"))
    steps = made + 2
    result = Trainer.resume(tmp_path / "run", {"steps": steps}).run()
    assert result.steps == steps
    config = ray_kill.configured("synchronous", tmp_path, "run", {**SMALL, "steps": steps})
    assert ray_kill.problems(result.folder, config) == []
