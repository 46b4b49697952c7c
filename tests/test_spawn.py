from __future__ import annotations

import os
import signal

import pytest

from stretto import spawn
from stretto.spawn import LAST_CHARACTERS, ProcessLost, SpawnedProcess, last_words


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


def test_last_words_are_the_last_lines_and_not_many() -> None:
    assert last_words(b"") == last_words(b" \n\n") == ""
    assert last_words(b"goodbye") == "; its last words: goodbye"
    assert (
        last_words(b"1\n2\nFatal error:\n\n  bad alloc\nAborted\n")
        == "; its last words: Fatal error: / bad alloc / Aborted"
    )
    said = last_words(b"x" * 5000 + b"y\xff")
    assert len(said) < LAST_CHARACTERS + 30
    assert said.endswith("xy\ufffd")


def test_one_that_dies_says_why_in_its_last_words() -> None:
    process = SpawnedProcess("stretto.no_such_module", lambda line: None)
    with pytest.raises(ProcessLost, match=r"exit code 1; its last words: .*No module named .*no_such_module"):
        process.receive(60.0)
    process.close()
