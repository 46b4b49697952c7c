"""Workers on a real Ray, started here once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="make test-ray")

from stretto.config import ScheduleConfig, load_config  # noqa: E402
from stretto.errors import StrettoError  # noqa: E402
from stretto.fleet.in_process import InProcessFleet  # noqa: E402
from stretto.fleet.ray import RayChannel, RayFleet, RayRanks, WeightObjects, how_it_ended  # noqa: E402
from stretto.fleet.ray_cluster import ray_for, token_hint  # noqa: E402
from stretto.fleet.ray_worker import as_arrays, as_tensors  # noqa: E402
from stretto.records import Event, Loaded, WorkerDown, WorkerUp  # noqa: E402
from stretto.schedule import make_schedule  # noqa: E402
from stretto.spawn import ProcessLost  # noqa: E402
from stretto.weights import WeightsRef  # noqa: E402
from tests.fleet.test_process import AnswerAll, World, build_tiny, past, wait_until  # noqa: E402
from tests.fleet.toy import Fault, alive, build_and_die, build_remembering, request, response, toy  # noqa: E402
from tests.models import tiny_model  # noqa: E402

KILLS = 3


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_for(load_config("demo", {"fleet.kind": "ray", "fleet.workers": 3, "fleet.threads": 1}), 3):
        yield


@contextmanager
def fleet_of(build: Any, world: World, **more: Any) -> Iterator[RayFleet]:
    fleet = RayFleet(build, world.runtime.post, **{"workers": 2, "cpus": 1.0, **more})
    try:
        yield fleet
    finally:
        fleet.close()


def test_two_workers_say_what_one_engine_here_says_under_the_same_weights() -> None:
    def train(fleet_for: Callable[[World], Any]) -> World:
        world = World(make_schedule(ScheduleConfig(prompts=4, samples=3)))
        world.weights = {name: p.detach().clone() for name, p in tiny_model("llama").named_parameters()}
        return world.run(fleet_for(world), lambda: world.ledger.version == 3)

    here = train(lambda world: InProcessFleet([build_tiny(0)[0]], world.runtime.post))
    fleets: list[RayFleet] = []

    def on_ray(world: World) -> RayFleet:
        fleets.append(RayFleet(build_tiny, world.runtime.post, workers=2, cpus=1.0))
        return fleets[0]

    there = train(on_ray)
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


def test_workers_are_reported_together_and_in_order() -> None:
    world = AnswerAll()
    with fleet_of(toy(), world, workers=3) as fleet:
        world.answer(fleet)
        assert world.events[:3] == [WorkerUp(number, 4, 0, number) for number in range(3)]
        assert not fleet.expecting()
        assert fleet.metrics()["step_seconds"] == 4.0


def test_workers_killed_at_random_moments_lose_and_repeat_nothing() -> None:
    draw = random.Random(0)
    moments = sorted(draw.sample(range(4, 60), KILLS))
    seen = 0
    killed: list[int] = []

    def at(events: Sequence[Event]) -> None:
        nonlocal seen
        seen += len(events)
        up = [worker for worker in fleets[0]._workers.values() if worker.announced]
        if up and len(killed) < KILLS and seen >= moments[len(killed)]:
            worker = draw.choice(up)
            killed.append(worker.number)
            os.kill(worker.process.pid, signal.SIGKILL)

    world = AnswerAll(at)
    fleets: list[RayFleet] = []
    with fleet_of(toy(), world, restarts=KILLS) as fleet:
        fleets.append(fleet)
        world.answer(fleet)
    assert len(killed) == KILLS
    assert {event.worker for event in world.events if isinstance(event, WorkerDown)} <= set(killed)


@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_a_stuck_worker_is_killed_after_a_while(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    world = AnswerAll()
    with fleet_of(toy(Fault(1, 5, kind)), world, restarts=0) as fleet:
        fleet.wait_until_ready()
        pid = fleet._workers[1].process.pid
        fleet._patience = 1.0
        world.answer(fleet)
        assert set(fleet._workers) == {0}
    assert "said nothing for fleet.patience = 1 seconds; what it ran goes on elsewhere" in caplog.text
    assert wait_until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", r"worker 1 failed: Traceback (.|\n)*in strike(.|\n)*ZeroDivisionError: an engine's own"),
        ("refuse", r"^worker 1 failed: the engine will not have it$"),
    ],
)
def test_an_exception_in_a_worker_ends_the_run(kind: str, message: str) -> None:
    world = AnswerAll()
    with fleet_of(toy(Fault(1, 5, kind)), world) as fleet, pytest.raises(StrettoError, match=message):
        world.answer(fleet)


def test_a_process_that_cannot_begin_ends_and_is_not_waited_for() -> None:
    """Of a learner: an import that fails there alone is no message of its own."""
    places = RayRanks(1, 1.0, 0.0, 60.0)
    rank = places.start("stretto.learn.no_such_module", 0)

    def hear() -> None:
        for _ in range(300):
            assert rank.receive(0.2) is None

    with pytest.raises(
        ProcessLost, match=r"^has failed: ModuleNotFoundError: No module named .*no_such_module"
    ):
        hear()
    rank.close()
    places.close()


def test_when_no_worker_is_left_the_run_ends() -> None:
    world = AnswerAll()
    every = [Fault(number, 5, "kill") for number in range(2)]
    with (
        fleet_of(toy(*every), world, restarts=0) as fleet,
        pytest.raises(StrettoError, match=r"no worker is left, after fleet\.restarts = 0 .* Ray says: "),
    ):
        world.answer(fleet)


def test_a_worker_that_finds_no_room_joins_the_run_when_there_is_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of three CPUs another fleet has two: one of two workers waits, and comes when they are given back."""

    def at(events: Sequence[Event]) -> None:
        if world.ledger.version == 2:
            other.close()

    def joined() -> bool:
        return any({r.worker for r in batch.rollouts} == {0, 1} for batch in world.batches)

    first = AnswerAll()
    world = World(make_schedule(ScheduleConfig(prompts=4, samples=3)), at)
    with fleet_of(toy(), first, workers=1, cpus=2.0) as other:
        other.start()
        with fleet_of(toy(), world) as fleet:
            fleet.wait_until_ready()
            assert [worker.up for worker in fleet._workers.values()].count(True) == 1
            assert "waits for 1 CPU on one machine of the cluster, which has 0 CPU free in all" in caplog.text
            world.run(fleet, joined)
    assert len(world.batches) > 2
    rollouts = [rollout for batch in world.batches for rollout in batch.rollouts]
    assert all(rollout.token_ids.tolist() == response(rollout.key) for rollout in rollouts)
    assert len({rollout.request_id for rollout in rollouts}) == len(rollouts) == 12 * len(world.batches)


