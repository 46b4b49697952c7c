"""Whole runs with engines in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.checkpoints import read_checkpoint
from stretto.config import Config, load_config
from stretto.draft.calibration import TESTED
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.learn.learner import Learner
from stretto.observe.progress import SilentReporter
from stretto.records import UpdateBatch, Updated
from stretto.trainer import Trainer
from tests.test_trainer import Messages, assert_same_run, metrics, small

PROCESSES = {"fleet.kind": "processes", "fleet.workers": 2, "fleet.threads": 1, "fleet.restarts": 0}


def in_processes(folder: Path, name: str, **changes: Any) -> Config:
    return small(folder, name, **PROCESSES, **changes)


def processes_of_workers() -> list[int]:
    """Of this process's fleet."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [
        int(pid)
        for pid, parent, *args in lines
        if int(parent) == os.getpid() and args and "stretto.fleet.serve" in args[0]
    ]


class During(SilentReporter):
    """Does something once, while step `step` is generated."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._step, self._act, self._done, self._made = step, act, False, 0

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._made = int(metrics["step"])

    def rollout(self, done: int, total: int, tokens: int) -> None:
        if self._made == self._step - 1 and tokens and not self._done:
            self._done = True
            self._act()


def test_interrupted_and_resumed_it_is_the_run_that_was_not_bit_for_bit(tmp_path: Path) -> None:
    whole = Trainer(in_processes(tmp_path, "whole")).run().folder
    assert not (whole / "weights").exists()
    assert processes_of_workers() == []
    lines = metrics(whole)
    assert all(line["off_policy/staleness_max"] == 0 for line in lines)
    assert all(line["off_policy/logprob_mismatch"] < 1e-4 for line in lines)
    assert sum(line["spec/accepted"] for line in lines) > 0
    assert {r.worker for r in read_rollouts(whole / "consumed/step-000001.parquet")} == {0, 1}
    reporter = During(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = Trainer(in_processes(tmp_path, "stopped"), reporter=reporter).run()
    assert (result.interrupted, result.steps) == (True, 1)
    Trainer.resume(result.folder).run()
    assert_same_run(whole, result.folder)


def test_a_run_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    def kill_one() -> None:
        os.kill(min(processes_of_workers()), signal.SIGKILL)

    folder = Trainer(in_processes(tmp_path, "killed"), reporter=During(2, kill_one)).run().folder
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3]
    assert all(-0.5 < line["rollout/bubble_ratio"] < 1 for line in metrics(folder))
    last = read_rollouts(folder / "consumed/step-000003.parquet")
    assert (len(last), len({r.worker for r in last})) == (6, 1)
    for step in (1, 2, 3):
        for rollout in read_rollouts(folder / f"consumed/step-{step:06d}.parquet"):
            assert set(rollout.versions.tolist()) == {step - 1}
            assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.loss_mask)


def test_a_resumed_run_may_have_another_fleet_and_its_drafters_go_on(tmp_path: Path) -> None:
    """In float64, where it does not matter to a token who computes it, it is the run with one engine in this process:
    the engine's floats do not enter the loss.
    """
    exact: dict[str, Any] = {"model.dtype": "float64", "checkpoint.keep": 3}
    exact["draft.budget"] = "fixed"  # many tests at every step: they outgrow the decay of those before
    whole = Trainer(small(tmp_path, "whole", **exact)).run().folder
    folder = Trainer(small(tmp_path, "changed", steps=1, **exact)).run().folder
    reporter = Messages()
    two = {"fleet.kind": "processes", "fleet.workers": 2, "steps": 2}
    Trainer.resume(folder, two, reporter=reporter).run()
    assert any("fleet.kind, fleet.workers" in text and "not bit for bit" in text for text in reporter.texts)
    assert {r.worker for r in read_rollouts(folder / "consumed/step-000002.parquet")} == {0, 1}
    Trainer.resume(folder, {"fleet.kind": "in_process", "fleet.workers": 1, "steps": 3}).run()
    assert_same_run(whole, folder)
    assert load_config(folder / "config.toml").fleet.threads is None
    one, both, again = (drafters(folder, step) for step in (1, 2, 3))
    assert "workers" not in one
    assert "workers" not in again
    # Each went on from what the one had learned, and the one from what the first had.
    tested = [nodes_tested(state) for state in (one, *both["workers"], again)]
    assert 0 < tested[0] < min(tested[1], tested[2])
    assert tested[3] > tested[1]


def drafters(folder: Path, step: int) -> Any:
    return read_checkpoint(folder / f"checkpoints/step-{step:06d}")[0].state["draft"]


def nodes_tested(state: Any) -> float:
    """How many nodes a drafter has seen tested."""
    return float(np.array(state["calibration"]["counts"])[..., TESTED].sum())


def test_an_interruption_during_an_update_waits_for_it_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokens(SilentReporter):
        """How many were generated since the last update."""

        tokens = 0

        def rollout(self, done: int, total: int, tokens: int) -> None:
            self.tokens = tokens

    reporter, update = Tokens(), Learner.update
    began: list[threading.Thread] = []

    def interrupted(learner: Learner, batch: UpdateBatch) -> Updated:
        began.append(threading.current_thread())
        if learner.version == 1:
            before, end = reporter.tokens, time.monotonic() + 60.0
            while reporter.tokens == before and time.monotonic() < end:
                time.sleep(0.01)  # until something has been generated beside it
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
        return update(learner, batch)

    monkeypatch.setattr(Learner, "update", interrupted)
    overlapping = {"schedule.kind": "async", "deterministic": False, "checkpoint.every": 10, "steps": 4}
    one = {**PROCESSES, "fleet.workers": 1}
    result = Trainer(small(tmp_path, "async", **one, **overlapping), reporter=reporter).run()
    assert (result.interrupted, result.steps) == (True, 2)
    assert threading.main_thread() not in began
    flying = read_rollouts(result.folder / "in_flight/step-000002.parquet")
    assert sum(rollout.token_ids.size for rollout in flying) > 0  # generated beside the update, and kept
    Trainer.resume(result.folder, {"fleet.kind": "in_process"}).run()
    consumed = [
        r for step in range(1, 5) for r in read_rollouts(result.folder / f"consumed/step-{step:06d}.parquet")
    ]
    assert len({r.request_id for r in consumed}) == len(consumed) == 24
    said = {r.request_id: r.token_ids.tolist() for r in consumed}
    for rollout in flying:
        if rollout.request_id in said and not rollout.refreshes:
            assert said[rollout.request_id][: rollout.token_ids.size] == rollout.token_ids.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fleet.workers": 2},
            'fleet.workers = 2 with fleet.kind = "in_process": engines of one process take',
        ),
        (
            {"fleet.threads": 2},
            'fleet.threads = 2 with fleet.kind = "in_process": the engine has the trainer',
        ),
        ({"fleet.weights": "file"}, 'fleet.weights = "file" with fleet.kind = "in_process"'),
        ({**PROCESSES, "fleet.weights": "copy"}, "another process does not see the trainer's memory"),
        ({**PROCESSES, "fleet.weights": "shared"}, "another process does not see the trainer's memory"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        load_config("demo", changes)
