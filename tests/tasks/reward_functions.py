"""Reward functions as users write them, good and bad, for the worker tests."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def by_completion(completion: str, row: Row) -> Any:
    """Does what the completion says."""
    return ACTIONS[completion](row)


def hang(row: Row) -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def hold_the_interpreter(row: Row) -> float:
    re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0


def fork(row: Row) -> float:
    """Returns twice, once in a child process."""
    return 0.25 if os.fork() else 0.75


def fork_and_hang(row: Row) -> float:
    """Leaves a child behind, whose process id goes into the row's file, and hangs."""
    child = os.fork()
    if child:
        Path(row["file"]).write_text(str(child))
    return hang(row)


def start_and_hang(row: Row) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(row["file"]).write_text(str(child.pid))
    return hang(row)


def million_lines(row: Row) -> float:
    sys.stdout.write("a line of output\n" * 1_000_000)
    os.write(2, b"an unfinished line")
    return 0.5


def leave(row: Row) -> float:
    os.write(1, b"goodbye\n")
    os._exit(3)


def quit_politely(row: Row) -> float:
    sys.exit(4)


def fail(row: Row) -> float:
    raise KeyError("no such answer")


ACTIONS: Mapping[str, Any] = {
    "good": lambda row: 1.0,
    "hang": hang,
    "regex": hold_the_interpreter,
    "fork": fork,
    "fork and hang": fork_and_hang,
    "start and hang": start_and_hang,
    "lines": million_lines,
    "leave": leave,
    "quit": quit_politely,
    "fail": fail,
    "nan": lambda row: float("nan"),
    "inf": lambda row: -float("inf"),
    "text": lambda row: "1.0",
    "none": lambda row: None,
    "list": lambda row: [1.0],
    "huge": lambda row: 10**400,
    "pid": lambda row: float(os.getpid()),
    "read": lambda row: float(input()),
}


def trl(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """TRL's form. Bad completions spoil the call that they are in."""
    if "raise" in completions:
        raise RuntimeError("one of them is bad")
    if "leave" in completions:
        os._exit(5)
    if "short" in completions:
        return [1.0]
    return [None if c == "none" else float(c == a) for c, a in zip(completions, answer, strict=True)]


async def slow_judge(completion: str, row: Row) -> float:
    """Async: its waits overlap within a call."""
    await asyncio.sleep(0.01)
    if completion == "raise":
        raise ValueError("the judge has left")
    return float(len(completion))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """verl's form."""
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": solution_str}
