"""Workers outlive bad rewards, and nothing outlives the workers."""

from __future__ import annotations

import errno
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.records import Event, Scored
from stretto.tasks.rewards import RewardSpec
from stretto.tasks.workers import Job
from tests.tasks import reward_functions as functions
from tests.tasks.reward_pool import PATIENCE, Pool, wait_until


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    """One pool for all bad cases: it must survive each of them."""
    made = Pool(RewardSpec(functions=(functions.by_completion,), columns=("answer",)))
    yield made
    made.workers.close()
    assert made.inbox.empty()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, whose parent is init's business, does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return state.stdout.strip() not in ("", "Z", "Zs", "Z+")


def test_a_good_reward_is_a_number_with_parts(shared: Pool) -> None:
    assert shared.scores("good") == [Scored(0, 0, 1.0, "ok", {"by_completion": 1.0}, "")]


BAD = {
    "hang": ("timeout", "by_completion took more than 1 s; it was in hang"),
    "regex": ("timeout", "by_completion took more than 1 s; it was in hold_the_interpreter"),
    "fork and hang": ("timeout", "took more than 1 s"),
    "leave": ("error", "exit code 3; its last words: goodbye"),
    "quit": ("error", "raised SystemExit: 4"),
    "fail": ("error", "raised KeyError: 'no such answer'"),
    "read": ("error", "raised EOFError"),
    "nan": ("invalid", "returned nan"),
    "inf": ("invalid", "returned -inf"),
    "text": ("invalid", "returned '1.0', which is not a number"),
    "none": ("invalid", "returned None"),
    "list": ("invalid", "returned [1.0], which is not a number"),
    "huge": ("invalid", "which is not one number"),
}


@pytest.mark.parametrize("action", BAD)
def test_a_bad_reward_is_reported_and_the_next_is_scored(shared: Pool, tmp_path: Path, action: str) -> None:
    status, message = BAD[action]
    bad, good = shared.scores(action, "good", file=str(tmp_path / "pid"))
    assert (bad.status, bad.reward == bad.reward) == (status, False)
    assert message in bad.message
    assert good == Scored(1, 0, 1.0, "ok", {"by_completion": 1.0}, "")


@pytest.mark.parametrize("action", ["fork and hang", "start and hang"])
def test_a_timeout_kills_what_the_reward_started(
    pool: Callable[..., Pool], tmp_path: Path, action: str
) -> None:
    file = tmp_path / "pid"
    (scored,) = pool(functions.by_completion).scores(action, file=str(file))
    assert scored.status == "timeout"
    assert wait_until(lambda: not alive(int(file.read_text())))


def test_a_forking_reward_answers_once(shared: Pool) -> None:
    forked, good = shared.scores("fork", "good")
    assert (forked.reward, good.reward) == (0.25, 1.0)


