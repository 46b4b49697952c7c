"""One reward worker process as its parent sees it: started, talked to, listened to, killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any, cast

from stretto.tasks.serve import HEADER, pack

POLL = 0.1  # seconds between looks whether the process lives, while it says nothing
TAIL = 4096  # bytes of its output that are kept for messages
LARGEST = 1 << 24  # bytes of an answer
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from stretto.tasks.serve import main; main(int(sys.argv[2]))"
)
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class WorkerLost(Exception):
    """The process ended without being told to; the message says how."""


class WorkerProcess:
    """A spawned Python process in a session of its own: the terminal's signals do not reach it, and killing
    its process group takes along what a reward has started. (What leaves the group by `setsid` escapes.)

    Its standard output and error come through one pipe, which is read while it works; `show` gets the lines.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.tail = b""
        self.line = b""
        self.received = bytearray()
        self.killed = False
        ours, theirs = socket.socketpair()
        path = [os.path.abspath(entry) for entry in sys.path]
        command = [sys.executable, "-c", BOOTSTRAP, json.dumps(path), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                bufsize=0,
            )
        self.channel = ours
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.channel, selectors.EVENT_READ)
        self.selector.register(self.output, selectors.EVENT_READ)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, payload: bytes, timeout: float) -> None:
        """Hand over one frame.

        Raises:
            WorkerLost: it does not read any more.
        """
        self.channel.settimeout(timeout)
        try:
            self.channel.sendall(pack(payload))
        except OSError as error:
            raise WorkerLost(f"the worker process takes no jobs any more ({error})") from error

    def receive(self, until: float) -> dict[str, Any] | None:
        """The next message, or None at the time `until` (`time.monotonic`).

        Raises:
            WorkerLost: it ended, or sent what is no message.
        """
        while (message := self.unpack()) is None:
            remaining = until - time.monotonic()
            if remaining <= 0:
                return None
            ready = [key.fileobj for key, _ in self.selector.select(min(remaining, POLL))]
            if self.output in ready:
                self.read_output()
            if self.channel in ready:
                try:
                    chunk = self.channel.recv(1 << 16)
                except OSError:
                    chunk = b""
                if not chunk:
                    raise WorkerLost(self.describe_end())
                self.received += chunk
            elif not self.alive:  # a process that it forked may still hold the channel open
                raise WorkerLost(self.describe_end())
        return message

    def unpack(self) -> dict[str, Any] | None:
        if len(self.received) < HEADER:
            return None
        size = int.from_bytes(self.received[:HEADER], "big")
        if size > LARGEST:
            raise WorkerLost(
                "the worker process sent what is no message: a reward must not write to its descriptors"
            )
        if len(self.received) < HEADER + size:
            return None
        payload = bytes(self.received[HEADER : HEADER + size])
        del self.received[: HEADER + size]
        try:
            return cast(dict[str, Any], json.loads(payload))
        except ValueError as error:
            raise WorkerLost(f"the worker process sent what is no message ({error})") from error

    def read_output(self) -> None:
        """Take in what it has printed: the last bytes are kept, whole lines shown."""
        try:
            chunk = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self.selector.unregister(self.output)
            return
        self.tail = (self.tail + chunk)[-TAIL:]
        *lines, self.line = (self.line + chunk).split(b"\n")
        self.line = self.line[-TAIL:]
        for line in lines:
            self.show(line.decode(errors="replace"))

    def describe_end(self) -> str:
        """How it ended, with the last line that it printed; waits for it, briefly."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.poll()
        if code is None:
            return "the worker process closed its channel"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.drain()
        said = self.tail.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the worker process {how}" + (f"; its last words: {said[:200]}" if said else "")

    def drain(self) -> None:
        """Read what output is waiting, at most a pipe full."""
        for _ in range(16):
            if self.output in self.selector.get_map():
                self.read_output()

    @property
    def timer_went_off(self) -> bool:
        """Whether it ended itself because a call's time was up (`faulthandler.dump_traceback_later`)."""
        self.drain()
        return b"Timeout (" in self.tail

    def stuck_at(self) -> str:
        """Where in the user's code it was when its time was up, from the traceback that it left; or nothing."""
        self.drain()
        report = self.tail.decode(errors="replace").rpartition("Timeout (")[2]
        library = sysconfig.get_paths()["stdlib"]
        for file, line, name in FRAME.findall(report.rpartition("most recent call first")[2]):
            if "site-packages" in file or not file.startswith(library):
                return f"; it was in {name} ({file}, line {line})"
        return ""

    def kill(self) -> None:
        """End it and its process group, and wait until it is gone. May be called from any thread, repeatedly."""
        if not self.killed:  # once only: afterwards the number may belong to somebody else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.killed = True

    def close(self) -> None:
        """Kill it and let go of its descriptors; only the thread that talks to it may."""
        self.kill()
        self.selector.close()
        self.channel.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
