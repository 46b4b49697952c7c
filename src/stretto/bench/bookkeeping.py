"""What a run costs besides the model.

First, its share of an engine step: the real loop on the demo model, everything but the model's forward pass
and the drawing of tokens counted as bookkeeping (the engine's own, the ledger's and the schedule's). Then
ledger and schedule as a function of how many requests wait: an engine's part is played in full, with
responses that end at random, rewards, harvests and admissions, but no model is run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto.buffer import Ledger
from stretto.config import ModelConfig, ScheduleConfig
from stretto.engine.embedded import EmbeddedEngine
from stretto.model import load_model
from stretto.records import (
    Admit,
    Event,
    Finished,
    FinishReason,
    Harvest,
    Loaded,
    Progress,
    Prompt,
    Publish,
    Request,
    SamplingParams,
    Scored,
    Start,
    Updated,
    WorkerUp,
)
from stretto.schedule import make_schedule

SAMPLES = 8


class Play:
    """The real ledger and schedule with `waiting` requests in the ledger, around an engine of random
    numbers.
    """

    def __init__(self, waiting: int, slots: int, seed: int = 0) -> None:
        groups = waiting // SAMPLES
        # Pacing lets in what keeps about `waiting` requests in the ledger.
        config = ScheduleConfig(kind="async", prompts=4, samples=SAMPLES, max_staleness=groups // 4)
        self.schedule = make_schedule(config)
        self.ledger = Ledger(SamplingParams(max_new_tokens=1_000_000))
        self.slots = slots
        self.random = np.random.default_rng(seed)
        self.running: dict[int, Request] = {}
        self.admitted = 0
        self.inbox: list[Event] = [WorkerUp(0, slots, 0)]

    def turn(self) -> tuple[float, int]:
        """One turn of the controller's loop; returns seconds in ledger and schedule, and requests
        concerned.
        """
        events, self.inbox = self.inbox, []
        concerned = sum(len(e.ids) if isinstance(e, Progress) else 1 for e in events)
        started = time.perf_counter()
        ended = self.ledger.apply(events)
        decisions = self.schedule.decide(self.ledger.view, events)
        seconds = time.perf_counter() - started
        self.inbox += [Scored(r.request_id, r.attempt, 1.0) for r in ended]
        for decision in decisions:
            started = time.perf_counter()
            match decision:
                case Admit():
                    rows = [self._prompt() for _ in range(decision.prompts)]
                    self.inbox.append(self.ledger.admit(rows, decision.samples_each))
                case Start():
                    for request in self.ledger.start(decision.ids, decision.worker):
                        self.running[request.id] = request
                case Harvest():
                    self.ledger.harvest(decision.ids)
                    self.ledger.take_finished()
                    self.inbox.append(Updated(self.ledger.version + 1))
                case Publish():
                    self.inbox.append(Loaded(0, self.ledger.version))
            if not isinstance(decision, Admit):  # filling the ledger is not what is measured
                seconds += time.perf_counter() - started
        self.inbox += self._step()
        return seconds, concerned

    def _prompt(self) -> tuple[Prompt, int]:
        self.admitted += 1
        return Prompt(self.admitted, f"{self.admitted:x}", 0, np.arange(8), {}), 0

    def _step(self) -> list[Event]:
        """One token for each running response; about one in 64 ends."""
        if not self.running:
            return []
        requests = list(self.running.values())
        events: list[Event] = [
            Progress(
                worker=0,
                ids=np.array([r.id for r in requests]),
                attempts=np.array([r.attempt for r in requests]),
                counts=np.ones(len(requests), np.int64),
                version=self.ledger.version,
                token_ids=np.arange(len(requests)),
                logprobs=np.full(len(requests), -0.1),
                raw_logprobs=np.full(len(requests), -0.1),
            )
        ]
        for request in requests:
            if self.random.random() < 1 / 64:
                del self.running[request.id]
                events.append(Finished(0, request.id, request.attempt, FinishReason.STOP))
        return events


def microseconds_per_event(waiting: int, slots: int, turns: int) -> float:
    """Mean over turns of ledger and schedule time per request concerned."""
    play = Play(waiting, slots)
    for _ in range(100):
        play.turn()
    costs = []
    for _ in range(turns):
        seconds, concerned = play.turn()
        costs.append(1e6 * seconds / max(1, concerned))
    return float(np.mean(costs))


def share_of_step(slots: int, waiting: int, new_tokens: int = 96) -> dict[str, float]:
    """Bookkeeping in the real loop: `slots` responses running, at first `waiting` more, demo model."""
    model = load_model(ModelConfig())
    engine = EmbeddedEngine(
        model,
        None,
        worker=0,
        max_num_seqs=slots,
        max_model_len=8 + new_tokens,
        max_num_batched_tokens=2048,
        clock=time.perf_counter,
    )
    ledger = Ledger(SamplingParams(max_new_tokens=new_tokens), now=time.perf_counter)
    groups = (slots + waiting) // SAMPLES
    schedule = make_schedule(ScheduleConfig(kind="synchronous", prompts=groups, samples=SAMPLES))
    ledger.apply([WorkerUp(0, slots, 0)])
    ledger.admit([(Prompt(i, f"{i:x}", 0, np.arange(8) + i, {}), 0) for i in range(groups)], SAMPLES)
    engine.submit(ledger.start(range(groups * SAMPLES), 0))
    engine.step()
    engine.metrics()
    began = time.perf_counter()
    while engine.has_work:
        events = engine.step()
        ledger.apply(events)
        schedule.decide(ledger.view, events)
    total = time.perf_counter() - began
    counted = engine.metrics()
    work = counted["model_seconds"] + counted["sampling_seconds"]
    return {
        "slots": slots,
        "waiting": waiting,
        "ms_per_step": 1e3 * total / counted["steps"],
        "bookkeeping_share": (total - work) / counted["step_seconds"],
    }


def main(argv: Sequence[str] = ()) -> int:
    """Alternates the two sizes and prints microseconds per event with the ratio's 95 % interval over
    repeats.
    """
    parser = argparse.ArgumentParser(prog="stretto bench bookkeeping", description=__doc__)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--few", type=int, default=1_000, help="requests waiting in the small case")
    parser.add_argument("--many", type=int, default=100_000, help="requests waiting in the large case")
    parser.add_argument("--turns", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    shares = [share_of_step(options.slots, 4 * options.slots) for _ in range(3)]
    pairs = np.array(
        [
            [microseconds_per_event(w, options.slots, options.turns) for w in (options.few, options.many)]
            for _ in range(options.repeats)
        ]
    )
    ratios = pairs[:, 1] / pairs[:, 0]
    half = 1.96 * ratios.std(ddof=1) / np.sqrt(len(ratios))
    found: dict[str, Any] = {
        "in_the_loop": min(shares, key=lambda share: share["ms_per_step"]),
        "few": options.few,
        "many": options.many,
        "us_per_event_few": float(np.median(pairs[:, 0])),
        "us_per_event_many": float(np.median(pairs[:, 1])),
        "ratio": float(np.median(ratios)),
        "ratio_interval": [float(ratios.mean() - half), float(ratios.mean() + half)],
    }
    if options.json:
        print(json.dumps(found))
    else:
        loop = found["in_the_loop"]
        print(
            f"{loop['slots']} slots, {loop['waiting']} waiting, demo model: {loop['ms_per_step']:.2f} ms per step, "
            f"{loop['bookkeeping_share']:.1%} of it bookkeeping"
        )
        print(
            f"{options.few:,} waiting: {found['us_per_event_few']:.2f} us per event; "
            f"{options.many:,} waiting: {found['us_per_event_many']:.2f} us; ratio {found['ratio']:.2f} "
            f"[{ratios.mean() - half:.2f}, {ratios.mean() + half:.2f}]"
        )
    return 0
