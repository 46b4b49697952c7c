"""The learner in a thread of its own, beside the loop: for fleets that generate without this process's help."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from stretto.learn.learner import Learner
from stretto.learn.sharded import ShardedLearner
from stretto.records import Event, UpdateBatch
from stretto.weights import WeightsRef

PATIENCE = 10.0  # seconds that a closed learner is waited for


class BackgroundLearner:
    """`learner`, whose updates are made in a thread: `begin` and `accumulate` hand their batch over and return.

    `publish` gives the weights of the newest finished version, whatever the thread is at: they are copied once per
    version, in the thread, before `Updated` is posted, and kept until the next one's are. (A file written at the
    publication would save that memory, but the first publication of a version may come when its successor is under
    way: a schedule need not publish before it harvests.)

    The thread is idle from `Updated` to the next `begin` or `accumulate`: in between, `learner` itself may be used. Of
    parts that are being accumulated nothing is to be seen in weights or optimizer.

    `Updated` says in `time/trainer` for how many seconds of `now` the thread was at the update and its parts.
    """

    def __init__(
        self,
        learner: Learner | ShardedLearner,
        post: Callable[[Event], None],
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._learner, self._post, self._now = learner, post, now
        self._seconds = 0.0  # of work for the next `Updated`
        self._inbox: queue.SimpleQueue[UpdateBatch | None] = queue.SimpleQueue()
        self._changed = threading.Lock()  # guards all that follows
        self._published: WeightsRef | None = None
        self._owed = 0  # batches that were handed over and have not been dealt with
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="learner", daemon=True)
        self._thread.start()

    def begin(self, batch: UpdateBatch) -> None:
        self._hand_over(batch)

    def accumulate(self, batch: UpdateBatch) -> None:
        self._hand_over(batch)

    def _hand_over(self, batch: UpdateBatch) -> None:
        self.publish()  # the first version's, which nobody has copied yet
        with self._changed:
            self._owed += 1
        self._inbox.put(batch)

    def publish(self) -> WeightsRef:
        """The weights of the newest finished version."""
        with self._changed:
            if self._published is None:
                self._published = self._learner.publish()
            return self._published

    def expecting(self) -> bool:
        """Whether an update, or a part of one, is being made. Raises what has ended the thread, if something has."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return self._owed > 0

    def close(self) -> None:
        """Give up what was handed over. What the thread is at it may end, if that is soon."""
        with self._changed:
            self._closing = True
        self._inbox.put(None)
        self._thread.join(PATIENCE)

    def _work(self) -> None:
        try:
            while (batch := self._inbox.get()) is not None and not self._closing:
                self._learn(batch)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the loop is to raise it
            with self._changed:
                self._failure = error

    def _learn(self, batch: UpdateBatch) -> None:
        began = self._now()
        if not batch.final:
            self._learner.accumulate(batch)
            self._seconds += self._now() - began
            with self._changed:
                self._owed -= 1
            return
        updated = self._learner.update(batch)
        newest = self._learner.publish()
        seconds, self._seconds = self._seconds + self._now() - began, 0.0
        updated.metrics = {**updated.metrics, "time/trainer": seconds}
        # In one go: who gets the new weights finds `Updated` in the inbox, before anything that comes of them.
        with self._changed:
            self._published = newest
            self._post(updated)
            self._owed -= 1