def test_a_replacement_is_told_what_the_others_know() -> None:
    world = AnswerAll()
    with fleet_of(build_remembering, world, window=2) as fleet:
        fleet.remember([past("a", -7), past("b", -7)])
        fleet.start()
        fleet.remember([past("a", 0), past("c", 0)])
        os.kill(fleet._workers[1].process.pid, signal.SIGKILL)
        assert wait_until(lambda: 2 in fleet._workers and fleet._workers[2].up)
        fleet.remember([past("d", 1)])
        first, other = (sorted(tuple(told[:2]) for told in state["told"]) for state in fleet.drafter_states())
        assert first == other == [("a", -7), ("a", 0), ("b", -7), ("c", 0), ("d", 1)]


def test_weights_are_put_once_and_pulled_late_by_who_comes_late() -> None:
    world = AnswerAll()
    events: list[Event] = []
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(2.5),
    }
    back = as_tensors(as_arrays(tensors))
    assert all(
        torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
    with fleet_of(toy(endless=True), world) as fleet:
        fleet._post = events.append
        fleet.start()
        fleet.submit(0, [request(0)])  # it is at work when the weights come
        for version in (1, 2):
            fleet.load(WeightsRef(version, "copy", tensors), [0], "continue")
        assert wait_until(lambda: Loaded(0, 2) in events)
        kept = fleet._files
        assert isinstance(kept, WeightObjects)
        handle = kept.write(WeightsRef(2, "copy", tensors)).handle
        fleet.load(WeightsRef(2, "copy", tensors), [1], "continue")
        assert wait_until(lambda: Loaded(1, 2) in events)
        assert kept.write(WeightsRef(2, "copy", tensors)).handle == handle
    assert kept.write(WeightsRef(2, "copy", tensors)).handle != handle  # closed, it holds none
    assert [event.version for event in events if event == Loaded(0, 1)] == [1]


def test_weights_that_are_none_are_said_and_not_waited_for() -> None:
    world = AnswerAll()
    with fleet_of(toy(), world) as fleet:
        fleet.wait_until_ready()
        fleet.load(WeightsRef(1, "object", handle=ray.put("no weights")), [0], "continue")
        with pytest.raises(StrettoError, match=r"worker 0 failed: the weights .* cannot be had: Traceback"):
            world.answer(fleet)


@pytest.mark.parametrize("error", [ray.exceptions.ObjectStoreFullError("full"), OSError("no space left")])
def test_a_full_object_store_names_the_way_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(value: object) -> None:
        raise error

    monkeypatch.setattr(ray, "put", put)  # Ray's own store grows onto the disk before it is full
    with pytest.raises(StrettoError, match=r"version 3: Ray's object store .* `stretto resume`"):
        WeightObjects().write(WeightsRef(3, "copy", {"a": torch.ones(2)}))


def test_what_a_process_said_is_heard_before_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has answered and ended before its number was known."""
    where, call = object(), object()
    waited: list[object] = []

    def wait(refs: list[object], timeout: float) -> tuple[list[object], list[object]]:
        waited.extend(refs)
        return ([], refs) if waited == [where] else (refs, [])

    def get(ref: object) -> list[bytes]:
        if ref is where:
            raise ray.exceptions.RayActorError
        return [b"last words"]

    channel = RayChannel.__new__(RayChannel)
    channel.pid, channel._where, channel._call, channel._replies = 0, where, call, deque()
    channel._say = SimpleNamespace(remote=lambda within: object())
    head: Any = SimpleNamespace(look=lambda: None, look_again=lambda: None)
    channel._head, channel._errors = head, ""
    monkeypatch.setattr("stretto.fleet.ray.ray", SimpleNamespace(wait=wait, get=get))
    assert channel.receive(1.0) == b"last words"
    with pytest.raises(ProcessLost, match="was lost"):
        channel.receive(1.0)


def test_ray_reasons_are_short_and_name_memory() -> None:
    text = "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1) was 31GB / 32GB"
    killed = ray.exceptions.OutOfMemoryError(text)
    assert how_it_ended(killed).startswith("ran out of memory: Memory on the node (IP: 10.0.0.1)")
    assert how_it_ended(ray.exceptions.RayActorError()).startswith("was lost; Ray says: ")


def test_an_actor_that_cannot_be_made_says_why() -> None:
    class Broken:
        def __init__(self) -> None:
            raise ModuleNotFoundError("No module named 'stretto'")

        def there(self) -> None: ...

    actor: Any = ray.remote(Broken)
    with pytest.raises(ray.exceptions.RayError) as caught:
        ray.get(actor.remote().there.remote())
    assert how_it_ended(caught.value) == "has failed: ModuleNotFoundError: No module named 'stretto'"


def test_the_last_words_of_a_lost_worker_are_said() -> None:
    with (
        fleet_of(build_and_die, AnswerAll(), workers=1, restarts=0) as fleet,
        pytest.raises(
            StrettoError, match=r"no worker is left.* Ray says: .*; its last words: worker 0 is dying of this"
        ),
    ):
        fleet.wait_until_ready()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://127.0.0.1:9", r'fleet.address = "ray://127.0.0.1:9": nobody answers there'),
        ("127.0.0.1:9", r'fleet.address = "127.0.0.1:9": nobody answers there'),
        ("127.0.0.1:70000", r'fleet.address = "127.0.0.1:70000" is no address of a Ray cluster'),
        (f"{'a' * 70}.org:6379", "nobody answers there"),
        ("here", r'fleet.address = "here" is no address of a Ray cluster; use "auto"'),
    ],
)
def test_an_address_where_nobody_is_said_before_anything_is_written(
    address: str, message: str, tmp_path: Path
) -> None:
    from stretto.trainer import Trainer

    config = load_config(
        "demo", {"fleet.kind": "ray", "fleet.address": address, "runs": str(tmp_path), "name": "x"}
    )
    with pytest.raises(StrettoError, match=message):
        Trainer(config).run()
    assert not (tmp_path / "x").exists()


def test_that_a_cluster_asks_for_a_token_is_said() -> None:
    refused = ConnectionError("Failed to connect to Ray cluster")
    refused.__cause__ = RuntimeError(
        "RPC error: InvalidAuthToken: Authentication token is missing or incorrect"
    )
    assert "set RAY_AUTH_MODE=token" in token_hint(refused)
    assert token_hint(ConnectionError("Failed to connect to Ray cluster")) == ""


def test_a_killed_trainer_leaves_no_process() -> None:
    code = "from tests.fleet.test_ray import trainer_to_be_killed as t; t()"
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=path
    ) as trainer:
        assert trainer.stdout is not None
        line = trainer.stdout.readline()
        workers = [int(pid) for pid in line.split()]
        assert len(workers) == 2
        assert all(alive(pid) for pid in workers)
        trainer.kill()
    assert wait_until(lambda: not any(alive(pid) for pid in workers))


def trainer_to_be_killed() -> None:
    """With a Ray of its own; says the numbers of its workers' processes when they are at work."""
    with ray_for(load_config("demo", {"fleet.kind": "ray", "fleet.workers": 2, "fleet.threads": 1}), 2):
        fleet = RayFleet(toy(endless=True), lambda event: None, workers=2, cpus=1.0)
        fleet.start()
        for number in (0, 1):
            fleet.submit(number, [request(number)])
        sys.stdout.write(" ".join(str(w.process.pid) for w in fleet._workers.values()) + "\n")
        sys.stdout.flush()
        time.sleep(600)
