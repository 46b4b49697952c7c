"""A few cases of `studies/kill.py` on a run of seconds: killed, resumed, the same bit for bit."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from studies import kill

SETTINGS = [
    "--steps", "5", "--schedule.prompts", "2", "--schedule.samples", "3", "--sampling.max_new_tokens", "24",
    "--eval.enabled", "false", "--checkpoint.every", "2", "--threads", "1",
    "--reward.functions", f"{Path(__file__).parents[1] / 'rewards.py'}:vowels",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    subprocess.run(kill.start(run, SETTINGS), check=True, stdout=subprocess.DEVNULL)
    return run


@pytest.mark.parametrize("kind", ["metrics", "weights"])
def test_killed_inside_a_write(kind: str, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill.inside_write(run, kind, SETTINGS)
    kill.resume(run, SETTINGS)
    assert kill.compare(run, undisturbed) == []


def test_killed_while_it_starts(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill.at_moment(run, 1.0, signal.SIGKILL, SETTINGS)
    kill.resume(run, SETTINGS)
    assert kill.compare(run, undisturbed) == []
