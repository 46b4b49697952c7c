"""The fleet on a Ray cluster: an actor for each worker, in a placement group of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from stretto.config import Config
from stretto.errors import StrettoError
from stretto.fleet.channel import Message, ProcessLost
from stretto.fleet.messages import Build, Command, Load
from stretto.fleet.process import SERVER
from stretto.fleet.ray_head import Head
from stretto.fleet.ray_worker import RayWorker, as_arrays
from stretto.fleet.workers import WorkerFleet
from stretto.records import Event
from stretto.spawn import TAIL, last_words
from stretto.weights import WeightsRef

LONGEST = 5.0  # seconds that a call for replies stays open
AT_ONCE = 5.0  # seconds within which a cluster with room gives a place
MARKS = (b":job_id:", b":actor_name:", b":task_name:")  # Ray's own lines in what a process has printed
SAID = 300  # characters of what Ray says of an actor's end


class RayFleet(WorkerFleet):
    """Each worker reserves `cpus` and `gpus`; `more` as `WorkerFleet` has it. Ray must have been initialised."""

    def __init__(
        self, build: Build, post: Callable[[Event], None], *, cpus: float, gpus: float = 0.0, **more: Any
    ) -> None:
        super().__init__(build, post, RayHosts(cpus, gpus), **more)


def gpus_of(config: Config) -> float:
    """What each worker reserves. Ray must have been initialised.

    One GPU, if `fleet.gpus` is not set, where there are any. To a Ray of the run's own none is ever added, so with
    fewer GPUs than workers each gets a part of one.
    """
    if config.fleet.gpus is not None:
        return config.fleet.gpus
    whole = learner_gpus(config)
    if not whole or config.fleet.address is not None:
        return whole
    there = int(ray.cluster_resources()["GPU"])
    if config.learner.place == "cluster":
        there -= config.learner.shards
    return part_of_gpu(config.fleet.workers, max(1, there))


def part_of_gpu(workers: int, gpus: int) -> float:
    """Of a GPU, for each of so many workers: Ray counts in 1/10000, and no worker gets parts of two."""
    return (10_000 // -(-workers // gpus)) / 10_000


def learner_gpus(config: Config) -> float:
    """What each of the learner's processes reserves: one, where the cluster has any."""
    wanted = config.model.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    return 1.0 if wanted else 0.0


class RayHosts:
    """Places in a Ray cluster. Each is a placement group with one bundle, so that none waits for another's, and that
    nobody takes it while a lost worker is replaced. Actors and groups end with this process.
    """

    def __init__(self, cpus: float, gpus: float) -> None:
        self._bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._places: dict[int, Any] = {}  # their placement groups
        self._head = Head(ray.get_runtime_context().gcs_address)
        self.weights = WeightObjects(self._head)

    def start(self, place: int, show: Callable[[str], None]) -> RayChannel:
        if place not in self._places:
            self._places[place] = placement_group([self._bundle], strategy="PACK")
        return RayChannel(self._places[place], self._bundle, self._head)

    def pack(self, command: Command) -> Message:
        # Ray counts who has a handle only where it packs the handle itself.
        return command if isinstance(command, Load) else pickle.dumps(command, pickle.HIGHEST_PROTOCOL)

    def leave(self, place: int) -> None:
        if place in self._places and not self._head.lost:  # which would be asked
            with contextlib.suppress(RayError):
                remove_placement_group(self._places.pop(place))

    def close(self) -> None:
        for place in list(self._places):
            self.leave(place)
        self.weights.close()


class WeightObjects:
    """The newest weights in Ray's object store, put there once; older ones stay for as long as somebody is to pull
    them, which Ray itself counts.
    """

    def __init__(self, head: Head | None = None) -> None:
        """With a `head`, it is asked for before anything is stored: where there is no store any more, Ray ends the
        program without a word.
        """
        self._head = head
        self._newest: WeightsRef | None = None

    def write(self, ref: WeightsRef) -> WeightsRef:
        """Raises StrettoError if the store has no room for them, HeadLost if the cluster has no head any more."""
        newest = self._newest
        if newest is not None and newest.version == ref.version:
            return newest
        if ref.kind == "object":
            return WeightsRef(ref.version, "object", handle=ref.handle)
        if self._head is not None:
            self._head.look_again()
        try:
            handle = ray.put(as_arrays(ref.tensors))
        except (RayError, OSError, MemoryError) as error:
            said = " ".join(str(error).split())
            raise StrettoError(
                f"weights of version {ref.version}: Ray's object store does not take them: {said}; the run goes on "
                "from its newest checkpoint with `stretto resume` (`ray start --object-store-memory` gives it more)"
            ) from error
        return WeightsRef(ref.version, "object", handle=handle)

    def publish(self, written: WeightsRef, workers: Iterable[int]) -> None:
        self._newest = written

    def taken(self, worker: int, version: int | None = None) -> None: ...

    def close(self) -> None:
        """Ray may free the newest ones too."""
        self._newest = None


