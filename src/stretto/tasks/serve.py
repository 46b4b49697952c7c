"""The inside of a reward worker process: jobs in, scores out, until the parent closes the channel.

The parent sends pickles (its own, over a socket pair that nobody else holds); the worker answers in JSON, so that
nothing a user's function does here can make the parent unpickle.
"""

from __future__ import annotations

import faulthandler
import json
import pickle
import queue
import sys
from collections.abc import Callable, Sequence
from typing import Any

from stretto.errors import StrettoError
from stretto.spawn import connect
from stretto.tasks.calls import Failure, guarded
from stretto.tasks.imports import last_line
from stretto.tasks.rewards import RewardSpec, Sample, Scorer, SplitBatch

STDERR = 2


def main(descriptor: int) -> None:
    """Serve on the socket `descriptor`, until the parent closes it."""
    send_bytes, inbox = connect(descriptor)

    def send(message: dict[str, Any]) -> None:
        send_bytes(json.dumps(message).encode())

    try:
        spec, timeout = pickle.loads(inbox.get())  # noqa: S301 -- from our own parent
        scorer = Scorer(spec)
    except BaseException as error:  # noqa: BLE001 -- importing a user's module may raise anything
        send({"failed": str(error) if isinstance(error, StrettoError) else last_line(error)})
        return
    send({"ready": True, "batched": scorer.batched})
    Worker(spec, scorer, timeout, send).run(inbox)


class Worker:
    """Answers jobs, announcing each call of user code first, so that the parent knows what to blame."""

    def __init__(
        self, spec: RewardSpec, scorer: Scorer, timeout: float, send: Callable[[dict[str, Any]], None]
    ) -> None:
        self.spec = spec
        self.scorer = scorer
        self.timeout = timeout
        self.send = send

    def run(self, inbox: queue.SimpleQueue[bytes]) -> None:
        while True:
            kind, jobs = pickle.loads(inbox.get())  # noqa: S301 -- from our own parent
            if kind == "observe":
                self.observe(*jobs[0])
            else:
                self.score(jobs)
            for stream in (sys.stdout, sys.stderr):
                guarded("flush", stream.flush)

    def announce(self, serials: Sequence[int], name: str) -> None:
        """Say what is called and start the clock. It runs in C: also while a regular expression holds the GIL,
        and also when the parent is dead.
        """
        self.send({"call": name, "jobs": list(serials)})
        faulthandler.dump_traceback_later(self.timeout, exit=True, file=STDERR)

    def score(self, jobs: Sequence[tuple[int, str, list[int], bytes]]) -> None:
        """All of `jobs` (serial, completion, token ids, pickled row) are one call of each function."""
        samples: dict[int, Sample] = {}
        for serial, completion, token_ids, pickled in jobs:
            row = guarded("reading the row", lambda pickled=pickled: pickle.loads(pickled))  # type: ignore[misc]  # noqa: S301
            if isinstance(row, Failure):
                self.fail(serial, row)
            else:
                samples[serial] = Sample(completion, token_ids, row)
        if not samples:
            return
        serials = list(samples)
        try:
            scores = self.scorer.score(list(samples.values()), lambda name: self.announce(serials, name))
        except SplitBatch as split:
            self.send({"split": str(split), "jobs": serials})
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
        for serial, score in zip(serials, scores, strict=True):
            answer = {"reward": score.reward, "parts": dict(score.parts)}
            self.send({"job": serial, "status": score.status, "message": score.message, **answer})

    def observe(self, serial: int, completion: str, turn: int, pickled: bytes) -> None:
        self.announce([serial], "task.observe")
        text = guarded(
            "task.observe",
            lambda: self.spec.task.observe(completion, pickle.loads(pickled), turn),  # noqa: S301
        )
        faulthandler.cancel_dump_traceback_later()
        if isinstance(text, Failure):
            self.fail(serial, text)
        elif text is not None and not isinstance(text, str):
            self.fail(
                serial, Failure("error", f"task.observe returned a {type(text).__name__}, not text or None")
            )
        else:
            self.send({"job": serial, "status": "ok", "message": "", "text": text})

    def fail(self, serial: int, failure: Failure) -> None:
        self.send({"job": serial, "status": failure.status, "message": failure.message})
