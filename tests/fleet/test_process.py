from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.buffer import Ledger
from stretto.config import ScheduleConfig
from stretto.controller import Controller
from stretto.engine.embedded import EmbeddedEngine
from stretto.errors import StrettoError
from stretto.fleet.in_process import InProcessFleet
from stretto.fleet.process import ProcessFleet
from stretto.fleet.workers import WorkerFleet
from stretto.records import (
    Event,
    Prompt,
    Rollout,
    SamplingParams,
    Scored,
    UpdateBatch,
    Updated,
    WorkerDown,
    WorkerUp,
)
from stretto.runtime import LiveRuntime
from stretto.schedule import make_schedule
from stretto.schedule.one_pass import OnePass
from stretto.weights import WeightsRef
from tests.fleet.toy import Fault, alive, build_remembering, request, response, toy
from tests.invariants import check
from tests.models import tiny_model

PATIENCE = 60.0  # seconds until a test gives up
PROMPTS = [Prompt(i, f"{i:08x}", 0, np.array([i % 7, 1, 2]), {}) for i in range(6)]


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


class World:
    """The real loop around a fleet; rewards and updates come at once. `at` is called before events are applied."""

    def __init__(self, schedule: Any, at: Callable[[Sequence[Event]], None] = lambda events: None) -> None:
        self.runtime = LiveRuntime()
        self.ledger = Ledger(SamplingParams(max_new_tokens=40, stop_token_ids=(3,)), now=self.runtime.now)
        self.schedule = schedule
        self.at = at
        self.events: list[Event] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.batches: list[UpdateBatch] = []

    def run(self, fleet: Any, done: Callable[[], bool]) -> World:
        if isinstance(fleet, InProcessFleet):
            self.runtime.local = fleet
        else:
            self.runtime.expecting = fleet.expecting
        apply = self.ledger.apply

        def apply_and_check(events: Sequence[Event]) -> list[Rollout]:
            self.events += events
            self.at(events)
            ended = apply(events)
            check(self.ledger)
            return ended

        self.ledger.apply = apply_and_check  # type: ignore[method-assign, assignment]
        us: Any = self  # rewards, prompts, learner and observer
        Controller(self.runtime, self.ledger, self.schedule, fleet, us, us, us, us).run(done)
        return self

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        return [(prompt, self.ledger.version) for prompt in PROMPTS[:count]]

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.runtime.post(Scored(rollout.request_id, rollout.attempt, 1.0))

    def begin(self, batch: UpdateBatch) -> None:
        self.batches.append(batch)
        self.runtime.post(Updated(self.ledger.version + 1))

    def publish(self) -> WeightsRef:
        """Weights that have moved visibly with every version."""
        moved = {name: tensor * (1 + 0.1 * self.ledger.version) for name, tensor in self.weights.items()}
        return WeightsRef(self.ledger.version, "copy", moved)

    def harvested(self, batch: UpdateBatch) -> None: ...

    def updated(self, event: Updated) -> None: ...

    def publishing(self) -> None: ...

    def published(self) -> None: ...


class AnswerAll(World):
    """Every prompt answered four times by a toy fleet, whatever happens."""

    def __init__(self, at: Callable[[Sequence[Event]], None] = lambda events: None) -> None:
        super().__init__(OnePass(len(PROMPTS), 4), at)

    def answer(self, fleet: WorkerFleet) -> AnswerAll:
        self.run(fleet, lambda: len(self.ledger.scored) == 4 * len(PROMPTS))
        rollouts = [self.ledger.rollout(i) for i in self.ledger.scored]
        assert len(rollouts) == 24
        for rollout in rollouts:
            assert rollout.token_ids.tolist() == response(rollout.key)
        # Nothing that was received is lost, nothing is received twice.
        assert self.ledger.generated_tokens == sum(r.token_ids.size for r in rollouts)
        assert self.ledger.counters["discarded_tokens"] == self.ledger.counters["stale_events"] == 0
        return self


@contextmanager
def fleet_of(build: Any, world: World, folder: Path, **more: Any) -> Iterator[ProcessFleet]:
    fleet = ProcessFleet(build, world.runtime.post, **{"workers": 2, "scratch": folder / "weights", **more})
    processes = [worker.process for worker in fleet._workers.values()]
    try:
        yield fleet
    finally:
        fleet.close()
    assert not (folder / "weights").exists()
    assert not any(alive(process.pid) for process in processes)


# ---- the same tokens ----------------------------------------------------------------------------------


def build_tiny(worker: int) -> tuple[EmbeddedEngine, None]:
    torch.set_num_threads(1)
    engine = EmbeddedEngine(
        tiny_model("llama"), None, worker=worker, max_num_seqs=5, max_model_len=48, max_num_batched_tokens=64
    )
    return engine, None


