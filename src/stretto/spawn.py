"""Spawned Python processes that exchange frames with their parent, and end with it.

A frame is an 8-byte length and a payload. The two ends share a socket pair that nobody else holds, so the end of one
process is seen by the other as the end of the stream, however it came about.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

HEADER = 8  # bytes of a frame's length
TAIL = 4096  # bytes of a process's output that are kept for messages
LAST_LINES = 3  # of it that a message has,
LAST_CHARACTERS = 400  # and of these together
PATIENCE = 60.0  # seconds in which a process must take what it is sent
GONE = 5.0  # seconds that a killed process is waited for
PR_SET_PDEATHSIG = 1
BOOTSTRAP = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))"
)


class ProcessLost(Exception):
    """A process has ended; the message says how."""


def pack(payload: bytes) -> bytes:
    return len(payload).to_bytes(HEADER, "big") + payload


def last_words(printed: bytes) -> str:
    """The last lines of what a process has printed, to go on a sentence about its end; empty if it has said nothing."""
    lines = [line.strip() for line in printed.decode(errors="replace").splitlines()]
    said = " / ".join([line for line in lines if line][-LAST_LINES:])
    return f"; its last words: {said[-LAST_CHARACTERS:]}" if said else ""


class SpawnedProcess:
    """`module.main(descriptor)` in a Python of its own, in a session of its own: the terminal's signals do not reach
    it, and killing its process group takes along what it has started.

    One thread receives; any thread may send or kill. Standard output and error come through one pipe,
    which is read while it is received from; `show` gets the lines. `environment` is added to this process's.
    """

    def __init__(
        self, module: str, show: Callable[[str], None], environment: Mapping[str, str] | None = None
    ) -> None:
        self._show = show
        self._tail = b""
        self._line = b""
        self._received = bytearray()
        self._killed = False
        self._killing = threading.Lock()
        self._sending = threading.Lock()
        ours, theirs = socket.socketpair()
        path = [os.path.abspath(entry) for entry in sys.path]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, json.dumps(path), module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                bufsize=0,
            )
        self._channel = ours
        self._channel.settimeout(PATIENCE)
        assert self.process.stdout is not None
        self._output = self.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, payload: bytes) -> None:
        """Hand over one frame. A process that takes none any more is killed: whoever receives will see it end."""
        try:
            with self._sending:
                self._channel.sendall(pack(payload))
        except OSError:  # it has ended, or it is stuck, and half of a frame cannot be taken back
            self.kill()

    def receive(self, within: float) -> bytes | None:
        """The next frame; None if it takes more seconds than this. Raises `ProcessLost` when the process has ended."""
        end = time.monotonic() + within
        while (payload := self._unpack()) is None:
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._listen(left)
        return payload

    def _listen(self, timeout: float) -> bool:
        """Take in what comes next of frames and output; False if nothing came in so many seconds."""
        ready = [key.fileobj for key, _ in self._selector.select(timeout)]
        if self._output in ready:
            self._read_output()
        if self._channel in ready:
            try:
                chunk = self._channel.recv(1 << 18)
            except OSError:
                chunk = b""
            if not chunk:
                raise ProcessLost(self._describe_end())
            self._received += chunk
        return bool(ready)

    def _unpack(self) -> bytes | None:
        if len(self._received) < HEADER:
            return None
        end = HEADER + int.from_bytes(self._received[:HEADER], "big")
        if len(self._received) < end:
            return None
        payload = bytes(self._received[HEADER:end])
        del self._received[:end]
        return payload

    def _read_output(self) -> None:
        """Take in what it has printed: the last bytes are kept, whole lines shown."""
        try:
            chunk = os.read(self._output.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._selector.unregister(self._output)
            return
        self._tail = (self._tail + chunk)[-TAIL:]
        *lines, self._line = (self._line + chunk).split(b"\n")
        self._line = self._line[-TAIL:]
        for line in lines:
            self._show(line.decode(errors="replace"))

    def _describe_end(self) -> str:
        """How it ended, with the last lines that it printed; waits for it, briefly."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.poll()
        if code is None:
            return "closed its channel"
        self._drain()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return how + last_words(self._tail)

    def _drain(self) -> None:
        """Read what output is waiting, at most a pipe full."""
        for _ in range(16):
            if self._output in self._selector.get_map():
                self._read_output()

    def kill(self) -> None:
        """End it and its process group, and wait until it is gone; but not for ever: one that hangs in a system call
        ends when that does. May be called from any thread, repeatedly.
        """
        with self._killing:
            if not self._killed:  # once only: afterwards the number may belong to somebody else
                self._killed = True
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE)

    def close(self) -> None:
        """Kill it and let go of its descriptors; only the thread that receives may."""
        self.kill()
        self._selector.close()
        with self._sending:  # the descriptor's number may belong to another process's channel right after
            self._channel.close()
        self._output.close()


def connect(descriptor: int) -> tuple[Callable[[bytes], None], queue.SimpleQueue[bytes]]:
    """For the spawned process: a function that sends a frame to the parent, and the inbox of its frames.

    Ctrl-C in the terminal is the parent's business, so SIGINT is ignored. When the parent is gone, this process and all
    that it has started end at once, whatever they are doing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), daemon=True).start()

    def send(payload: bytes) -> None:
        try:
            channel.sendall(pack(payload))
        except OSError:
            _end()

    return send, inbox


def leave_signals_to_parent() -> None:
    """For the spawned process: SIGTERM, which batch systems send to everybody, is the parent's business too, as long as
    there is one.

    Where the system can do it, the parent's end kills this process even while it is stopped, or stuck in a way that
    keeps the thread which reads the channel from running. (What counts is the end of the thread that started it.)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _receive(channel: socket.socket, inbox: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(OSError), channel.makefile("rb") as stream:  # a killed parent may reset it
        while len(header := stream.read(HEADER)) == HEADER:
            inbox.put(stream.read(int.from_bytes(header, "big")))
    _end()


def _end() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
