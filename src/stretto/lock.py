"""The lock that keeps two processes from writing one run."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from stretto.atomic import disk_errors
from stretto.errors import StrettoError

logger = logging.getLogger(__name__)


class Lock:
    """An exclusive lock on `path`, held until `release` or the end of the process, however it ends.

    Where the file system has no locks, which is said, it is not `held`.
    """

    def __init__(self, path: Path) -> None:
        """Raises StrettoError if another process holds the lock, or if the disk refuses."""
        self.held = True
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._acquire(path)
                # for the message that a second process shows; the lock itself is the kernel's
                os.ftruncate(self._descriptor, 0)
                os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            except BaseException:
                os.close(self._descriptor)
                raise

    def release(self) -> None:
        os.close(self._descriptor)

    def _acquire(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 200).decode(errors="replace").strip() or "another process"
            raise StrettoError(
                f"{path.parent} is being written by {holder}; stop that process first, or choose another run"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            self.held = False
            logger.warning("%s: no locks on this file system; let no second process write this run", path)
