from __future__ import annotations

import errno
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.config import DataConfig, EvalConfig, RewardConfig
from stretto.errors import StrettoError
from stretto.records import Event, Observed, Scored
from stretto.tasks.rewards import RewardSpec
from stretto.tasks.sources import load_data, reward_spec
from stretto.tasks.workers import Job, RewardWorkers, TurnJob
from tests.tasks import reward_functions as functions
from tests.tasks.two_turn import TwoTurn

TIMEOUT = 1.0
PATIENCE = 30.0  # seconds until a test gives up


class Pool:
    """Reward workers with an inbox."""

    def __init__(
        self, spec: RewardSpec, *, timeout: float = TIMEOUT, workers: int = 1, encode: Any = None
    ) -> None:
        self.inbox: queue.Queue[Event] = queue.Queue()
        config = RewardConfig(timeout=timeout, workers=workers)
        self.workers = RewardWorkers(spec, config, self.inbox.put, encode)

    def scores(self, *completions: str, **row: Any) -> list[Scored]:
        jobs = [Job(i, c, [7, 8], {"answer": "4", **row}) for i, c in enumerate(completions)]
        self.workers.submit(jobs)
        found = [self.inbox.get(timeout=PATIENCE) for _ in jobs]
        assert all(isinstance(event, Scored) for event in found)
        return sorted((event for event in found if isinstance(event, Scored)), key=lambda event: event.id)


@pytest.fixture
def pool() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(*given: Any, **options: Any) -> Pool:
        made.append(Pool(RewardSpec(functions=given, columns=("prompt", "answer")), **options))
        return made[-1]

    yield make
    for each in made:
        each.workers.close()
        assert each.inbox.empty()  # exactly one event for each job


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


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


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


def test_trl_functions_get_columns_and_none_means_not_applicable(pool: Callable[..., Pool]) -> None:
    made = pool(functions.trl, functions.by_completion)
    right = pool(functions.trl).scores("4", "5")
    assert [s.reward for s in right] == [1.0, 0.0]
    assert made.scores("none")[0].status == "invalid"


@pytest.mark.parametrize(
    ("bad", "status", "message"),
    [
        ("raise", "error", "RuntimeError: one of them is bad"),
        ("leave", "error", "exit code 5"),
    ],
)
def test_a_failed_batch_is_repeated_one_by_one(
    pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture, bad: str, status: str, message: str
) -> None:
    made = pool(functions.trl)
    scores = made.scores("4", *["5"] * 7, bad, "4", "4")
    assert [s.status for s in scores] == ["ok"] * 8 + [status] + ["ok"] * 2
    assert [s.reward for s in scores if s.status == "ok"] == [1.0] + [0.0] * 7 + [1.0, 1.0]
    assert message in scores[8].message


def test_a_wrong_count_is_repeated_one_by_one_and_said_once(
    pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture
) -> None:
    made = pool(functions.trl)
    held, gate = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        held.set()
        gate.wait(PATIENCE)

    made.workers.submit([Job(9, "4", [], {"answer": "4"})], hold)
    assert held.wait(PATIENCE)
    scores: list[Scored] = []
    scorer = threading.Thread(target=lambda: scores.extend(made.scores("4", "short", "5")))
    scorer.start()
    assert wait_until(lambda: len(made.workers.queue) == 3)  # which become one call
    gate.set()
    scorer.join()
    assert [s.reward for s in scores] == [1.0, 1.0, 0.0]
    assert made.workers.metrics()["reward/retried"] == 3
    assert caplog.text.count("returned 1 rewards for 3 completions") == 1


def test_async_functions_fail_one_by_one(pool: Callable[..., Pool]) -> None:
    scores = pool(functions.slow_judge).scores("a", "raise", "abc")
    assert [s.status for s in scores] == ["ok", "error", "ok"]
    assert (scores[0].reward, scores[2].reward) == (1.0, 3.0)
    assert "ValueError: the judge has left" in scores[1].message


def test_verl_functions(pool: Callable[..., Pool]) -> None:
    right, wrong = pool(functions.compute_score).scores("4", "5")
    assert (right.reward, wrong.reward) == (1.0, -1.0)
    assert right.parts == {"compute_score": 1.0, "compute_score.acc": 1.0}


def test_functions_by_name_in_files_and_modules(tmp_path: Path) -> None:
    file = tmp_path / "my_reward_file.py"
    file.write_text("def length(completion, row, scale=1.0):\n    return scale * len(completion)\n")
    given = (f"{file}:length", "tests.tasks.reward_functions:slow_judge")
    spec = RewardSpec(functions=given, weights=(1.0, 0.5), args={"scale": 2.0}, columns=("answer",))
    made = Pool(spec)
    try:
        (scored,) = made.scores("abc")
    finally:
        made.workers.close()
    assert (scored.reward, scored.parts) == (7.5, {"length": 6.0, "slow_judge": 3.0})


