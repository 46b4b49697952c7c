"""The inbox and the clock. `wait` is the only call in which time passes, live or simulated."""

from __future__ import annotations

import itertools
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from types import FrameType
from typing import Protocol

from stretto.records import Event, Interrupted, Timer


class Runtime(Protocol):
    """Where every result arrives, and what time it is."""

    def now(self) -> float:
        """Seconds since the run began, not counting the time between a stop and its resume."""

    def post(self, event: Event) -> None:
        """Put an event into the inbox; safe from any thread."""

    def wait(self, until: float | None) -> list[Event]:
        """Events in order of arrival, at least one; a `Timer` if `until` comes first.

        Raises RuntimeError if nothing can ever arrive.
        """


class Local(Protocol):
    """Engines of this process: somebody has to step them."""

    def busy(self) -> bool:
        """Whether a step would do something."""

    def step(self) -> list[Event]:
        """Make one step and return its events, perhaps none."""


class LiveRuntime:
    """Monotonic clock and a thread-safe queue; engines of this process are stepped while the queue is empty.

    `expecting` says whether something outside this thread still owes an event (a reward, say): without it a
    schedule that has come to a stand would be waited for for ever.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.local: Local | None = None
        self.expecting: Callable[[], bool] = lambda: False

    def now(self) -> float:
        return time.monotonic() - self._start

    def continue_from(self, elapsed: float) -> None:
        """Set the clock to `elapsed` seconds: a resumed run's time goes on where it was saved."""
        self._start = time.monotonic() - elapsed

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    def wait(self, until: float | None = None) -> list[Event]:
        while True:
            busy = self.local is not None and self.local.busy()
            events = self._arrived(block=not busy, until=until)
            if not events and self.local is not None and busy:
                events = self.local.step()
            if events:
                return events
            if until is not None and self.now() >= until:
                return [Timer()]

    def _arrived(self, block: bool, until: float | None) -> list[Event]:
        """Everything in the inbox; `block` waits a little for a first event."""
        events: list[Event] = []
        if block and not self.expecting() and until is None and self._inbox.empty():
            raise RuntimeError("nothing is running and nothing is expected: the schedule has come to a stand")
        try:
            if block:
                # Short naps: a signal handler cannot wake a thread blocked in a queue on every platform.
                nap = 0.2 if until is None else max(0.0, min(0.2, until - self.now()))
                events.append(self._inbox.get(timeout=nap))
            while True:
                events.append(self._inbox.get_nowait())
        except queue.Empty:
            return events

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM become an `Interrupted` event; a second one raises KeyboardInterrupt at once.

        Outside the main thread, where Python allows no handlers, signals are left as they are.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outer = signal.getsignal(signal.SIGINT)
        seen = outer.seen if isinstance(outer, _Handler) else []  # within a run's evaluation
        handler = _Handler(self.post, seen)
        before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)


class _Handler:
    """Posts the first signal; raises KeyboardInterrupt at the second."""

    def __init__(self, post: Callable[[Event], None], seen: list[int]) -> None:
        self.post, self.seen = post, seen

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen.append(number)
        self.post(Interrupted(number))


class SimulatedRuntime:
    """A virtual clock over a heap: `wait` leaps to the next moment at which something happens."""

    def __init__(self) -> None:
        self.time = 0.0  # what `now()` says
        self.called = -1  # the number of the call that is being made
        self._order = itertools.count()
        self._heap: list[tuple[float, int, list[Event] | Callable[[], list[Event]]]] = []
        self._soon: list[Callable[[], None]] = []

    def now(self) -> float:
        return self.time

    def post(self, event: Event, delay: float = 0.0) -> None:
        self.deliver(self.time + delay, [event])

    def deliver(self, when: float, events: list[Event]) -> None:
        """These events arrive at that time, together."""
        heappush(self._heap, (max(when, self.time), next(self._order), events))

    def call_at(self, when: float, tick: Callable[[], list[Event]]) -> int:
        """Call `tick` at that time; what it returns arrives then. Returns the call's number (see `called`)."""
        number = next(self._order)
        heappush(self._heap, (when if when > self.time else self.time, number, tick))
        return number

    def soon(self, call: Callable[[], None]) -> None:
        """Call it before time goes on: once for all that is said to an engine at one moment."""
        self._soon.append(call)

    def wait(self, until: float | None = None) -> list[Event]:
        heap = self._heap
        events: list[Event] = []
        while not events:
            if self._soon:
                for call in self._soon:  # and what they add
                    call()
                self._soon.clear()
            if not heap or (until is not None and heap[0][0] > until):
                if until is None:
                    raise RuntimeError("nothing is left to happen: the schedule has come to a stand")
                self.time = max(self.time, until)
                return [Timer()]
            self.time = now = heap[0][0]
            while heap and heap[0][0] == now:
                _, self.called, item = heappop(heap)
                events += item if type(item) is list else item()  # type: ignore[operator]
        return events
