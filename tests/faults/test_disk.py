"""Whatever a kill or a failing disk interrupts, and wherever, nothing is lost, and the resumed run ends the same.

Every operation that changes the disk is interrupted once, in a fresh run and in one that resumes by rewinding.
A disk gets full only where something takes space.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.run_folder import RunFolder
from tests.faults.disk import STEPS, TAKES_SPACE, Disk, Killed, live

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG, errno.ENOMEM)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with Disk().inserted():
        live(folder / "run", [])
    return tree(folder)


@pytest.fixture(scope="module", params=["fresh", "rewinding"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that a life begins with: empty, or with a run whose newest checkpoint is damaged."""
    folder = tmp_path_factory.mktemp("start")
    if request.param == "rewinding":
        with Disk().inserted():
            live(folder / "run", [])
        (folder / f"run/checkpoints/step-{STEPS:06d}/optimizer").write_bytes(b"damaged")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """Every file by name with its content, and every link with its target; the lock's text names a process."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = b"-> " + os.fsencode(os.readlink(path))
        elif path.is_file() and path.name != "lock":
            found[name] = path.read_bytes()
    return found


def copy(start: Path, folder: Path) -> Path:
    shutil.copytree(start, folder, symlinks=True)
    return folder / "run"


def operations(start: Path, folder: Path) -> list[str]:
    """The operations of an undisturbed life that begins with `start`."""
    run, disk = copy(start, folder), Disk()
    with disk.inserted():
        live(run, [])
    return disk.done


def assert_nothing_lost(run: Path, saved: list[int], undisturbed: dict[str, bytes]) -> None:
    """What is there under its own name is whole, and no checkpoint that was saved is missing."""
    if not (run / "config.toml").exists():
        assert saved == []
        return
    folder = RunFolder.open(run)
    checkpoint = folder.newest_checkpoint()
    assert checkpoint is not None or not saved
    if checkpoint is not None and saved:
        assert checkpoint.step in (saved[-1], saved[-1] + 1)
        assert checkpoint.state == {"version": checkpoint.step, "seed": 0.1}
    assert [row["step"] for row in folder.metrics()] == list(range(1, len(folder.metrics()) + 1))
    for path in run.glob("*/*.parquet"):
        read_rollouts(path)
    for name, content in tree(run.parent).items():
        if name.endswith(".parquet") and f"{name}" in undisturbed:
            assert content == undisturbed[name]


def assert_ends_the_same(run: Path, undisturbed: dict[str, bytes]) -> None:
    with Disk().inserted():
        live(run, [])
    RunFolder.open(run, writable=True).close()  # removes what a failing removal left
    assert tree(run.parent) == undisturbed


def kill() -> None:
    raise Killed


def test_killed_inside_every_write(start: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    names = operations(start, tmp_path / "count")
    for k, (name, following) in enumerate(pairwise([*names, "end"])):
        if name == "fsync" and following not in ("write", "end"):
            continue  # the disk is then as a kill inside what follows leaves it, which has done nothing yet either
        run = copy(start, tmp_path / f"{k}")
        saved: list[int] = []
        with pytest.raises(Killed), Disk(k, kill).inserted():
            live(run, saved)
        assert_nothing_lost(run, saved, undisturbed)
        assert_ends_the_same(run, undisturbed)


@pytest.mark.parametrize("full", [True, False], ids=["full disk", "one failure"])
def test_every_write_fails(start: Path, undisturbed: dict[str, bytes], tmp_path: Path, full: bool) -> None:
    for k, name in enumerate(operations(start, tmp_path / "count")):
        if full and name not in TAKES_SPACE:
            continue
        code = errno.ENOSPC if full else ERRORS[k % len(ERRORS)]

        def fail(code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        run = copy(start, tmp_path / f"{k}")
        saved: list[int] = []
        said = None
        with Disk(k, fail, full).inserted():
            try:
                live(run, saved)
            except StrettoError as error:
                said = str(error)
        if said is None:
            assert name in ("unlink", "rmdir")  # of a temporary: the next open removes it
        else:
            assert str(run) in said
            assert os.strerror(code) in said
        assert_nothing_lost(run, saved, undisturbed)
        assert_ends_the_same(run, undisturbed)


def test_sigkill_inside_each_kind_of_write(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    names = operations(tmp_path / "start", tmp_path / "count")
    last = {name: k for k, name in enumerate(names)}
    assert set(last) >= {
        "open",
        "write",
        "fsync",
        "ftruncate",
        "mkdir",
        "rename",
        "replace",
        "symlink",
        "rmdir",
    }
    children = {}
    for name, k in last.items():
        run = copy(tmp_path / "start", tmp_path / name)
        command = [sys.executable, "-m", "tests.faults.disk", str(run), str(k)]
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        children[run] = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    for run, child in children.items():
        assert child.wait(timeout=120) == -signal.SIGKILL
        assert_nothing_lost(run, [], undisturbed)
        assert_ends_the_same(run, undisturbed)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "") as run:
        (run.path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(
            StrettoError, match=r"cannot write .*metrics\.jsonl: No space left .*12 bytes wanted"
        ):
            run.append_metrics({"step": 1})


def test_files_over_the_systems_limit(tmp_path: Path) -> None:
    """The errors of the libraries that write checkpoints, from the real system: EFBIG, as a quota would give."""
    script = """
import pathlib, resource, sys
import numpy as np
from safetensors.numpy import save_file
from stretto.errors import StrettoError
from stretto.run_folder import RunFolder

def plain(folder):
    (folder / "model").write_bytes(bytes(100_000))

def tensors(folder):
    save_file({"weight": np.zeros(100_000)}, folder / "model.safetensors")

run = RunFolder.create(pathlib.Path(sys.argv[1]), "")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for write in (plain, tensors):
    try:
        run.save_checkpoint(0, write, [], {})
    except StrettoError as error:
        print(error)
"""
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    first, second = run.stdout.splitlines()
    for line in (first, second):
        assert line.startswith(f"cannot write {tmp_path}/run/checkpoints/step-000000: ")
        assert "File too large" in line
        assert line.endswith("what was there before is intact")
    assert tree(tmp_path) == {"run/config.toml": b""}
