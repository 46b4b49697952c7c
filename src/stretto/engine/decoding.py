"""The responses in a simulated engine's slots, and how time passes for them.

All of them advance one step at a time together, so what happens next is the smallest of their last steps, which a list
holds in order. A step takes `base + per_token * V + per_context * C` seconds with V tokens computed and C
entries of K/V read; C grows by the same amount each step, so the time of n steps is a quadratic in n and nothing is
done in between.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from math import ceil, sqrt
from types import MappingProxyType

from stretto.engine.responses import NOT_ENDED, Response, Span, kept_prefix
from stretto.records import Event, Finished, FinishReason, Request, Scored, Stopped

ORDER_BITS = 40
"""Of the number by which a response is known: above them its last step, in them how many had entered before it."""
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
NO_PARTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step: `base`, for each token computed in it, for each K/V entry read, for each token prefilled.

    Prefill is also what recomputed K/V and the one pass over a dropped response's old tokens cost.
    """

    base: float = 0.01
    per_token: float = 0.001
    per_context: float = 0.0
    per_prefill: float = 0.0


@dataclass(slots=True)
class Counters:
    """What `metrics` tells: counts, tokens, and seconds."""

    steps: int = 0
    decode_tokens: float = 0.0
    decode_steps: int = 0  # steps times the responses in them
    drafted_tokens: float = 0.0
    prefill_tokens: float = 0.0
    recomputed_tokens: float = 0.0
    reverified_tokens: float = 0.0
    reverified_kept: int = 0
    preemptions: int = 0
    busy_slot_seconds: float = 0.0
    step_seconds: float = 0.0
    sync_seconds: float = 0.0
    available_slot_seconds: float = 0.0
    up_seconds: float = 0.0


COUNTERS = tuple(counter.name for counter in fields(Counters))


