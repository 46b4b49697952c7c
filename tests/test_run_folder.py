"""A run folder is never overwritten, never written by two, and always says from where it can be resumed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stretto.checkpoints import FORMAT, STATE_FILE, Checkpoint
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.run_folder import RunFolder
from tests.faults.disk import live, rollout

STATE = {"version": 1, "rng": [2**64, 0.1], "best": {"score": float("-inf")}}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run with three steps and a checkpoint after each."""
    with RunFolder.create(tmp_path / "runs" / "demo", "steps = 3\n") as run:
        for step in (1, 2, 3):
            take_step(run, step)
        yield run


def take_step(run: RunFolder, step: int) -> None:
    run.append_metrics({"step": step, "loss": 1 / step})
    run.log_step(step, [rollout(step, 0), rollout(step, 1)], [rollout(step, 0)])
    run.save_checkpoint(step, weights(step), [rollout(step, 9)], STATE | {"version": step})


def weights(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(f"weights of {step}".encode())

    return write


def newest(run: RunFolder, step: int | None = None) -> Checkpoint:
    checkpoint = run.newest_checkpoint(step)
    assert checkpoint is not None
    return checkpoint


def files(run: RunFolder) -> list[str]:
    return sorted(str(p.relative_to(run.path)) for p in run.path.rglob("*") if not p.is_dir())


# ---- create, open, lock ---------------------------------------------------------------------------------


def test_a_run_is_never_overwritten(run: RunFolder) -> None:
    before = files(run)
    with pytest.raises(StrettoError, match=rf"exists already; .*`stretto resume {run.path}`.*{run.path}-2"):
        RunFolder.create(run.path, "")
    assert files(run) == before


def test_neither_is_anything_else(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    for name in ("run", "file"):
        with pytest.raises(StrettoError, match=f"{name} exists already; choose another name: .*{name}-2"):
            RunFolder.create(tmp_path / name, "")


def test_an_empty_folder_becomes_a_run(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, 'name = "Ω"\n').close()
    assert (tmp_path / "config.toml").read_text(encoding="utf-8") == 'name = "Ω"\n'


def test_what_a_resumed_run_changes_is_kept(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "steps = 3\n") as run:
        run.save_config("steps = 5\n")
    assert (tmp_path / "run" / "config.toml").read_text() == "steps = 5\n"


def test_what_is_no_run_is_not_opened(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(
        StrettoError, match=r'demmo is not a run folder: it has no config.toml; did you mean "demo"'
    ):
        RunFolder.open(run.path.with_name("demmo"))
    for number in range(9):
        (run.path.with_name(f"other-{number}")).mkdir()
        (run.path.with_name(f"other-{number}") / "config.toml").touch()
    with pytest.raises(StrettoError, match=r"the nearest of 10: [\w-]+, [\w-]+, [\w-]+$"):
        RunFolder.open(run.path.with_name("zq"))
    with pytest.raises(StrettoError, match=f"there are no runs in {tmp_path}/nowhere"):
        RunFolder.open(tmp_path / "nowhere" / "demo")
    assert not (tmp_path / "nowhere").exists()


def test_reading_changes_nothing_and_needs_no_lock(run: RunFolder) -> None:
    (run.path / "rollouts" / ".tmp-step-000004.parquet-1-0").touch()
    before = files(run)
    reader = RunFolder.open(run.path)
    assert reader.metrics()[-1] == {"step": 3, "loss": 1 / 3}
    assert files(run) == before
    for write in (
        lambda: reader.append_metrics({"step": 4}),
        lambda: reader.rewind(0),
        lambda: reader.prune(1),
    ):
        with pytest.raises(RuntimeError, match="open for reading only"):
            write()


def test_two_writers_are_refused_and_a_killed_one_is_not_waited_for(run: RunFolder) -> None:
    run.close()
    script = """
import pathlib, sys, time
from stretto.run_folder import RunFolder
run = RunFolder.open(pathlib.Path(sys.argv[1]), writable=True)
print("open", flush=True)
time.sleep(600)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(run.path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(StrettoError, match=rf"is being written by process {child.pid} on "):
            RunFolder.open(run.path, writable=True)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    RunFolder.open(run.path, writable=True).close()


def test_leftovers_of_a_killed_writer_are_removed_and_said(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    run.close()
    leftovers = [
        run.path / ".tmp-latest-99-0",
        run.path / "consumed" / ".tmp-step-000004.parquet-99-1",
        run.path / "checkpoints" / ".tmp-step-000004-99-2",
    ]
    for path in leftovers[:2]:
        path.touch()
    leftovers[2].mkdir()
    (leftovers[2] / "model").touch()
    mine = run.path / ".tmp-notes"  # not a name that Stretto gives
    mine.touch()
    RunFolder.open(run.path, writable=True).close()
    assert not any(path.exists() for path in leftovers)
    assert all(f"removed {path}, left by" in caplog.text for path in leftovers)
    assert mine.exists()


def test_folders_that_a_copy_dropped_come_back(run: RunFolder, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "new", "").close()
    for name in ("rollouts", "consumed", "in_flight", "checkpoints"):
        (tmp_path / "new" / name).rmdir()
    assert RunFolder.open(tmp_path / "new").newest_checkpoint() is None
    with RunFolder.open(tmp_path / "new", writable=True) as new:
        take_step(new, 1)


# ---- logs and checkpoints -------------------------------------------------------------------------------


def test_a_step_is_logged_once(run: RunFolder) -> None:
    with pytest.raises(StrettoError, match=r"rollouts/step-000003\.parquet exists already"):
        run.log_step(3, [], [])
    assert len(read_rollouts(run.log_file("rollouts", 3))) == 2
    assert len(read_rollouts(run.log_file("consumed", 3))) == 1


def test_a_step_that_cannot_be_logged_whole_is_not_logged(run: RunFolder) -> None:
    bad = rollout(4, 0)
    bad.versions = bad.versions[1:]
    with pytest.raises(ValueError, match="different lengths"):
        run.log_step(4, [rollout(4, 0)], [bad])
    assert run.log_steps("rollouts") == run.log_steps("consumed") == [1, 2, 3]


def test_a_checkpoint_comes_back(run: RunFolder) -> None:
    step, folder, state = newest(run)
    assert (step, state) == (3, STATE | {"version": 3})
    assert (folder / "model" / "weights").read_bytes() == b"weights of 3"
    assert folder == run.path / "checkpoints" / "step-000003"
    assert (run.path / "latest").resolve() == folder.resolve()
    assert os.readlink(run.path / "latest") == "checkpoints/step-000003"  # relative: a run can be moved
    (unfinished,) = read_rollouts(run.log_file("in_flight", 3))
    np.testing.assert_array_equal(unfinished.logprobs, [-0.1, -0.1, -0.1])


def test_a_run_before_its_first_checkpoint_has_none(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "") as run:
        assert run.newest_checkpoint() is None
        run.save_checkpoint(0, weights(0), [], {})
        assert run.newest_checkpoint() is not None


def test_a_checkpoint_is_refused_before_its_log_and_over_another(run: RunFolder) -> None:
    with pytest.raises(StrettoError, match=r"rollouts/step-000004\.parquet is missing"):
        run.save_checkpoint(4, weights(4), [], {})
    with pytest.raises(StrettoError, match="step-000003 exists already"):
        run.save_checkpoint(3, weights(9), [], {})
    assert run.newest_checkpoint() is not None


def test_a_checkpoint_whose_writer_fails_leaves_nothing(run: RunFolder) -> None:
    def write(folder: Path) -> None:
        weights(4)(folder)
        raise ZeroDivisionError("a bug, not the disk")

    run.log_step(4, [], [])
    before = files(run)
    with pytest.raises(ZeroDivisionError):
        run.save_checkpoint(4, write, [], {})
    with pytest.raises(StrettoError, match=r"state at step 4 is not plain JSON: .*set"):
        run.save_checkpoint(4, weights(4), [], {"seen": {1, 2}})
    assert files(run) == before


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [damage, cut, Path.unlink])
@pytest.mark.parametrize(
    "name",
    [
        f"checkpoints/step-000003/{STATE_FILE}",
        "checkpoints/step-000003/model/weights",
        "in_flight/step-000003.parquet",
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_aloud(
    run: RunFolder, name: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    harm(run.path / name)
    checkpoint = newest(run)
    assert (checkpoint.step, checkpoint.state["version"]) == (2, 2)
    assert f"{run.path / name} is " in caplog.text
    assert "going back to checkpoint 2" in caplog.text
    run.rewind(2)
    take_step(run, 3)
    assert newest(run).step == 3


def test_no_usable_checkpoint_is_an_error_that_names_every_damage(run: RunFolder) -> None:
    for step in (1, 2, 3):
        damage(run.checkpoint_folder(step) / "model" / "weights")
    with pytest.raises(
        StrettoError, match=r"no usable checkpoint.*step-000003.*step-000001.*start a new run"
    ):
        run.newest_checkpoint()
    with pytest.raises(StrettoError, match=r"no usable checkpoint.*step-000002.*there are others: \[1, 3\]"):
        run.newest_checkpoint(step=2)


def test_a_checkpoint_of_a_newer_stretto_is_refused_not_passed_over(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.log_step(4, [], [])
    monkeypatch.setattr("stretto.checkpoints.FORMAT", FORMAT + 1)
    run.save_checkpoint(4, weights(4), [], {})
    monkeypatch.undo()
    with pytest.raises(StrettoError, match=rf"has format {FORMAT + 1}; .*reads up to {FORMAT}:"):
        run.newest_checkpoint()


def test_a_chosen_checkpoint(run: RunFolder) -> None:
    assert newest(run, step=2).step == 2
    with pytest.raises(StrettoError, match=r"no checkpoint of step 7; it has \[1, 2, 3\]"):
        run.newest_checkpoint(step=7)


@pytest.mark.parametrize("harm", [damage, cut, Path.unlink])
@pytest.mark.parametrize("kind", ["rollouts", "consumed"])
def test_a_damaged_log_is_named_with_the_step_to_resume_from(
    run: RunFolder, kind: str, harm: Callable[[Path], None]
) -> None:
    harm(run.path / kind / "step-000003.parquet")
    with pytest.raises(
        StrettoError,
        match=rf"{kind}/step-000003\.parquet is .*; checkpoint 3 builds on it; resume from step 2, before it, "
        rf"to have it written again \(`stretto resume {run.path} --step 2`\)",
    ):
        run.newest_checkpoint()
    run.rewind(newest(run, step=2).step)
    take_step(run, 3)
    assert newest(run).step == 3


def test_a_damaged_earlier_log_without_an_older_checkpoint(run: RunFolder) -> None:
    cut(run.log_file("rollouts", 1))
    with pytest.raises(StrettoError, match=r"step-000001\.parquet .*no checkpoint is older than it"):
        run.newest_checkpoint()


def test_a_damaged_log_after_the_checkpoint_is_harmless(run: RunFolder) -> None:
    run.log_step(4, [], [])
    cut(run.log_file("rollouts", 4))
    assert newest(run).step == 3
    assert run.rewind(3)["rollouts"] == 1


# ---- prune and rewind -----------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_the_best(run: RunFolder) -> None:
    take_step(run, 4)
    assert run.prune(keep=2, best=1) == [2]
    assert run.checkpoint_steps() == run.log_steps("in_flight") == [1, 3, 4]
    assert run.log_steps("rollouts") == run.log_steps("consumed") == [1, 2, 3, 4]
    assert os.readlink(run.path / "best") == "checkpoints/step-000001"
    assert run.prune(keep=1, best=3) == [1]
    assert os.readlink(run.path / "best") == "checkpoints/step-000003"
    with pytest.raises(StrettoError, match=r"no checkpoint of step 2 to keep as best; it has \[3, 4\]"):
        run.prune(keep=1, best=2)
    assert newest(run).step == 4


def test_rewind_removes_only_what_a_resume_writes_again(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    run.prune(keep=3, best=3)
    others = ["rollouts/notes.txt", "checkpoints/step-000003.bak", "timeline.json"]
    for name in others:
        (run.path / name).touch()
    assert run.rewind(2) == {"checkpoints": 1, "rollouts": 1, "consumed": 1, "in_flight": 1, "metrics": 1}
    assert "rewound to step 2; to be written again: 1 of checkpoints" in caplog.text
    assert run.checkpoint_steps() == run.log_steps("rollouts") == [1, 2]
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert os.readlink(run.path / "latest") == "checkpoints/step-000002"
    assert not (run.path / "best").is_symlink()
    assert all((run.path / name).exists() for name in others)
    assert set(run.rewind(2).values()) == {0}


def test_rewind_to_before_the_start(run: RunFolder) -> None:
    run.append_metrics({"step": 0})
    run.rewind(-1)
    assert files(run) == ["config.toml", "lock", "metrics.jsonl"]
    assert run.metrics() == []
    take_step(run, 1)


def test_where_links_are_impossible_latest_is_a_text_file(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(target: str, path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    with caplog.at_level(logging.ERROR):
        take_step(run, 4)
        run.prune(keep=2, best=4)
        assert (run.path / "latest").read_text() == "checkpoints/step-000004\n"
        run.rewind(3)
    assert (run.path / "latest").read_text() == "checkpoints/step-000003\n"
    assert not (run.path / "best").exists()


def test_checkpoints_that_were_deleted_do_not_begin_the_run_anew(tmp_path: Path) -> None:
    path = tmp_path / "run"
    live(path, [])
    shutil.rmtree(path / "checkpoints")
    (path / "checkpoints").mkdir()
    with RunFolder.open(path) as run, pytest.raises(StrettoError, match="had checkpoints"):
        run.newest_checkpoint()
