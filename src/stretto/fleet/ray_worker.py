"""The actor around a worker's engine, or a learner's rank: messages in, replies out, each by a thread of its own beside
the one that computes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch

from stretto.fleet.channel import Message
from stretto.fleet.messages import Failed, Load, Stepped
from stretto.records import Progress
from stretto.weights import WeightsRef

LINGER = 0.1
"""Seconds that news which nobody waits for may wait for more: a call takes a millisecond of several threads, and that
from the engines where the machine has no cores besides theirs.
"""
GROUPS = {"take": 1, "replies": 1}
"""Threads for the two methods, of these names; an actor's others have their own."""


class EngineActor:
    """Runs `serve(inbox, send)` of `module`, as a spawned process does. `path`: where the trainer finds its modules."""

    def __init__(self, path: Sequence[str], module: str) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._early: dict[int, Message] = {}
        self._taken = 0
        self._news = threading.Condition()  # guards what follows
        self._replies: list[bytes] = []
        self._urgent = False
        self._failure = ""  # a traceback, when it serves no more
        threading.Thread(target=self._serve, args=(module,), name="serve", daemon=True).start()

    def where(self) -> tuple[int, str, str, str]:
        """Process number, Ray's name of the node, its address, and the file there that errors are printed into."""
        node = ray.get_runtime_context().get_node_id()
        return os.getpid(), node, ray.util.get_node_ip_address(), _errors_file()

    def take(self, number: int, message: list[Message]) -> None:
        """The `number`-th message. (Ray does not promise that they come in order; in a list its handles stay such.)"""
        self._early[number] = message[0]
        while (following := self._early.pop(self._taken, None)) is not None:
            self._taken += 1
            try:
                self._inbox.put(_pulled(following))
            except ray.exceptions.RayError as error:
                self._send(Failed(f"the weights that it was to load cannot be had: {error}"))
            except Exception:  # noqa: BLE001 -- nobody asks Ray what became of this call
                trace = traceback.format_exc()
                self._send(Failed(f"the weights that it was to load cannot be had: {trace}"))

    def replies(self, within: float) -> list[bytes]:
        """What there is to say; nothing after so many seconds without any.

        Raises RuntimeError, with the traceback, when it serves no more.
        """
        with self._news:
            self._news.wait_for(lambda: self._replies or self._failure, within)
            if self._replies:
                self._news.wait_for(lambda: self._urgent or self._failure, LINGER)
            elif self._failure:
                raise RuntimeError(self._failure)
            replies, self._replies, self._urgent = self._replies, [], False
            return replies

    def _send(self, reply: object) -> None:
        packed = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        with self._news:
            lingers = bool(self._replies)
            self._replies.append(packed)
            self._urgent = self._urgent or not _can_wait(reply)
            if self._urgent or not lingers:  # else nobody has to wake up for it
                self._news.notify_all()

    def _serve(self, module: str) -> None:
        try:
            importlib.import_module(module).serve(self._inbox, self._send)
        except BaseException:  # noqa: BLE001 -- the thread would end unseen, and the trainer wait for it
            with self._news:
                self._failure = traceback.format_exc()
                self._news.notify_all()


RayWorker: Any = ray.remote(concurrency_groups=GROUPS)(EngineActor)


def _errors_file() -> str:
    """Where Ray has put this process's standard error; empty where that cannot be known."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if path.startswith("/") else ""


def _can_wait(reply: object) -> bool:
    return isinstance(reply, Stepped) and reply.busy and all(isinstance(e, Progress) for e in reply.events)


def _pulled(message: Message) -> Message:
    """With the weights that a `Load` names: fetched here, beside the engine, which takes them between two steps."""
    if not isinstance(message, Load):
        return message
    tensors = as_tensors(ray.get(message.ref.handle))
    return Load(WeightsRef(message.ref.version, "copy", tensors), message.running)


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """Name -> dtype, shape and bytes: Ray's store keeps numpy arrays as they are, and they are read there."""
    return {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in tensors.items()
    }


def as_tensors(arrays: Mapping[str, tuple[str, tuple[int, ...], Any]]) -> dict[str, torch.Tensor]:
    """What `as_arrays` was given; in memory that may only be read."""
    found: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, (dtype, shape, values) in arrays.items():
            flat = torch.from_numpy(np.asarray(values)).view(getattr(torch, dtype))
            found[name] = flat.reshape(shape)
    return found
