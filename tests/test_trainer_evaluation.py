"""Evaluations of whole runs, and the checkpoint that they found best."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.errors import StrettoError
from stretto.observe.progress import SilentReporter
from stretto.run_folder import RunFolder
from stretto.trainer import Trainer
from tests.test_trainer import REWARDS, Messages, assert_same_run, metrics, small


def test_evaluation_comes_out_again(tmp_path: Path) -> None:
    changes = {"eval.enabled": True, "eval.limit": 6, "steps": 1}
    config = small(tmp_path, "evaluated", **changes)
    result = Trainer(config).run()
    assert result.before is not None
    assert result.after is not None
    for checkpoint, expected in (
        ("initial", result.before),
        ("latest", result.after),
        ("step-000001", result.after),
    ):
        found = stretto.evaluate(config, run=result.folder, checkpoint=checkpoint)
        for key in ("eval/accuracy", "eval/response_length/mean", "eval/prompts"):
            assert found[key] == expected[key], (checkpoint, key)
    with pytest.raises(StrettoError, match="step 7"):
        stretto.evaluate(config, run=result.folder, checkpoint="step-7")


class KillInEvaluation(SilentReporter):
    """Sends SIGTERM while the evaluation after step 1 is under way."""

    def __init__(self) -> None:
        self._armed = False

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._armed = metrics["step"] == 1

    def rollout(self, done: int, total: int, tokens: int) -> None:
        if self._armed and total == 5 and done:  # the held-out rows; a step has 6 responses
            self._armed = False
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_that_was_broken_off_is_made_on_resume(tmp_path: Path) -> None:
    changes = {"eval.enabled": True, "eval.limit": 5, "eval.every": 1, "steps": 2, "checkpoint.every": 10}
    whole = Trainer(small(tmp_path, "whole", **changes)).run().folder
    broken = Trainer(small(tmp_path, "broken", **changes), reporter=KillInEvaluation()).run()
    assert (broken.interrupted, broken.steps) == (True, 1)
    assert [line["step"] for line in metrics(broken.folder)] == [0]
    Trainer.resume(broken.folder).run()
    keys = ("step", "eval/accuracy", "eval/response_length/mean", "reward/mean")
    assert [[line.get(k) for k in keys] for line in metrics(broken.folder)] == [
        [line.get(k) for k in keys] for line in metrics(whole)
    ]
    assert_same_run(whole, broken.folder)


def test_a_run_goes_back_to_before_its_best_checkpoint(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 4, "eval.enabled": True, "eval.limit": 1, "eval.every": 2}
    changes["reward.functions"] = [f"{REWARDS}:later_is_better"]
    folder = Trainer(small(tmp_path, "back", **changes)).run().folder
    steps = RunFolder.open(folder).checkpoint_steps
    assert steps() == [3, 4]  # at step 3 the best was step 2, which step 4 has replaced
    Trainer.resume(folder, step=3).run()
    assert steps() == [3, 4]
    assert (folder / "best").resolve().name == "step-000004"


def test_a_new_way_to_evaluate_chooses_the_best_checkpoint_anew(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 2, "eval.enabled": True, "eval.limit": 1, "eval.every": 1}
    changes["reward.functions"] = [f"{REWARDS}:earlier_is_better"]
    folder = Trainer(small(tmp_path, "anew", **changes)).run().folder
    assert (folder / "best").resolve().name == "step-000001"
    reporter = Messages()
    Trainer.resume(folder, {"steps": 3, "eval.limit": 2}, reporter=reporter).run()
    assert (folder / "best").resolve().name == "step-000003"
    assert any("eval.limit changed: accuracies" in text for text in reporter.texts)


def test_a_run_says_before_it_begins_that_nothing_will_be_evaluated_or_trained(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"eval.enabled": True, "steps": 1, "data.task": None, "reward.functions": []}
    config = small(tmp_path, "rows", **changes)
    rows = [{"prompt": "2 + 2 ="}, {"prompt": "3 + 3 ="}]
    first, again = Messages(), Messages()
    Trainer(config, data=rows, reward=f"{REWARDS}:vowels", reporter=first).run()
    folder = tmp_path / "rows"
    result = Trainer.resume(folder, data=rows, reward=f"{REWARDS}:vowels", reporter=again).run()
    assert result.steps == 1
    not_evaluated = (
        "eval: there are no held-out rows, so nothing is evaluated; eval.path names a file of them"
    )
    longer = f"the run has made all its 1 steps; to train longer: stretto resume {folder} --steps 2"
    assert (not_evaluated in first.texts, longer in first.texts) == (True, False)
    assert (not_evaluated in again.texts, longer in again.texts) == (True, True)


def test_an_absent_tracker_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = small(tmp_path, "tracked", **{"track.trackers": ["wandb"], "model.path": "nowhere"})
    with pytest.raises(StrettoError, match="wandb is not installed"):
        Trainer(config).run()
