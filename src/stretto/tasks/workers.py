"""Reward workers: score responses in spawned processes, with a timeout that kills.

`submit` returns at once; each job is answered by exactly one event, posted from a background thread. What a
user's function does (raise, hang, fork, exit, print without end) costs at most its own job: the reward is then
NaN with a status and a message, never silently a number.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, cast

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from stretto.config import RewardConfig
from stretto.errors import StrettoError
from stretto.records import Event, IntArray, Observed, RewardStatus, Scored
from stretto.tasks import Row
from stretto.tasks.calls import Failure
from stretto.tasks.imports import last_line
from stretto.tasks.process import WorkerLost, WorkerProcess
from stretto.tasks.rewards import RewardSpec

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0  # seconds to import the user's modules
GRACE = 0.5  # seconds in which a worker whose time is up may report where it was
MAX_BATCH = 32  # completions in one call of a function that takes several
MAX_LINES = 1000  # of the workers' output that are logged
MAX_FAILURES = 5  # failed rewards whose reason is logged

Post = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A finished response to be scored; answered by `Scored`."""

    id: int
    completion: str  # everything after the prompt
    token_ids: IntArray | Sequence[int]  # (N,)
    row: Row
    attempt: int = 0  # of the response; the answer carries it


@dataclass(frozen=True, slots=True)
class TurnJob:
    """A finished turn that the environment is to answer (`MultiTurnTask.observe`); answered by `Observed`."""

    id: int
    completion: str
    row: Row
    turn: int  # from 0
    attempt: int = 0


@dataclass(slots=True)
class Waiting:
    """A job on its way, under a serial number of its own: two ledgers may use the same ids."""

    serial: int
    job: Job | TurnJob
    post: Post
    alone: bool  # not to be put into a batch (again)