def test_lambdas_and_closures_run_in_the_worker_process(pool: Callable[..., Pool]) -> None:
    base = 10.0
    (scored,) = pool(lambda completion, row: base + (os.getppid() == 0) + 1).scores("x")
    assert scored.reward == 11.0
    (pid,) = pool(functions.by_completion).scores("pid")
    assert pid.reward != os.getpid()


def test_a_task_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my_task_file.py"
    file.write_text(
        "class Sums:\n"
        "    def rows(self, split): return [{'prompt': '1+1=', 'answer': 2}]\n"
        "    def score(self, completion, row): return float(int(completion) == row['answer'])\n"
    )
    data = load_data(DataConfig(task=f"{file}:Sums"), EvalConfig())
    made = Pool(reward_spec(RewardConfig(), data))
    try:
        made.workers.submit([Job(0, "2", [], data.train[0]), Job(1, "two", [], data.train[0])])
        found = [made.inbox.get(timeout=PATIENCE) for _ in range(2)]
    finally:
        made.workers.close()
    assert [e.reward for e in found[:1] if isinstance(e, Scored)] == [1.0]
    assert [e.status for e in found[1:] if isinstance(e, Scored)] == ["error"]


SCRIPT = """
import math, queue
from stretto.config import RewardConfig
from stretto.tasks.rewards import RewardSpec
from stretto.tasks.workers import Job, RewardWorkers

LIMIT = 3

def reward(completions, **columns):
    return [math.sqrt(LIMIT * len(c)) for c in completions]

inbox = queue.Queue()
with RewardWorkers(RewardSpec(functions=(reward,)), RewardConfig(), inbox.put) as workers:
    workers.submit([Job(0, "abc", [], {})])
    print("reward", inbox.get().reward)
"""


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "reward 3.0\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nonexistent_module_xyz", "No module named 'nonexistent_module_xyz'"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("import os; os._exit(9)", "exit code 9"),
        ("def g(completion, row): return 1", "has no 'f'; choose from: g"),
        ("f = 3", "is a int, not a function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_fails_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "broken_reward.py"
    file.write_text(text)
    with pytest.raises(StrettoError) as error:
        Pool(RewardSpec(functions=(f"{file}:f",), columns=("answer",)))
    assert "reward.functions" in str(error.value)
    assert message in str(error.value)


def test_what_cannot_leave_the_process_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(StrettoError, match="cannot be sent to a reward worker process"):
        Pool(RewardSpec(functions=(lambda completion, row: lock.locked(),), columns=("answer",)))


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


def two_turns(task: object) -> Pool:
    return Pool(RewardSpec(task=task, columns=("number",)), encode=lambda text: list(text.encode()))


def test_two_turns() -> None:
    made = two_turns(TwoTurn())
    row = {"number": 4}
    assert made.workers.multi_turn
    try:
        made.workers.submit_turns([TurnJob(3, "7", row, 0)])
        hint = made.inbox.get(timeout=PATIENCE)
        assert isinstance(hint, Observed)
        assert (hint.id, bytes(hint.token_ids.tolist()).decode(), hint.done) == (3, " lower ", False)
        made.workers.submit_turns([TurnJob(3, "7 lower 4", row, 1)])
        end = made.inbox.get(timeout=PATIENCE)
        assert isinstance(end, Observed)
        assert (end.token_ids.size, end.done) == (0, True)
        made.workers.submit([Job(3, "7 lower 4", [1], row)])
        scored = made.inbox.get(timeout=PATIENCE)
        assert scored == Scored(3, 0, 1.0, "ok", {"task": 1.0}, "")
    finally:
        made.workers.close()


def test_a_failed_turn_ends_the_response_and_its_score_says_why() -> None:
    made = two_turns(TwoTurn())
    try:
        made.workers.submit_turns([TurnJob(3, "7", {}, 0)])
        turn = made.inbox.get(timeout=PATIENCE)
        assert isinstance(turn, Observed)
        assert turn.done
        made.workers.submit([Job(3, "7", [1], {"number": 4})])
        scored = made.inbox.get(timeout=PATIENCE)
        assert isinstance(scored, Scored)
        assert scored.status == "error"
        assert "task.observe raised KeyError: 'number'" in scored.message
    finally:
        made.workers.close()


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
