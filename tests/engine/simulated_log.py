"""What tests of the simulated engine share: requests, and everything that an engine tells until nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stretto.engine.simulated import SimulatedEngine, StepCost
from stretto.records import Event, Finished, Leapt, Progress, Request, SamplingParams, Stopped
from stretto.runtime import SimulatedRuntime

COST = StepCost(base=0.01, per_token=0.002, per_context=0.0001, per_prefill=0.0005)


def request(number: int, tokens: int = 0, draft: int = 0, prompt: int = 4, **values: Any) -> Request:
    return Request(
        id=number,
        attempt=1,
        group=values.pop("group", number),
        prompt_ids=np.zeros(prompt, np.int64),
        token_ids=np.zeros(tokens, np.int64),
        turn_start=0,
        key=number,
        sampling=SamplingParams(max_new_tokens=values.pop("limit", 10_000)),
        draft_ids=np.zeros(draft, np.int64),
        **values,
    )


def lengths(*all_lengths: int) -> Callable[[Request], int]:
    return lambda r: all_lengths[r.id]


class Log:
    """Everything that arrives until nothing is left to happen."""

    def __init__(self, runtime: SimulatedRuntime, engine: SimulatedEngine) -> None:
        self.runtime, self.engine = runtime, engine
        self.events: list[tuple[float, Event]] = []

    def run(self) -> Log:
        while True:
            try:
                events = self.runtime.wait()
            except RuntimeError:
                return self
            self.events += [(self.runtime.now(), event) for event in events]

    def at(self, when: float, command: Callable[[], None]) -> None:
        def tick() -> list[Event]:
            command()
            return []

        self.runtime.call_at(when, tick)

    def tokens(self) -> dict[int, int]:
        total: dict[int, int] = {}
        for _, event in self.events:
            if isinstance(event, Progress):
                for number, count in zip(event.ids.tolist(), event.counts.tolist(), strict=True):
                    total[number] = total.get(number, 0) + count
            elif isinstance(event, Leapt):
                total[event.id] = total.get(event.id, 0) + event.count
        return total

    def ends(self) -> dict[int, tuple[float, str]]:
        return {
            event.id: (when, event.reason if isinstance(event, Finished) else "stopped")
            for when, event in self.events
            if isinstance(event, (Finished, Stopped))
        }


def build(length: Callable[[Request], int], **values: Any) -> Log:
    runtime = SimulatedRuntime()
    return Log(runtime, SimulatedEngine(runtime, length, cost=values.pop("cost", COST), **values))