class RayChannel:
    """An actor that serves `module` in a bundle of a placement group. It exists at once; what it is sent waits
    until it has its place.
    """

    def __init__(
        self, group: Any, bundle: dict[str, float], head: Head, module: str = SERVER, index: int = 0
    ) -> None:
        self._group, self._bundle, self._head = group, bundle, head
        strategy = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
        )
        self._actor = RayWorker.options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy
        ).remote([os.path.abspath(entry) for entry in sys.path], module)
        self._take = self._actor.take.options(concurrency_group="take")
        self._say = self._actor.replies.options(concurrency_group="replies")
        self._where = self._actor.where.remote()
        self.pid, self._node, self._address, self._errors = 0, "", "", ""
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._call: Any = None  # for replies
        self._replies: deque[bytes] = deque()
        self._silent = 0.0  # seconds, before it had a place
        self._ended = False

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self._address}" if self.pid else "without a process yet"

    def waits(self) -> str:
        if self.pid or self._silent < AT_ONCE:
            return ""
        with contextlib.suppress(RayError):
            if placement_group_table(self._group)["state"] == "CREATED":
                return ""
        wanted = " and ".join(f"{count:g} {kind}" for kind, count in self._bundle.items())
        free = ray.available_resources()
        has = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in self._bundle)
        return f"{wanted} on one machine of the cluster, which has {has} free in all"

    def send(self, message: Message) -> None:
        with self._sending:
            self._take.remote(next(self._numbers), [message])

    def receive(self, within: float) -> bytes | None:
        """As a channel's; raises HeadLost where the cluster has no head any more."""
        self._head.look()
        try:
            while not self._replies:
                if not self.pid and ray.wait([self._where], timeout=0)[0]:
                    self.pid, self._node, self._address, self._errors = ray.get(self._where)
                if self._call is None:
                    self._call = self._say.remote(LONGEST)
                if not ray.wait([self._call], timeout=within)[0]:
                    self._silent += within
                    return None
                call, self._call = self._call, self._say.remote(LONGEST)
                self._replies += ray.get(call)
                if not self.pid:  # who has answered is there: who is killed from now on, is so by this number
                    with contextlib.suppress(RayError):  # its end is said after what it said
                        self.pid, self._node, self._address, self._errors = ray.get(self._where)
        except RayError as error:
            self._head.look_again()
            self._ended = True
            raise ProcessLost(how_it_ended(error) + self._last_words()) from error
        return self._replies.popleft()

    def _last_words(self) -> str:
        """What it printed last, to go on a sentence about its end; or where that is."""
        if not self._errors:
            return ""
        if self._node == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(OSError), open(self._errors, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                lines = file.read().splitlines()
                return last_words(b"\n".join(line for line in lines if not line.startswith(MARKS)))
        return f"; what it printed is in {self._errors} on {self._address}"

    def kill(self) -> None:
        if not self._head.lost:  # which would be asked
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._actor)
        if not self.pid or self._ended:
            return
        # Ray asks the process to end, which one that is stuck does not do.
        self._ended = True
        if self._node == ray.get_runtime_context().get_node_id():
            kill_process(self.pid)
        elif not self._head.lost:  # else it ends by itself, as its machine's part of Ray does
            there = NodeAffinitySchedulingStrategy(self._node, soft=False)
            ray.remote(kill_process).options(num_cpus=0, scheduling_strategy=there).remote(self.pid)

    def close(self) -> None:
        self.kill()


class RayRanks:
    """Places for a sharded learner's processes, all on one machine of the cluster, since they exchange much."""

    def __init__(self, count: int, cpus: float, gpus: float, within: float) -> None:
        """Waits for room. Raises StrettoError if there is none `within` so many seconds."""
        self._bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._head = Head(ray.get_runtime_context().gcs_address)
        self._group = placement_group([self._bundle] * count, strategy="STRICT_PACK")
        if not self._group.wait(within):
            self.close()
            wanted = " and ".join(f"{number:g} {kind}" for kind, number in self._bundle.items())
            raise StrettoError(
                f"learner.shards = {count}: no machine of the cluster had room for so many processes of {wanted} each "
                f"within fleet.patience = {within:g} seconds"
            )

    def start(self, module: str, rank: int) -> RayChannel:
        return RayChannel(self._group, self._bundle, self._head, module, rank)

    def close(self) -> None:
        if self._head.lost:
            return
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


def kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def how_it_ended(error: RayError) -> str:
    """Ray's reason, without what it always says."""
    text = " ".join(str(error).split())
    if isinstance(error, RayTaskError) or "creation task" in text:
        return f"has failed: {str(error).strip().splitlines()[-1].strip()[:SAID]}"
    if "low on memory" in text or "OutOfMemory" in type(error).__name__:
        start = text.find("Memory on the node")
        return f"ran out of memory: {text[max(0, start) :][:SAID]}"
    reason = re.search(r"Worker exit detail: (.*)|The actor is dead because (.*)", text)
    said = next((part for part in reason.groups() if part), text) if reason else text
    return f"was lost; Ray says: {said[:SAID]}"
