"""A disk that fails at a chosen write, and the life of a run to try it on.

`python -m tests.faults.disk RUN K` lives that life and kills itself with SIGKILL inside the K-th write.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from stretto.records import Prompt, Rollout, State
from stretto.run_folder import RunFolder

STEPS = 3
CONFIG = 'name = "demo"\nsteps = 3\n'
OPERATIONS = (
    "open",
    "write",
    "fsync",
    "ftruncate",
    "mkdir",
    "rename",
    "replace",
    "symlink",
    "unlink",
    "rmdir",
)
TAKES_SPACE = ("open", "write", "fsync", "mkdir", "symlink")


class Killed(BaseException):
    """The process is dead: nothing that it does from here on reaches the disk."""


class Disk:
    """Counts the operations that change the disk; at number `at` (from 0) it does `fault`, once or from then on.

    A write that fails has written half of its bytes.
    """

    def __init__(
        self, at: int | None = None, fault: Callable[[], None] = lambda: None, full: bool = False
    ) -> None:
        self.at = at
        self.fault = fault
        self.full = full  # after the fault, everything that takes space fails too
        self.dead = False
        self.done: list[str] = []

    def perform(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...], keywords: Any) -> Any:
        if self.dead:
            raise Killed
        number = len(self.done)
        self.done.append(name)
        failing = number == self.at or (
            self.full and self.at is not None and number > self.at and name in TAKES_SPACE
        )
        if failing:
            if name == "write":
                operation(args[0], bytes(args[1])[: len(args[1]) // 2])
            try:
                self.fault()
            except Killed:
                self.dead = True
                raise
        if name == "fsync":
            return None  # no power fails here, and the tests would wait for the real disk
        return operation(*args, **keywords)

    @contextmanager
    def inserted(self) -> Iterator[None]:
        """Put this disk under the os module."""

        def wrap(name: str) -> Callable[..., Any]:
            operation = getattr(os, name)

            def wrapped(*args: Any, **keywords: Any) -> Any:
                if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                    return operation(*args, **keywords)
                return self.perform(name, operation, args, keywords)

            return wrapped

        with ExitStack() as patches:
            for name in OPERATIONS:
                patches.enter_context(mock.patch.object(os, name, wrap(name)))
            yield


def live(path: Path, saved: list[int]) -> None:
    """Create or resume the run at `path` and bring it to its last step, as a trainer does.

    The step of every checkpoint is appended to `saved` once it has been saved. The "weights" of a step depend on
    those of the step before, so a run that resumed from anything but a true checkpoint ends differently.
    """
    exists = (path / "config.toml").exists()
    with RunFolder.open(path, writable=True) if exists else RunFolder.create(path, CONFIG) as run:
        checkpoint = run.newest_checkpoint()
        step = checkpoint.step if checkpoint else 0
        weights = (checkpoint.folder / "model").read_bytes() if checkpoint else b"0"
        run.rewind(step if checkpoint else -1)
        if checkpoint:
            run.prune(keep=1, best=1)  # the killed writer may have come no further than its checkpoint
        while step < STEPS:
            step += 1
            weights += f" {step}".encode()
            run.append_metrics({"step": step, "loss": 1 / step})
            run.log_step(step, [rollout(step, n) for n in range(2)], [rollout(step, 0)])
            run.save_checkpoint(step, _writer(weights), [rollout(step, 9)], {"version": step, "seed": 0.1})
            saved.append(step)
            run.prune(keep=1, best=1)


def rollout(step: int, n: int) -> Rollout:
    return Rollout(
        request_id=10 * step + n,
        group_id=step,
        prompt=Prompt(n, f"uid{n}", 0, np.array([1, n]), {}),
        sample_index=n,
        visit=0,
        key=n,
        token_ids=np.arange(step),
        logprobs=np.full(step, -0.1),
        raw_logprobs=np.full(step, -0.1),
        versions=np.full(step, step - 1),
        loss_mask=np.ones(step, np.bool_),
        outcome=State.CONSUMED,
    )


def _writer(weights: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in ("model", "optimizer"):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
            try:
                os.write(descriptor, weights)
            finally:
                os.close(descriptor)

    return write


if __name__ == "__main__":
    with Disk(int(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL)).inserted():
        live(Path(sys.argv[1]), [])
