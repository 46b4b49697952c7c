"""Files and folders that are there whole or not at all, whatever kills the process and whenever.

New content goes to a temporary sibling, is flushed to the disk, and takes its final name in one rename. A
crash leaves the old or the new state and at most a temporary, which `remove_leftovers` finds by its name.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stretto.errors import StrettoError

TEMPORARY = ".tmp-"
INTACT = "what was there before is intact"
_number = itertools.count()
_CHUNK = 1 << 26  # macOS refuses a single write of 2 GiB or more


def write_atomically(path: Path, content: bytes) -> None:
    """Replace or create the file `path`.

    Raises StrettoError if the disk refuses; then the file is as before (or, where the message says so, in
    place but not confirmed by the disk).
    """
    temporary = _temporary_of(path)
    try:
        with disk_errors(path, wanted=len(content)):
            write_synced(temporary, content)
            os.replace(temporary, path)
    except BaseException:
        _try_to_remove(temporary)
        raise
    _sync_name(path)


def write_folder_atomically(path: Path, fill: Callable[[Path], None]) -> None:
    """Create the folder `path` with what `fill(folder)` puts into the folder that it is given.

    Raises StrettoError if `path` exists and is not an empty folder, or if the disk refuses; nothing new is
    under the name `path` then. Errors of `fill` that are none of the disk's are passed on.
    """
    temporary = _temporary_of(path)
    try:
        with disk_errors(path):
            os.mkdir(temporary)
            _fill(temporary, path, fill)
            _sync_tree(temporary)
            os.rename(temporary, path)  # replaces an empty folder, never one with something in it
    except BaseException:
        _try_to_remove(temporary)
        raise
    _sync_name(path)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file of a folder that is not in place yet, and wait for the disk. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_atomically(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, relative to its folder; a text file where links are impossible.

    Raises StrettoError if the disk refuses; then `path` is as before.
    """
    temporary = _temporary_of(path)
    try:
        with disk_errors(path):
            os.symlink(target, temporary)
            os.replace(temporary, path)
    except StrettoError as error:
        _try_to_remove(temporary)
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP):
            write_atomically(path, f"{target}\n".encode())  # FAT and some network file systems have no links
            return
        raise
    except BaseException:
        _try_to_remove(temporary)
        raise
    _sync_name(path)


def append_synced(path: Path, content: bytes) -> None:
    """Append to the file `path` and wait for the disk; after an error its length is what it was.

    A crash may leave a part of `content` there: a format that appends must recognise its torn last record.
    Raises StrettoError if the disk refuses.
    """
    with disk_errors(path, wanted=len(content)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            length = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, content)
                os.fsync(descriptor)
            except BaseException:
                with suppress(OSError):  # the first error is the one to report
                    os.ftruncate(descriptor, length)
                raise
        finally:
            os.close(descriptor)


def append_lines(path: Path, content: bytes) -> None:
    """Append lines to the file `path`, to which other processes append at the same time, and wait for the disk.

    They begin on a line of their own, whatever a killed writer left. Raises StrettoError if the disk refuses; a part of
    `content` may be there then: others may have written behind it, so that nothing is taken back.
    """
    with disk_errors(path, wanted=len(content), state="a part may have been appended"):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            _write_all(descriptor, b"\n" + content if torn else content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_atomically(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, so that no half of it is ever seen under its name.

    Raises StrettoError if the disk refuses; the path is then either as before or gone.
    """
    with disk_errors(path, verb="remove"):
        if path.is_symlink() or not path.is_dir():
            os.unlink(path)
        else:
            temporary = _temporary_of(path)
            os.rename(path, temporary)
            _try_to_remove(temporary)
    _sync_name(path, "it is removed")


def remove_leftovers(folder: Path, of: str | None = None) -> list[Path]:
    """Remove the temporaries that killed writers left directly in `folder`; returns what was removed.

    With `of`, only those of the file or folder of that name. Without, only for the holder of the folder's
    lock: another writer's temporary looks the same.
    """
    name = ".*" if of is None else re.escape(of)
    found = sorted(
        p for p in folder.iterdir() if re.fullmatch(rf"{re.escape(TEMPORARY)}{name}-\d+-\d+", p.name)
    )
    for path in found:
        with disk_errors(path, verb="remove"):
            if path.is_symlink() or not path.is_dir():
                os.unlink(path)
            else:
                shutil.rmtree(path)
    return found


@contextmanager
def disk_errors(
    path: Path, wanted: int | None = None, *, state: str = INTACT, verb: str = "write"
) -> Iterator[None]:
    """Turn an OSError into a StrettoError naming `path`, the reason, bytes wanted and free, and `state`."""
    try:
        yield
    except OSError as error:
        raise _disk_error(path, error.strerror or str(error), wanted, state, verb) from error


def _temporary_of(path: Path) -> Path:
    """A name, never used before by this process, under which to prepare `path`."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{next(_number)}")


def _disk_error(path: Path, reason: str, wanted: int | None, state: str, verb: str) -> StrettoError:
    sizes = [] if wanted is None else [f"{wanted:,} bytes wanted"]
    with suppress(OSError):  # the free space is a courtesy; a dead disk cannot say it
        sizes.append(f"{shutil.disk_usage(path.parent).free:,} free")
    details = f" ({', '.join(sizes)})" if sizes else ""
    return StrettoError(f"cannot {verb} {path}: {reason}{details}; {state}")


def _fill(temporary: Path, path: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill`; disk errors that libraries report in their own types become StrettoErrors too."""
    try:
        fill(temporary)
    except OSError:
        raise
    except Exception as error:
        # safetensors raises its own type with "(os error N)", torch.save a RuntimeError of its zip writer
        if "os error" in str(error) or "inline_container" in str(error):
            raise _disk_error(path, str(error), None, INTACT, "write") from error
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest[:_CHUNK]) :]


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync_path(Path(parent, name))
        _sync_path(Path(parent))


def _sync_name(path: Path, state: str = "it is in place") -> None:
    """Make the name `path`, just created, replaced or removed, survive a power failure."""
    with disk_errors(path, state=f"{state}, but a power failure may undo that", verb="confirm"):
        try:
            _sync_path(path.parent)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do it
                raise


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_to_remove(path: Path) -> None:
    """Remove a temporary; one that cannot be removed now is a leftover, which the next open removes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)