class Decoding:
    """What an engine is made of, without commands and clock (`SimulatedEngine` says what the arguments mean).

    `_boundary` is when the last step made ends; nothing here looks at what time it is.
    """

    # A large cluster's engines are looked at in turn, each time from main memory: so they are kept small.
    __slots__ = (
        "_begun", "_boundary", "_context", "_counters", "_drafted", "_ends", "_entries", "_events", "_extra", "_first",
        "_free", "_groups", "_growth", "_queue", "_rate", "_reports", "_running", "_step", "_step_end", "_stepping",
        "_target", "agreement", "cost", "kv_tokens", "length", "nodes", "score", "slots", "spans", "speed", "version",
        "worker",
    )  # fmt: skip

    def __init__(
        self,
        length: Callable[[Request], int],
        worker: int,
        slots: int,
        cost: StepCost,
        kv_tokens: int | None,
        speed: Callable[[Request], float] | None,
        nodes: Callable[[Request], float] | None,
        agreement: float,
        score: Callable[[Request], float] | None,
        spans: list[Span] | None,
    ) -> None:
        self.length = length
        self.worker = worker
        self.slots = slots
        self.version = 0
        self.cost = cost
        self.kv_tokens = kv_tokens
        self.speed = speed
        self.nodes = nodes
        self.agreement = agreement
        self.score = score
        self.spans = spans
        self._counters = Counters()
        self._boundary = 0.0  # perhaps a little in the future
        self._step_end = 0.0  # likewise, without the waiting for weights or the trainer after it
        self._stepping = 0  # responses in that step
        self._clear()

    def _clear(self) -> None:
        self._queue: deque[Response] = deque()
        self._running: dict[int, Response] = {}  # by `end`, in order of entering
        self._groups: dict[int, int] = {}  # group -> members running: its prompt is held once
        self._begun: set[int] = set()  # groups whose prompt the next step computes, by their first member
        self._ends: list[int] = []  # `end` of what runs, ascending
        self._free = list(range(self.slots - 1, -1, -1))
        self._step = self._target = self._entries = 0
        self._context = 0.0  # K/V entries held
        self._rate = self._drafted = 0.0  # tokens, and nodes verified, per step, all together
        # Seconds of the next step without prefill, and by how much each later one takes longer.
        self._first = self._growth = 0.0
        self._extra = 0.0  # seconds that the next step takes longer: prefill
        self._reports: list[tuple[int, int, int]] = []  # id, attempt, new tokens of the version at hand
        self._events: list[Event] = []

    # ---- steps --------------------------------------------------------------------------------------

    def _aim(self) -> float:
        """Plan to go on until a response ends, or memory is full; returns when that will be. Something must run."""
        cost, running = self.cost, len(self._running)
        steps = (self._ends[0] >> ORDER_BITS) - self._step
        if self.kv_tokens is not None and running > 1:
            room = int((self.kv_tokens - self._context) / self._rate)
            if room < steps:
                steps = room
        if steps < 1:
            steps = 1
        self._target = self._step + steps
        first = cost.base + cost.per_token * (running + self._drafted) + cost.per_context * self._context
        growth = cost.per_context * self._rate
        self._first, self._growth = first, growth
        return self._boundary + self._extra + steps * (first + 0.5 * growth * (steps - 1))

    def _steps_until(self, when: float) -> int:
        """How many steps until one ends at `when` or later; at most as many as were planned."""
        left = when - self._boundary - self._extra
        half = self._first - 0.5 * self._growth
        steps = 1
        if left > 0:
            steps = ceil(2.0 * left / (half + sqrt(half * half + 2.0 * self._growth * left)) - 1e-9)
        return min(max(1, steps), self._target - self._step)

    def _advance(self, steps: int) -> None:
        if steps <= 0:
            return
        seconds = self._extra + steps * (self._first + 0.5 * self._growth * (steps - 1))
        running = len(self._running)
        emitted = steps * self._rate
        if self._begun:
            self._begun.clear()
        self._extra = 0.0
        self._first += steps * self._growth
        self._step += steps
        self._context += emitted
        self._boundary += seconds
        self._step_end, self._stepping = self._boundary, running
        counters = self._counters
        counters.steps += steps
        counters.decode_steps += steps * running
        counters.decode_tokens += emitted
        counters.drafted_tokens += steps * self._drafted
        counters.step_seconds += seconds
        counters.busy_slot_seconds += seconds * running

    # ---- responses ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        queue, free, kv_tokens = self._queue, self._free, self.kv_tokens
        while queue and free:
            response = queue.popleft()
            request, group = response.request, response.request.group
            siblings = self._groups.get(group, 0)
            prompt = 0 if siblings else len(request.prompt_ids)
            if kv_tokens is not None and self._running:
                needed = self._context + self._rate + prompt + response.held + 1
                if needed > 0.99 * kv_tokens:
                    queue.appendleft(response)
                    return
            if prompt:
                self._begun.add(group)
            response.late = not prompt and group in self._begun
            before = self._extra
            if prompt or response.held:
                self._counters.prefill_tokens += prompt + response.held
                self._prefill(prompt + response.held)
            if not response.limit:
                self._decide(response)
            held, limit, speed = response.held, response.limit, response.speed
            if held < limit:
                response.held = held = held + 1  # the first step's
            response.extra = self._extra - before
            self._groups[group] = siblings + 1
            response.entered = entered = self._step + response.late
            response.slot = free.pop()
            response.since = self._boundary
            self._context += prompt + held - response.late * speed
            self._rate += speed
            self._drafted += response.nodes
            last = entered + 1 + (limit - held if speed == 1.0 else ceil((limit - held) / speed - 1e-9))
            self._entries = entries = self._entries + 1
            response.end = end = last << ORDER_BITS | entries
            self._running[end] = response
            insort(self._ends, end)

    def _decide(self, response: Response) -> None:
        """How long it will be, and how much of its old tokens is sampled again."""
        request = response.request
        whole, most = self.length(request), request.sampling.max_new_tokens
        limit, response.reason = (whole, STOP) if whole <= most else (most, LENGTH)
        held = response.held
        response.limit = limit if limit > held else held  # it may have been stopped with its last token
        if self.speed is not None:
            response.speed = self.speed(request)
        if self.nodes is not None:
            response.nodes = self.nodes(request)
        if self.agreement > 0.0 and (old := len(request.draft_ids) - response.held) > 0:
            self._counters.reverified_tokens += old
            self._prefill(old)
            most = max(0, min(old, response.limit - response.held - 1))
            kept = kept_prefix(self.agreement, request.key, self.version, most)
            response.held += kept
            self._counters.reverified_kept += kept
        chunk = request.max_new
        if chunk is not None and response.reported + chunk < response.limit:
            response.limit, response.reason = response.reported + chunk, NOT_ENDED
            response.held = min(response.held, response.limit - 1)

    def _leave(self, response: Response, why: str) -> None:
        request = response.request
        del self._running[response.end]
        self._ends.remove(response.end)
        self._free.append(response.slot)
        left = self._groups.pop(request.group) - 1
        if left:
            self._groups[request.group] = left
        if response.entered - response.late == self._step:  # its first step was never made
            self._extra -= response.extra
        if not self._running:
            self._context = self._rate = self._drafted = 0.0
        else:
            own = response.held + response.speed * (self._step - response.entered)
            self._context -= own + (0 if left else len(request.prompt_ids))
            self._rate -= response.speed
            self._drafted -= response.nodes
        if self.spans is not None:
            tokens = response.tokens(self._step)
            self.spans.append(
                Span(self.worker, response.slot, response.since, self._boundary, request.id, tokens, why)
            )

    def _release_due(self) -> None:
        due, ends = (self._step + 1) << ORDER_BITS, self._ends
        while ends and ends[0] < due:
            response = self._running[ends[0]]
            request, reason, new = response.request, response.reason, response.limit - response.reported
            request_id, attempt = request.id, request.attempt
            if new > 0:
                self._reports.append((request_id, attempt, new))
                response.reported = response.limit
            self._leave(response, reason or "stopped")
            if reason:
                self._events.append(Finished(self.worker, request_id, attempt, reason))
                if self.score is not None:
                    self._events.append(Scored(request_id, attempt, self.score(request), "ok", NO_PARTS))
            else:
                self._events.append(Stopped(self.worker, request_id, attempt))

    def _preempt(self) -> None:
        """Where the next step's K/V would not fit, the newest responses wait and are recomputed."""
        assert self.kv_tokens is not None
        while len(self._running) > 1 and self._context + self._rate > self.kv_tokens:
            response = next(reversed(self._running.values()))
            tokens = response.tokens(self._step)
            self._report([response])
            self._leave(response, "preempted")
            response.held = tokens
            self._queue.appendleft(response)
            self._counters.preemptions += 1

    def _prefill(self, tokens: float) -> None:
        self._extra += self.cost.per_prefill * tokens

    def _report(self, responses: Iterable[Response]) -> None:
        """Note the tokens that are not told yet."""
        step, reports = self._step, self._reports
        for response in responses:
            new = response.tokens(step) - response.reported
            if new > 0:
                request = response.request
                reports.append((request.id, request.attempt, new))
                response.reported += new
