"""Rewards in every form that users write them in, through worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.config import DataConfig, EvalConfig, RewardConfig
from stretto.errors import StrettoError
from stretto.records import Event, Observed, Scored
from stretto.tasks.rewards import RewardSpec
from stretto.tasks.sources import load_data, reward_spec
from stretto.tasks.workers import Job, TurnJob
from tests.tasks import reward_functions as functions
from tests.tasks.reward_pool import PATIENCE, Pool, wait_until
from tests.tasks.two_turn import TwoTurn


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


def test_a_wrong_count_is_the_functions_fault_and_said_once(
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
    assert [s.status for s in scores] == ["invalid"] * 3  # alone, each would have got one reward
    assert made.workers.metrics()["reward/retried"] == 0
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
