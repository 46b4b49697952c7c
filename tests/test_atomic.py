"""Each kind of write leaves the old or the new state, wherever it is killed, and the old one where the disk fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.atomic import (
    append_lines,
    append_synced,
    link_atomically,
    remove_atomically,
    remove_leftovers,
    write_atomically,
    write_folder_atomically,
)
from stretto.errors import StrettoError
from tests.faults.disk import Disk, Killed


def put(folder: Path) -> None:
    (folder / "inner").mkdir()
    for name in ("a", "inner/b"):
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"content")
        os.close(descriptor)


KINDS: dict[str, Callable[[Path], None]] = {
    "write": lambda root: write_atomically(root / "file", b"new"),
    "create": lambda root: write_atomically(root / "new file", b"new"),
    "write folder": lambda root: write_folder_atomically(root / "new folder", put),
    "link": lambda root: link_atomically(root / "link", "folder"),
    "remove file": lambda root: remove_atomically(root / "file"),
    "remove link": lambda root: remove_atomically(root / "link"),
    "remove folder": lambda root: remove_atomically(root / "folder"),
}
every_kind = pytest.mark.parametrize("change", KINDS.values(), ids=KINDS.keys())


def scene(root: Path) -> Path:
    root.mkdir()
    (root / "file").write_bytes(b"old")
    (root / "link").symlink_to("file")
    (root / "folder").mkdir()
    put(root / "folder")
    return root


def visible(root: Path) -> dict[str, bytes | None]:
    """Everything below `root` but temporaries: content of files, target of links, None for folders."""
    found: dict[str, bytes | None] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if name.startswith(".tmp-"):
            continue
        if path.is_symlink():
            found[name] = os.fsencode(os.readlink(path))
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


@every_kind
def test_killed_anywhere(change: Callable[[Path], None], tmp_path: Path) -> None:
    before = visible(scene(tmp_path / "before"))
    root, disk = scene(tmp_path / "after"), Disk()
    with disk.inserted():
        change(root)
    after = visible(root)
    assert after != before
    assert os.listdir(tmp_path / "after") == [
        name for name in os.listdir(tmp_path / "after") if name[0] != "."
    ]

    def kill() -> None:
        raise Killed

    seen = []
    for k in range(len(disk.done)):
        root = scene(tmp_path / str(k))
        with Disk(k, kill).inserted(), pytest.raises(Killed):
            change(root)
        seen.append(visible(root))
        removed = remove_leftovers(root)
        assert len(removed) <= 1
        assert visible(root) == seen[-1]
        assert not list(root.glob(".tmp-*"))
    turn = seen.index(after) if after in seen else len(seen)
    assert seen == [before] * turn + [after] * (len(seen) - turn)


@every_kind
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES])
def test_failing_anywhere(change: Callable[[Path], None], code: int, tmp_path: Path) -> None:
    before = visible(scene(tmp_path / "before"))
    root, disk = scene(tmp_path / "after"), Disk()
    with disk.inserted():
        change(root)
    after = visible(root)

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    for k in range(len(disk.done)):
        root = scene(tmp_path / str(k))
        said = ""
        with Disk(k, fail).inserted():
            try:
                change(root)
            except StrettoError as error:
                said = str(error)
        remove_leftovers(root)
        if not said:
            assert disk.done[k] in ("unlink", "rmdir")  # of what has already lost its name
            assert visible(root) == after
        else:
            assert f"{root}/" in said
            assert os.strerror(code) in said
            assert " free" in said
            assert visible(root) == (before if "what was there before is intact" in said else after)


def test_a_failed_append_changes_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for k in range(3):  # open, write (half of it done), sync
        with (
            Disk(k, fail).inserted(),
            pytest.raises(StrettoError, match="No space left on device .4 bytes wanted"),
        ):
            append_synced(path, b"two\n")
        assert path.read_bytes() == b"one\n"
    append_synced(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_lines_that_fail_take_nothing_of_others_with_them(tmp_path: Path) -> None:
    """And what is left of them spoils no line that comes after."""
    path = tmp_path / "shared"

    def fail() -> None:
        with path.open("ab") as other:
            other.write(b"\nother\n")
        raise OSError(errno.ENOSPC, "No space left on device")

    append_lines(path, b"one\n")
    with (
        Disk(1, fail).inserted(),
        pytest.raises(StrettoError, match="No space left on device .4 bytes wanted.*; a part may"),
    ):
        append_lines(path, b"two\n")
    assert path.read_bytes() == b"one\ntw\nother\n"
    path.write_bytes(b"one\ntw")  # as of a writer that was killed
    append_lines(path, b"two\n")
    append_lines(path, b"three\n")
    assert path.read_bytes() == b"one\ntw\ntwo\nthree\n"


def test_a_folder_with_something_in_it_is_never_replaced(tmp_path: Path) -> None:
    root = scene(tmp_path / "root")
    before = visible(root)
    with pytest.raises(StrettoError, match="folder: .*; what was there before is intact"):
        write_folder_atomically(root / "folder", put)
    assert visible(root) == before


def test_the_errors_of_other_libraries_are_recognised(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "model").touch()
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with pytest.raises(StrettoError, match=r"cannot write .*/new: I/O error: No space left"):
        write_folder_atomically(tmp_path / "new", fill)
    assert list(tmp_path.iterdir()) == []


def test_only_the_leftovers_of_one_name(tmp_path: Path) -> None:
    names = [".tmp-run-1-2", ".tmp-run-2-1-2", ".tmp-running-1-2", "run"]
    for name in names:
        (tmp_path / name).mkdir()
    assert remove_leftovers(tmp_path, of="run") == [tmp_path / ".tmp-run-1-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