def test_a_million_lines_neither_block_nor_flood(
    pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stretto.tasks.workers"):
        printed, good = pool(functions.by_completion, timeout=20.0).scores("lines", "good")
    assert (printed.reward, good.reward) == (0.5, 1.0)
    assert len(caplog.records) == 1001
    assert "not shown" in caplog.messages[-1]


def test_a_worker_that_cannot_be_started_again_answers_its_jobs(
    pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pool(functions.by_completion)

    def none_left(show: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("stretto.tasks.workers.WorkerProcess", none_left)
    (left, good) = made.scores("leave", "good")
    assert "exit code 3" in left.message
    assert good.status == "error"
    assert "no more processes" in good.message


def test_why_a_response_has_no_reward_is_said_once_for_each_reason(
    pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture
) -> None:
    pool(functions.by_completion).scores("nan", "good", "nan", "none", "leave", "nan")
    for reason in (
        "(invalid): by_completion returned nan",
        "returned None",
        "(error): by_completion: the worker",
    ):
        assert caplog.text.count(reason) == 1


def test_only_so_many_reasons_are_said(pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture) -> None:
    def complain(completion: str, row: object) -> float:
        raise ValueError(completion)

    assert {s.status for s in pool(complain).scores(*map(str, range(8)))} == {"error"}
    assert caplog.text.count("a response has no reward") == 5
    assert caplog.messages[-1].endswith("further reasons are not shown")


def test_metrics_count_and_reset(pool: Callable[..., Pool]) -> None:
    made = pool(functions.by_completion)
    made.scores("good", "nan", "leave", "good")
    counts = made.workers.metrics()
    assert (counts["reward/ok"], counts["reward/invalid"], counts["reward/error"]) == (2, 1, 1)
    assert counts["reward/restarted"] == 1
    assert not any(made.workers.metrics().values())


def test_a_row_that_cannot_leave_the_process_is_an_error(shared: Pool) -> None:
    (scored,) = shared.scores("good", lock=threading.Lock())
    assert scored.status == "error"
    assert "the row cannot be sent" in scored.message


def test_several_workers_score_everything_once(pool: Callable[..., Pool]) -> None:
    made = pool(functions.slow_judge, workers=2)
    scores = made.scores(*["x" * (i % 5) for i in range(300)])
    assert [s.reward for s in scores] == [float(i % 5) for i in range(300)]


def test_evaluation_has_its_own_target_and_may_use_the_same_ids(shared: Pool) -> None:
    other: queue.Queue[Event] = queue.Queue()
    shared.workers.submit([Job(0, "nan", [], {})], other.put)
    shared.workers.submit([Job(0, "good", [], {})])
    training, evaluation = shared.inbox.get(timeout=PATIENCE), other.get(timeout=PATIENCE)
    assert isinstance(training, Scored)
    assert isinstance(evaluation, Scored)
    assert (training.status, evaluation.status) == ("ok", "invalid")


def test_close_ends_a_hanging_worker_and_answers_nothing(tmp_path: Path) -> None:
    made = Pool(RewardSpec(functions=(functions.by_completion,), columns=("answer",)), timeout=600.0)
    file = tmp_path / "pid"
    made.workers.submit([Job(0, "start and hang", [], {"file": str(file)})])
    assert wait_until(lambda: file.exists() and file.read_text() != "")
    (process,) = made.workers.processes.values()
    made.workers.close()
    assert process.process.returncode == -signal.SIGKILL
    assert wait_until(lambda: not alive(int(file.read_text())))
    assert made.inbox.empty()
    with pytest.raises(StrettoError, match="closed"):
        made.workers.submit([Job(0, "good", [], {})])


ORPHANS = """
import os, sys, time
from stretto.config import RewardConfig
from stretto.tasks.rewards import RewardSpec
from stretto.tasks.workers import Job, RewardWorkers
spec = RewardSpec(functions=("tests.tasks.reward_functions:by_completion",), columns=("answer",))
workers = RewardWorkers(spec, RewardConfig(timeout=float(sys.argv[2])), print)
workers.submit([Job(0, sys.argv[1], [], {})])
print(workers.processes[0].process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("action", "timeout"), [("good", 600), ("hang", 600), ("regex", 1)])
def test_workers_do_not_outlive_a_killed_parent(action: str, timeout: float) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, action, str(timeout)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        line = parent.stdout.readline()
        while not line.strip().isdigit():
            line = parent.stdout.readline()
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not alive(int(line)))


def test_workers_ignore_the_terminal_s_interrupt(shared: Pool) -> None:
    (first,) = shared.scores("pid")
    os.kill(int(first.reward), signal.SIGINT)
    (second,) = shared.scores("pid")
    assert second.reward == first.reward


def test_a_worker_imports_nothing_heavy(pool: Callable[..., Pool]) -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic", "pyarrow")

    def count(completion: str, row: Any) -> float:
        return float(sum(name in sys.modules for name in heavy))

    assert pool(count).scores("x")[0].reward == 0.0
