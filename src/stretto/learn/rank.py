"""The inside of one of a sharded learner's processes: all take the same commands in the same order.

Both directions are pickles, over a socket pair that only parent and child hold; nothing of the user's runs here.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from stretto.config import Config
from stretto.errors import StrettoError
from stretto.learn.learner import Learner
from stretto.learn.shards import Shards
from stretto.model import load_model, resolve_device
from stretto.records import UpdateBatch, Updated
from stretto.spawn import connect, leave_signals_to_parent


class Inbox(Protocol):
    """Pickled messages in the order in which they were sent."""

    def get(self) -> bytes:
        """The next one; waits for it."""


@dataclass(slots=True)
class Setup:
    """The first message to a process."""

    config: Config  # `threads` are this process's
    rank: int
    count: int
    rendezvous: str  # a file that does not exist yet, where ranks find each other
    own_device: bool  # it sees no other's GPU, and may be on another machine


@dataclass(slots=True)
class Accumulate:
    batch: UpdateBatch


@dataclass(slots=True)
class Update:
    batch: UpdateBatch


@dataclass(slots=True)
class Publish:
    """Rank 0 writes the whole weights into a safetensors file."""

    path: Path


@dataclass(slots=True)
class Save:
    folder: Path


@dataclass(slots=True)
class Load:
    folder: Path


Command = Accumulate | Update | Publish | Save | Load


@dataclass(slots=True)
class Done:
    """A command was carried out; `version` is the learner's now."""

    version: int
    updated: Updated | None = None


@dataclass(slots=True)
class Refused:
    """A command came to nothing, for a reason that is meant for the user; the learner is as before."""

    message: str


@dataclass(slots=True)
class Failed:
    """The process ends with this traceback."""

    message: str


Reply = Done | Refused | Failed


def main(descriptor: int) -> None:
    """Serve on the socket `descriptor` until the parent closes it or something fails."""
    leave_signals_to_parent()
    send_bytes, inbox = connect(descriptor)

    def send(reply: Reply) -> None:
        send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))

    serve(inbox, send)


def serve(inbox: Inbox, send: Callable[[Reply], None]) -> None:
    """Take part in what the first message sets up, until something fails, which is then said."""
    try:
        setup: Setup = pickle.loads(inbox.get())  # noqa: S301 -- from our own parent
        try:
            learner = _join(setup)
        except StrettoError as error:
            send(Refused(str(error)))
            return
        send(Done(learner.version))
        while True:
            command: Command = pickle.loads(inbox.get())  # noqa: S301 -- from our own parent
            try:
                send(_carry_out(learner, command, setup.rank))
            except StrettoError as error:
                send(Refused(str(error)))
    except Exception:  # noqa: BLE001 -- whatever it is, the trainer is to say it
        send(Failed(traceback.format_exc()))


def _join(setup: Setup) -> Learner:
    """The learner of this rank, when all ranks are there."""
    import torch.distributed as dist

    config = setup.config
    torch.set_num_threads(config.threads or 1)
    device = resolve_device(config.model.device)
    if device.type == "cuda":
        place = 0 if setup.own_device else setup.rank
        if place >= torch.cuda.device_count():
            raise StrettoError(
                f"learner.shards = {setup.count}: torch finds {torch.cuda.device_count()} CUDA devices here, one is "
                "needed for each"
            )
        torch.cuda.set_device(place)
    model = load_model(config.model)
    if not setup.own_device:
        # All are on this machine. By itself gloo looks for the address of the host's name, which others could reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(setup.rendezvous, setup.count),  # type: ignore[attr-defined]
        rank=setup.rank,
        world_size=setup.count,
    )
    return Learner(
        model,
        config.learner,
        sampling=config.sampling,
        total_steps=config.steps,
        post=lambda _: None,
        weights="copy",
        deterministic=config.deterministic,
        seed=config.seed,
        shards=Shards(device),
    )


def _carry_out(learner: Learner, command: Command, rank: int) -> Done:
    match command:
        case Accumulate():
            learner.accumulate(command.batch)
        case Update():
            updated = learner.update(command.batch)
            return Done(learner.version, updated if rank == 0 else None)
        case Publish():
            tensors = learner.publish().tensors
            if rank == 0:
                try:
                    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, command.path)
                except (OSError, SafetensorError) as error:  # a full disk is a SafetensorError
                    raise StrettoError(
                        f"weights of version {learner.version}: cannot write {command.path}: {error}"
                    ) from error
        case Save():
            learner.save(command.folder)
        case Load():
            learner.load(command.folder)
    return Done(learner.version)
