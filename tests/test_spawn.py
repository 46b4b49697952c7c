from __future__ import annotations

import os
import signal

import pytest

from stretto import spawn
from stretto.spawn import ProcessLost, SpawnedProcess


def test_one_that_cannot_be_killed_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process hangs in a system call."""
    process = SpawnedProcess("stretto.fleet.serve", lambda line: None)
    with monkeypatch.context() as patched:
        patched.setattr(spawn, "GONE", 0.1)
        patched.setattr(os, "killpg", lambda group, number: None)
        process.kill()
        assert process.process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessLost, match="was killed by signal 9"):
        process.receive(60.0)
    process.close()


def test_what_does_not_come_is_waited_for_so_long() -> None:
    process = SpawnedProcess("stretto.fleet.serve", lambda line: None)
    assert process.receive(0.1) is None
    process.close()