def test_two_processes_say_what_one_engine_here_says_under_the_same_weights(tmp_path: Path) -> None:
    def train(fleet_for: Callable[[World], Any]) -> World:
        world = World(make_schedule(ScheduleConfig(prompts=4, samples=3)))
        world.weights = {name: p.detach().clone() for name, p in tiny_model("llama").named_parameters()}
        return world.run(fleet_for(world), lambda: world.ledger.version == 3)

    here = train(lambda world: InProcessFleet([build_tiny(0)[0]], world.runtime.post))
    fleets: list[ProcessFleet] = []

    def processes(world: World) -> ProcessFleet:
        fleets.append(ProcessFleet(build_tiny, world.runtime.post, workers=2, scratch=tmp_path / "weights"))
        return fleets[0]

    there = train(processes)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-000002.safetensors"]
    figures = fleets[0].metrics()
    fleets[0].close()
    rollouts = [r for batch in there.batches for r in batch.rollouts]
    assert {r.worker for r in rollouts} == {0, 1}
    assert figures["decode_tokens"] == sum(r.token_ids.size for r in rollouts)
    said = [[r.token_ids.tolist() for r in batch.rollouts] for batch in there.batches]
    assert said == [[r.token_ids.tolist() for r in batch.rollouts] for batch in here.batches]
    assert said[0] != said[1] != said[2]
    assert [set(r.versions.tolist()) for batch in there.batches for r in batch.rollouts] == [
        {version} for version in range(3) for _ in range(12)
    ]


# ---- the life of a fleet ------------------------------------------------------------------------------


def test_workers_are_reported_together_and_in_order(tmp_path: Path) -> None:
    world = AnswerAll()
    with fleet_of(toy(), world, tmp_path, workers=3) as fleet:
        world.answer(fleet)
        assert world.events[:3] == [WorkerUp(number, 4, 0, number) for number in range(3)]
        assert not fleet.expecting()


@pytest.mark.parametrize("step", [0, 1, 9], ids=["loading", "its first step", "half way"])
def test_a_killed_worker_is_replaced_and_nothing_received_is_lost(step: int, tmp_path: Path) -> None:
    world = AnswerAll()
    with fleet_of(toy(Fault(1, step, "kill")), world, tmp_path) as fleet:
        world.answer(fleet)
        assert wait_until(lambda: len(fleet._workers) == 2)
        assert set(fleet._workers) == {0, 2}  # the new one has a number of its own
        assert (WorkerDown(1) in world.events) == (step > 0)


def test_a_worker_killed_while_it_is_idle_is_replaced(tmp_path: Path) -> None:
    world = AnswerAll()
    with fleet_of(toy(), world, tmp_path, workers=1) as fleet:
        fleet.start()
        (worker,) = fleet._workers.values()
        os.kill(worker.process.pid, signal.SIGKILL)
        assert wait_until(lambda: 1 in fleet._workers)
        world.answer(fleet)


