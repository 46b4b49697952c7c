"""The learner in several processes, as the trainer sees it; they divide weights, optimizer state and work (FSDP2)."""

from __future__ import annotations

import logging
import pickle
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from stretto.config import Config
from stretto.errors import StrettoError
from stretto.learn.rank import (
    Accumulate,
    Command,
    Done,
    Failed,
    Load,
    Publish,
    Refused,
    Reply,
    Save,
    Setup,
    Update,
)
from stretto.model import copy_tensors
from stretto.records import Event, Rollout, UpdateBatch, Updated
from stretto.spawn import ProcessLost, SpawnedProcess
from stretto.weights import WeightsRef

logger = logging.getLogger(__name__)

RANK = "stretto.learn.rank"
ON = "the run goes on from its newest checkpoint with `stretto resume`"
POLL = 0.1  # seconds between looks at the others, while one has nothing to say


class Channel(Protocol):
    """A rank's process from outside; see `stretto.spawn.SpawnedProcess`."""

    @property
    def pid(self) -> int: ...

    def send(self, payload: bytes, /) -> None: ...

    def receive(self, within: float) -> bytes | None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Places(Protocol):
    """Where the processes are started."""

    def start(self, module: str, rank: int) -> Channel: ...

    def close(self) -> None: ...


class Here:
    """The trainer's own machine."""

    def start(self, module: str, rank: int) -> SpawnedProcess:
        return SpawnedProcess(module, _shown(rank))

    def close(self) -> None: ...


class ShardedLearner:
    """`Learner`'s calls, made in `config.learner.shards` processes at once.

    `model` is the trainer's own copy of the policy, for evaluation and for an engine in this process: it gets the
    weights of each new version before `update` returns. `scratch` is a folder for weights on their way, the learner's
    own. What ends a process ends the run, which `stretto resume` takes up from its newest checkpoint.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        *,
        scratch: Path,
        post: Callable[[Event], None],
        weights: Literal["shared", "copy"] = "shared",
        places: Places | None = None,
    ) -> None:
        """`places`: where the processes are started; none: here. `scratch` and what is saved must have the same paths
        there. Raises StrettoError for settings that cannot be trained with, or if a process cannot be started.
        """
        if config.sampling.temperature == 0:
            raise StrettoError(
                "sampling.temperature = 0: greedy responses have no probabilities to learn from; use 1.0"
            )
        self.model = model
        self.version = 0
        self._post = post
        self._weights: Literal["shared", "copy"] = weights
        self._scratch = scratch
        self._fetched = 0  # files of weights
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        count = config.learner.shards
        config = config.model_copy(update={"threads": max(1, (config.threads or count) // count)})
        rendezvous = str((scratch / f"ranks-{secrets.token_hex(4)}").resolve())
        self._ranks: list[Channel] = []
        self._talking = threading.Lock()  # a checkpoint may be asked for while a thread has parts accumulated
        self._places = places or Here()
        try:
            for rank in range(count):
                self._ranks.append(self._places.start(RANK, rank))
                setup = Setup(config, rank, count, rendezvous, own_device=places is not None)
                self._ranks[rank].send(_pack(setup))
            self._collect(joining=True)
        except OSError as error:
            self.close()
            raise StrettoError(f"learner.shards = {count}: a process cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def begin(self, batch: UpdateBatch) -> None:
        """Make the optimiser step for `batch` and post `Updated`."""
        self._post(self.update(batch))

    def accumulate(self, batch: UpdateBatch) -> None:
        """See `Learner.accumulate`."""
        self._all(Accumulate(_bare(batch)))

    def update(self, batch: UpdateBatch) -> Updated:
        """See `Learner.update`; then the new weights are in `model`."""
        first = self._all(Update(_bare(batch)))
        assert first.updated is not None
        self._fetch()
        return first.updated

    def publish(self) -> WeightsRef:
        """The newest weights for the engines."""
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        if self._weights == "copy":
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return WeightsRef(self.version, self._weights, tensors)

    def save(self, folder: Path) -> None:
        """See `Learner.save`: the files are the same."""
        self._all(Save(folder.resolve()))

    def load(self, folder: Path) -> None:
        """See `Learner.load`: the files may be of a learner in one process, or in another number of them."""
        self._all(Load(folder.resolve()))
        self._fetch()

    def close(self) -> None:
        """Kill the processes and remove what they wrote for each other."""
        for rank in self._ranks:
            rank.kill()
        with self._talking:  # whoever receives has seen their end
            for rank in self._ranks:
                rank.close()
        self._places.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _fetch(self) -> None:
        """The newest weights into `model`, by a file of a new name: of an old one a shared file system may still have
        what was in it before.
        """
        self._fetched += 1
        path = self._scratch.resolve() / f"weights-{self._fetched:06}.safetensors"
        self._all(Publish(path))
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise StrettoError(f"the learner's weights: {path} cannot be read: {error}; {ON}") from error
        copy_tensors(tensors, self.model, "the learner's weights")
        path.unlink(missing_ok=True)

    def _all(self, command: Command) -> Done:
        """Have it carried out by all ranks; what rank 0 answers."""
        packed = _pack(command)
        with self._talking:
            for rank in self._ranks:
                rank.send(packed)
            return self._collect()

    def _collect(self, joining: bool = False) -> Done:
        """An answer of each rank; rank 0's. Raises StrettoError if one refuses, has failed, or has ended.

        `joining`: one that refuses leaves the others waiting for it.
        """
        replies: dict[int, Reply] = {}
        while len(replies) < len(self._ranks):
            for place, rank in enumerate(self._ranks):
                if place in replies:
                    continue
                try:
                    payload = rank.receive(POLL)
                except ProcessLost as lost:
                    raise StrettoError(f"the learner's process {place} {lost}; {ON}") from lost
                if payload is not None:
                    reply: Reply = pickle.loads(payload)  # noqa: S301 -- from our own child
                    replies[place] = reply
                    if isinstance(reply, Failed):
                        raise self._failure(place, reply)
                    if isinstance(reply, Refused) and joining:
                        raise StrettoError(reply.message)
        for _, reply in sorted(replies.items()):
            if isinstance(reply, Refused):
                raise StrettoError(reply.message)
        first = replies[0]
        assert isinstance(first, Done)
        self.version = first.version
        return first

    def _failure(self, place: int, failed: Failed) -> StrettoError:
        """What to say of one that has failed, perhaps since another has died without a word."""
        logger.error("learner %d: %s", place, failed.message)
        for other, rank in enumerate(self._ranks):
            try:
                if other != place:
                    rank.receive(POLL)
            except ProcessLost as lost:
                return StrettoError(f"the learner's process {other} {lost}; {ON}")
        last = failed.message.strip().rpartition("\n")[2]
        return StrettoError(f"the learner's process {place} failed: {last}; {ON}")


def _bare(batch: UpdateBatch) -> UpdateBatch:
    """Without what a user's data and rewards put into rollouts, which need not fit through a pipe."""

    def bare(rollout: Rollout) -> Rollout:
        return replace(rollout, prompt=replace(rollout.prompt, data={}), reward_parts={}, top=None)

    return UpdateBatch(batch.version, [bare(rollout) for rollout in batch.rollouts], batch.final)


def _shown(rank: int) -> Callable[[str], None]:
    return lambda line: logger.info("learner %d: %s", rank, line)


def _pack(message: object) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
