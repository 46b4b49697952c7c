"""One reward worker process as its parent sees it: started, talked to, listened to, killed."""

from __future__ import annotations

import json
import re
import sysconfig
import time
from collections.abc import Callable
from typing import Any, cast

from stretto.spawn import HEADER, ProcessLost, SpawnedProcess, pack

POLL = 0.1  # seconds between looks whether the process lives, while it says nothing
LARGEST = 1 << 24  # bytes of an answer
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class WorkerLost(Exception):
    """The process ended without being told to; the message says how."""


class WorkerProcess(SpawnedProcess):
    """A process that answers in JSON, and does what it likes in between: it runs a user's code.

    (What leaves its process group by `setsid` escapes `kill`.)
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__("stretto.tasks.serve", show)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def hand_over(self, payload: bytes, timeout: float) -> None:
        """Send one frame. Raises WorkerLost: it does not read any more."""
        self._channel.settimeout(timeout)
        try:
            self._channel.sendall(pack(payload))
        except OSError as error:
            raise WorkerLost(f"the worker process takes no jobs any more ({error})") from error

    def answer(self, until: float) -> dict[str, Any] | None:
        """The next message, or None at the time `until` (`time.monotonic`).

        Raises:
            WorkerLost: it ended, or sent what is no message.
        """
        while (payload := self._unpack()) is None:
            size = int.from_bytes(self._received[:HEADER], "big")
            if len(self._received) >= HEADER and size > LARGEST:
                raise WorkerLost(
                    "the worker process sent what is no message: a reward must not write to its descriptors"
                )
            remaining = until - time.monotonic()
            if remaining <= 0:
                return None
            try:
                quiet = not self._listen(min(remaining, POLL))
            except ProcessLost as lost:
                raise WorkerLost(f"the worker process {lost}") from lost
            if quiet and not self.alive:  # a process that it forked may still hold the channel open
                raise WorkerLost(f"the worker process {self._describe_end()}")
        try:
            return cast(dict[str, Any], json.loads(payload))
        except ValueError as error:
            raise WorkerLost(f"the worker process sent what is no message ({error})") from error

    @property
    def timer_went_off(self) -> bool:
        """Whether it ended itself because a call's time was up (`faulthandler.dump_traceback_later`)."""
        self._drain()
        return b"Timeout (" in self._tail

    def stuck_at(self) -> str:
        """Where in the user's code it was when its time was up, from the traceback that it left; or nothing."""
        self._drain()
        report = self._tail.decode(errors="replace").rpartition("Timeout (")[2]
        library = sysconfig.get_paths()["stdlib"]
        for file, line, name in FRAME.findall(report.rpartition("most recent call first")[2]):
            if "site-packages" in file or not file.startswith(library):
                return f"; it was in {name} ({file}, line {line})"
        return ""