@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_a_stuck_worker_is_lost_after_a_while(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = AnswerAll()
    with fleet_of(toy(Fault(1, 5, kind)), world, tmp_path, restarts=0) as fleet:
        fleet.wait_until_ready()  # loading takes longer than the patience that follows
        fleet._patience = 1.0
        world.answer(fleet)
        assert set(fleet._workers) == {0}
    assert (
        "was killed, having said nothing for fleet.patience = 1 seconds; what it ran goes on" in caplog.text
    )


def test_nobody_waits_for_a_stuck_workers_report_for_ever(tmp_path: Path) -> None:
    world = AnswerAll()
    with fleet_of(toy(), world, tmp_path, restarts=0) as fleet:
        fleet.start()
        fleet._patience = 1.0
        os.kill(fleet._workers[1].process.pid, signal.SIGSTOP)
        assert fleet.metrics()["step_seconds"] == 2.0  # the other's


def test_a_worker_that_is_stuck_while_loading_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = AnswerAll()
    with fleet_of(toy(Fault(1, 0, "stop")), world, tmp_path) as fleet:
        assert wait_until(lambda: fleet._workers[0].up)
        fleet._patience = 1.0
        assert wait_until(lambda: 1 not in fleet._workers)
        fleet._patience = PATIENCE
        world.answer(fleet)
        assert set(fleet._workers) == {0, 2}


def past(uid: str, visit: int) -> Rollout:
    ids, logprobs = np.arange(3), np.zeros(3)
    return Rollout(
        0, 0, Prompt(0, uid, 0, ids, {"a": print}), 0, visit, 0, ids, logprobs, logprobs, ids, ids > 0
    )


def test_a_replacement_is_told_what_the_others_know(tmp_path: Path) -> None:
    """Visits count by prompt: an earlier run's stay while the prompt has no others."""
    world = AnswerAll()
    with fleet_of(build_remembering, world, tmp_path, window=2) as fleet:
        fleet.remember([past("a", -7), past("b", -7)])  # before they are ready
        fleet.start()
        fleet.remember([past("a", 0), past("c", 0)])
        os.kill(fleet._workers[1].process.pid, signal.SIGKILL)
        assert wait_until(lambda: 1 not in fleet._workers)
        fleet.remember([past("a", 1)])  # perhaps while another one is told of those before
        assert wait_until(lambda: 2 in fleet._workers and fleet._workers[2].up)
        fleet.remember([past("d", 1)])
        first, other = (sorted(tuple(told[:2]) for told in state["told"]) for state in fleet.drafter_states())
        assert first == [("a", -7), ("a", 0), ("a", 1), ("b", -7), ("c", 0), ("d", 1)]
        assert set(other) - {("a", -7)} == set(first) - {("a", -7)}
        assert len(other) == len(set(other))


def test_weights_are_written_while_workers_are_listened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = AnswerAll()
    with fleet_of(toy(), world, tmp_path, workers=1) as fleet:
        fleet.start()
        write = fleet._files.write

        def slow(ref: WeightsRef) -> WeightsRef:
            before = len(arrived)
            assert wait_until(lambda: len(arrived) > before + 1)
            return write(ref)

        arrived: list[Event] = []
        monkeypatch.setattr(fleet, "_post", arrived.append)
        monkeypatch.setattr(fleet._files, "write", slow)
        fleet.submit(0, [request(35)])
        fleet.load(WeightsRef(1, "copy", {}), [0], "continue")


def test_what_is_interrupted_while_it_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    listen = ProcessFleet._listen_to

    def interrupted(fleet: ProcessFleet, worker: Any) -> None:
        if started:
            raise KeyboardInterrupt
        started.append(worker.process.pid)
        listen(fleet, worker)

    monkeypatch.setattr(ProcessFleet, "_listen_to", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ProcessFleet(toy(), lambda event: None, workers=2, scratch=tmp_path / "weights")
    assert not alive(started[0])


def test_without_restarts_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = AnswerAll()
    with fleet_of(toy(Fault(0, 5, "kill")), world, tmp_path, restarts=0) as fleet:
        world.answer(fleet)
        assert set(fleet._workers) == {1}
    assert "was killed by signal 9; what it ran goes on elsewhere" in caplog.text
    assert "the run goes on without it" in caplog.text


@pytest.mark.parametrize("step", [0, 5], ids=["loading", "at work"])
def test_when_no_worker_is_left_the_run_ends(step: int, tmp_path: Path) -> None:
    world = AnswerAll()
    every = [Fault(number, step, "kill") for number in range(4)]
    with (
        fleet_of(toy(*every), world, tmp_path, restarts=1) as fleet,
        pytest.raises(
            StrettoError, match=r"no worker is left, after fleet\.restarts = 1 .* killed by signal 9"
        ),
    ):
        world.answer(fleet)


@pytest.mark.parametrize("step", [0, 5], ids=["loading", "at work"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", r"worker 1 failed: Traceback (.|\n)*in strike(.|\n)*ZeroDivisionError: an engine's own"),
        ("refuse", r"^worker 1 failed: the engine will not have it$"),
    ],
)
def test_an_exception_in_a_worker_ends_the_run(step: int, kind: str, message: str, tmp_path: Path) -> None:
    world = AnswerAll()
    with (
        fleet_of(toy(Fault(1, step, kind)), world, tmp_path) as fleet,
        pytest.raises(StrettoError, match=message),
    ):
        world.answer(fleet)


def test_signals_to_everybody_are_the_trainers_business(tmp_path: Path) -> None:
    world = AnswerAll()
    with fleet_of(toy(), world, tmp_path) as fleet:
        fleet.start()
        for worker in fleet._workers.values():
            os.kill(worker.process.pid, signal.SIGINT)
            os.kill(worker.process.pid, signal.SIGTERM)
        world.answer(fleet)
        assert set(fleet._workers) == {0, 1}


def test_a_killed_trainer_leaves_no_process(tmp_path: Path) -> None:
    code = f"from tests.fleet.toy import trainer_to_be_killed as t; t({str(tmp_path / 'weights')!r})"
    command = [sys.executable, "-c", code]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path) as trainer:
        assert trainer.stdout is not None
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2
        assert all(alive(pid) for pid in workers)
        trainer.kill()
    assert wait_until(lambda: not any(alive(pid) for pid in workers))


def test_commands_to_a_worker_that_is_gone_are_dropped(tmp_path: Path) -> None:
    world = AnswerAll()
    with fleet_of(toy(Fault(0, 1, "kill")), world, tmp_path, restarts=0) as fleet:
        fleet.start()
        fleet.submit(0, [request(7)])
        assert wait_until(lambda: 0 not in fleet._workers)
        fleet.submit(0, [request(8)])
        fleet.stop(0, [8], [1])
        fleet.load(WeightsRef(1, "copy", {}), [0], "continue")
        assert not fleet.expecting()


def test_figures_are_summed_but_the_longest_time_counts(tmp_path: Path) -> None:
    world = AnswerAll()
    with fleet_of(toy(), world, tmp_path) as fleet:
        world.answer(fleet)
        figures = fleet.metrics()
        assert figures["step_seconds"] == 3.0
        assert figures["steps"] >= 40
        assert fleet.metrics()["steps"] == 0
