"""The demo learns: half of its steps raise the held-out accuracy by far more than chance could."""

from __future__ import annotations

from pathlib import Path

from stretto.config import load_config
from stretto.trainer import Trainer


def test_the_demo_solves_more_held_out_puzzles(tmp_path: Path) -> None:
    # The difference of two accuracies near 1/2 on the same 400 puzzles has a standard error below 3.5 points, and the
    # expected rise is about 20: missing 8 by chance has a probability below 1e-3.
    changes = {"runs": str(tmp_path), "name": "demo", "steps": 18, "threads": 1}
    result = Trainer(load_config("demo", changes)).run()
    assert result.before is not None
    assert result.after is not None
    assert result.before["eval/prompts"] == 400
    assert result.after["eval/accuracy"] - result.before["eval/accuracy"] >= 0.08
