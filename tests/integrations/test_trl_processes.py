"""TRL in two processes: each generates its own completions, and all are remembered by both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="make test-trl")

ROOT = Path(__file__).parents[2]


def launch(folder: Path, budget: str) -> list[dict[str, Any]]:
    """What either process generated."""
    script = str(ROOT / "tests/integrations/trl_processes.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    subprocess.run(
        [*torchrun, script, str(folder), budget],
        check=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
    )
    return [json.loads((folder / f"{budget}-{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_divide_a_prompts_completions_and_share_the_history(tmp_path: Path) -> None:
    plain, drafted = launch(tmp_path, "none"), launch(tmp_path, "fixed")
    for a, b in zip(plain, drafted, strict=True):
        assert a["completions"] == b["completions"]
        assert a["prompts"] == b["prompts"]
        assert a["weights"] == b["weights"]
    assert drafted[0]["weights"] == pytest.approx(drafted[1]["weights"], rel=1e-12)  # one model
    for first, second in zip(drafted[0]["prompts"], drafted[1]["prompts"], strict=True):
        together = [*first, *second]
        assert [together[i] == together[i - i % 4] for i in range(12)] == [True] * 12
        assert first[4] == second[0]  # the group in the middle
    rounds = zip(drafted[0]["completions"], drafted[1]["completions"], strict=True)
    assert any(
        first[4:] != second[:2] for first, second in rounds
    )  # the group's other places have other noise
    assert drafted[0]["tokens_per_step"][-1] > 1.5