class RewardWorkers:
    """`config.workers` processes, each with a scorer built from `spec`; started, and ready, on return.

    `post` receives the events; `encode` turns an environment's text into the token ids to append (multi-turn).
    A job whose call ran out of time or killed its worker is answered so, and the worker is started again. If
    that happened in a call for several completions, each of them is tried once more alone.

    Raises:
        StrettoError: a reward function cannot be imported, sent to a process, or fits no form.
    """

    def __init__(
        self,
        spec: RewardSpec,
        config: RewardConfig,
        post: Post,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        self.post = post
        self.encode = encode
        self.timeout = config.timeout
        self.size = config.workers
        self.payload = pack_spec(spec, config.timeout)
        self.multi_turn = callable(
            getattr(spec.task, "observe", None)
        )  # its environment answers between turns
        self.queue: deque[Waiting] = deque()
        self.changed = threading.Condition()
        self.closing = False
        self.batched = False
        self.serials = 0
        self.counts: Counter[str] = Counter()  # since the last `metrics()`
        self.totals: Counter[str] = Counter()
        self.reasons: set[str] = set()  # of failed rewards, that were said
        self.failed_turns: dict[tuple[Post, int, int], Failure] = {}
        self.processes: dict[int, WorkerProcess] = {}
        started: list[Future[None]] = [Future() for _ in range(self.size)]
        self.threads = [
            threading.Thread(target=self.serve, args=(index, ready), name=f"reward-{index}", daemon=True)
            for index, ready in enumerate(started)
        ]
        for thread in self.threads:
            thread.start()
        try:
            for ready in started:
                ready.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, jobs: Sequence[Job], post: Post | None = None) -> None:
        """Score these; the events go to `post` where another target than the pool's own is meant (evaluation)."""
        target = post or self.post
        for job in jobs:
            failure = self.failed_turns.pop((target, job.id, job.attempt), None)
            if failure is not None:
                self.answer(Waiting(-1, job, target, True), failure)
            else:
                self.enqueue(job, target)

    def submit_turns(self, jobs: Sequence[TurnJob], post: Post | None = None) -> None:
        """Ask the environment. Where it fails the turn is `done`, and the score that follows carries the failure."""
        if self.encode is None:
            raise StrettoError(
                "reward workers: a multi-turn task needs a function that encodes the environment's text"
            )
        for job in jobs:
            self.enqueue(job, post or self.post)

    def enqueue(self, job: Job | TurnJob, post: Post) -> None:
        with self.changed:
            if self.closing:
                raise StrettoError("reward workers: closed")
            self.queue.append(Waiting(self.serials, job, post, isinstance(job, TurnJob)))
            self.serials += 1
            self.changed.notify()

    def metrics(self) -> dict[str, float]:
        """Since the last call: scores by status, jobs tried again alone, workers restarted."""
        with self.changed:
            counts, self.counts = self.counts, Counter()
        names = ("ok", "error", "timeout", "invalid", "retried", "restarted")
        return {f"reward/{name}": float(counts[name]) for name in names}

    def close(self) -> None:
        """Kill all workers, with what they started, and wait for them. Jobs that were not answered are not."""
        with self.changed:
            self.closing = True
            self.queue.clear()
            self.changed.notify_all()
            processes = list(self.processes.values())
        for process in processes:
            process.kill()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()

    # ---- the background threads, one for each worker --------------------------------------------------

    def serve(self, index: int, ready: Future[None]) -> None:
        try:
            self.start(index)
        except BaseException as error:  # noqa: BLE001 -- raised again in the constructor
            ready.set_exception(error)
            return
        ready.set_result(None)
        while (batch := self.take()) is not None:
            self.work(index, batch)
        self.drop(index)

    def start(self, index: int) -> WorkerProcess:
        """A worker that has imported all it needs.

        Raises:
            StrettoError: it could not.
        """
        with self.changed:
            if self.closing:
                raise StrettoError("reward workers: closed")
            process = self.processes[index] = WorkerProcess(self.show)
        try:
            process.hand_over(self.payload, START_TIMEOUT)
            reply = process.answer(time.monotonic() + START_TIMEOUT)
        except WorkerLost as lost:
            reply = {"failed": f"reward.functions: while it imported the reward functions, {lost}"}
        if reply is None:
            reply = {"failed": f"reward.functions: importing them took more than {START_TIMEOUT:.0f} s"}
        if "failed" in reply:
            self.drop(index)
            raise StrettoError(str(reply["failed"]))
        self.batched = bool(reply["batched"])
        return process

    def drop(self, index: int) -> None:
        with self.changed:
            process = self.processes.pop(index, None)
        if process is not None:
            process.close()

    def take(self) -> list[Waiting] | None:
        """The next jobs for one worker: several if they can be one call. None: the pool is closing."""
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.closing)
            if self.closing:
                return None
            share = min(MAX_BATCH, math.ceil(len(self.queue) / self.size)) if self.batched else 1
            batch = [self.queue.popleft()]
            while len(batch) < share and self.queue and not (batch[0].alone or self.queue[0].alone):
                batch.append(self.queue.popleft())
            return batch

    def work(self, index: int, batch: Sequence[Waiting]) -> None:
        """See to it that every job of `batch` is answered or queued again."""
        waiting = {item.serial: item for item in batch}
        try:
            failure = self.converse(index, waiting)
        except StrettoError as error:
            failure = Failure("error", f"the reward worker could not be started again: {error}")
        except Exception as error:  # noqa: BLE001 -- whatever it is, a job without an answer is waited for for ever
            failure = Failure("error", f"the reward worker could not be reached: {last_line(error)}")
        if failure is None or self.closing:
            return
        self.drop(index)
        if len(waiting) > 1:
            self.retry(list(waiting.values()), failure.message)
        for item in waiting.values() if len(waiting) == 1 else ():
            self.answer(item, failure)

    def converse(self, index: int, waiting: dict[int, Waiting]) -> Failure | None:
        """Have the worker answer `waiting`, which shrinks; or why it did not, and must be killed.

        Raises:
            StrettoError: the worker had to be started again and could not.
        """
        message = self.pack_jobs(waiting)
        if not waiting:
            return None
        process = self.processes.get(index)
        if process is None or not process.alive:
            self.drop(index)
            self.count("restarted")
            process = self.start(index)
        call = "taking the job over"
        until = time.monotonic() + self.timeout + GRACE
        try:
            process.hand_over(message, self.timeout)
            while waiting:
                reply = process.answer(until)
                if reply is None:
                    return Failure("timeout", f"{call} took more than {self.timeout:g} s{process.stuck_at()}")
                if "call" in reply:
                    call, until = str(reply["call"]), time.monotonic() + self.timeout + GRACE
                elif "split" in reply:
                    self.retry(list(waiting.values()), str(reply["split"]))
                    return None
                else:
                    self.accept(waiting[int(reply["job"])], reply)
                    del waiting[int(reply["job"])]
        except WorkerLost as lost:
            if process.timer_went_off:
                return Failure("timeout", f"{call} took more than {self.timeout:g} s{process.stuck_at()}")
            return Failure("error", f"{call}: {lost}")
        return None

    def pack_jobs(self, waiting: dict[int, Waiting]) -> bytes:
        """The message for these jobs, all of one kind; those whose row cannot be sent are answered and taken out."""
        kind = "score"
        packed: list[tuple[int, str, object, bytes]] = []
        for serial, item in list(waiting.items()):
            job = item.job
            try:
                row = pickle.dumps(dict(job.row))
            except Exception as error:  # noqa: BLE001 -- pickling runs the row's own code
                self.answer(
                    waiting.pop(serial), Failure("error", f"the row cannot be sent to a process: {error}")
                )
                continue
            if isinstance(job, TurnJob):
                kind = "observe"
                packed.append((serial, job.completion, job.turn, row))
            else:
                packed.append((serial, job.completion, np.asarray(job.token_ids).tolist(), row))
        return pickle.dumps((kind, packed))

    def retry(self, items: Sequence[Waiting], why: str) -> None:
        """Queue the members of a failed call again, each to be called alone."""
        if self.count("retried", len(items)) == len(items):
            logger.warning(
                "a reward call for %d responses together failed (%s); each of them is tried again alone "
                "(said once; counted in reward/retried)",
                len(items),
                why,
            )
        with self.changed:
            self.queue.extendleft(
                Waiting(item.serial, item.job, item.post, alone=True) for item in reversed(items)
            )
            self.changed.notify(len(items))

    def accept(self, item: Waiting, reply: dict[str, Any]) -> None:
        """Post what the worker says about one job."""
        status = cast(RewardStatus, reply["status"])
        if status != "ok" and (isinstance(item.job, TurnJob) or "reward" not in reply):
            self.answer(item, Failure(cast(Literal["error"], status), str(reply["message"])))
        elif isinstance(item.job, TurnJob):
            text = reply["text"]
            token_ids = np.asarray(self.encode(text) if text is not None and self.encode else (), np.int64)
            item.post(Observed(item.job.id, item.job.attempt, token_ids, done=text is None))
        else:
            self.count(status)
            if status != "ok":
                self.explain(status, str(reply["message"]))
            said = (float(reply["reward"]), status, reply["parts"], str(reply["message"]))
            item.post(Scored(item.job.id, item.job.attempt, *said))

    def answer(self, item: Waiting, failure: Failure) -> None:
        """Post that there is no reward for this job, and why. A failed turn says it when it is scored."""
        if isinstance(item.job, TurnJob):
            self.failed_turns[item.post, item.job.id, item.job.attempt] = failure
            item.post(Observed(item.job.id, item.job.attempt, np.empty(0, np.int64), done=True))
        else:
            self.count(failure.status)
            self.explain(failure.status, failure.message)
            item.post(Scored(item.job.id, item.job.attempt, math.nan, failure.status, {}, failure.message))

    def count(self, name: str, by: int = 1) -> int:
        with self.changed:
            self.counts[name] += by
            self.totals[name] += by
            return self.totals[name]

    def explain(self, status: str, reason: str) -> None:
        """Log why a response has no reward: the first `MAX_FAILURES` reasons, each once."""
        with self.changed:
            if reason in self.reasons or len(self.reasons) >= MAX_FAILURES:
                return
            self.reasons.add(reason)
            last = len(self.reasons) == MAX_FAILURES
        logger.warning(
            "a response has no reward (%s): %s (said once; counted in reward/%s)%s",
            status,
            reason,
            "timeouts" if status == "timeout" else "errors",
            "; further reasons are not shown" if last else "",
        )

    def show(self, line: str) -> None:
        """Log a line that a reward printed, up to `MAX_LINES` of them."""
        lines = self.count("lines")
        if lines <= MAX_LINES:
            logger.info("reward worker: %s", line)
        if lines == MAX_LINES:
            logger.warning("reward workers printed %d lines; what else they print is not shown", MAX_LINES)


def pack_spec(spec: RewardSpec, timeout: float) -> bytes:
    """What a worker is started with. cloudpickle sends functions of notebooks and scripts by value.

    Raises:
        StrettoError: something in it cannot leave this process; names it.
    """
    for part in (spec.task, *spec.functions, dict(spec.args)):
        try:
            cloudpickle.dumps(part)
        except Exception as error:
            raise StrettoError(
                f"reward.functions: {part!r} cannot be sent to a reward worker process: {error}; "
                "create what it holds (a client, a lock, a model) inside the function or its module"
            ) from error
    return cast(bytes, cloudpickle.dumps((spec, timeout)))
