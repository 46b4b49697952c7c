"""What an early harvest makes of a load, enumerated exactly through the real ledger, controller and runtime.

The model has two tokens: after the prompt it says END with probability 0.42, after one A with 0.57, and the limit is
three tokens. A load of two requests runs until the first has ended; that one is trained on, the other is sent back by
the gate (`max_staleness` = 0) and trained on next. The learning rate is 0: the weights never move.

The two probabilities and the limit were fitted to the design's three figures (total variation 0.122, mean length 1.61
instead of 1.83), which come without a model: that they come out here confirms the arithmetic and no more. What does not
depend on the fit is tried with other probabilities too: with their own keys the responses trained on have the model's
distribution exactly, and with fresh noise they are too short.

Sent back with its own keys, a request says what it would have said; redrawn with fresh noise, it is redrawn until it is
short. All outcomes of the noise are played through with their probabilities, so nothing here is random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from stretto.buffer import Ledger
from stretto.controller import Controller
from stretto.fleet.in_process import InProcessFleet
from stretto.records import (
    Admit,
    Decision,
    Event,
    Finished,
    FinishReason,
    Harvest,
    Loaded,
    Progress,
    Publish,
    Request,
    Rollout,
    Running,
    SamplingParams,
    Scored,
    Start,
    Stopped,
    UpdateBatch,
    Updated,
)
from stretto.runtime import LiveRuntime
from stretto.view import LedgerView
from stretto.weights import WeightsRef
from tests.invariants import check
from tests.world import Rows

A, END = 0, 1
Response = tuple[int, ...]
Distribution = dict[Response, float]
Says = Callable[[Request], Response]


def model(first: float, second: float) -> Distribution:
    """What it says if END has probability `first` after the prompt, `second` after one A, and three is the limit."""
    return {(END,): first, (A, END): (1 - first) * second, (A, A, A): (1 - first) * (1 - second)}


FITTED = model(0.42, 0.57)
MODELS = [FITTED, model(0.1, 0.1), model(0.5, 0.5), model(0.2, 0.9), model(0.9, 0.2)]


class FirstToEnd:
    """Admits one load, starts what waits, closes an update as soon as one response has its reward."""

    overlaps = False

    def decide(self, view: LedgerView, events: Sequence[Event]) -> list[Decision]:
        if view.updating or not view.slots:
            return []
        if view.loaded[0] != view.version:
            return [Publish([0], "recompute")] if any(isinstance(e, Updated) for e in events) else []
        if view.admitted_groups == 0:
            return [Admit(prompts=2, samples_each=1)]
        if view.waiting:
            return [Start(list(view.waiting), worker=0)]
        return [Harvest([min(view.scored)])] if view.scored else []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}


class TokenByToken:
    """An engine that says `says(request)`, one token a step for everyone."""

    worker, slots, version, num_running = 0, 2, 0, 0

    def __init__(self, says: Says) -> None:
        self.says = says
        self.running: dict[int, tuple[Request, int]] = {}
        self.told: list[Event] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.told)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.running[request.id] = (request, 0)

    def stop(self, ids: Sequence[int], attempts: Sequence[int]) -> None:
        for request_id, attempt in zip(ids, attempts, strict=True):
            if self.running.pop(request_id, None) is not None:
                self.told.append(Stopped(0, request_id, attempt))

    def load(self, ref: WeightsRef, running: Running) -> None:
        self.version = ref.version
        self.told.append(Loaded(0, ref.version))

    def step(self) -> list[Event]:
        events, self.told = self.told, []
        for request_id, (request, said) in list(self.running.items()):
            whole, attempt = self.says(request), np.array([request.attempt])
            token, logprob = np.array([whole[said]]), np.array([-0.5])
            counts = np.array([1])
            events.append(
                Progress(0, np.array([request_id]), attempt, counts, self.version, token, logprob, logprob)
            )
            self.running[request_id] = (request, said + 1)
            if said + 1 == len(whole):
                del self.running[request_id]
                events.append(Finished(0, request_id, request.attempt, FinishReason.STOP))
        return events

    def metrics(self) -> dict[str, float]:
        return {}


class Still:
    """Rewards at once, updates that change nothing; keeps what was consumed."""

    def __init__(self, runtime: LiveRuntime) -> None:
        self.post = runtime.post
        self.version = 0
        self.consumed: list[Rollout] = []

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.post(Scored(rollout.request_id, rollout.attempt, 1.0))

    def begin(self, batch: UpdateBatch) -> None:
        self.version += 1
        self.post(Updated(self.version))

    def accumulate(self, batch: UpdateBatch) -> None: ...

    def publish(self) -> WeightsRef:
        return WeightsRef(self.version, "copy", {})

    def harvested(self, batch: UpdateBatch) -> None:
        assert batch.staleness == [0] * len(batch.rollouts)
        self.consumed += batch.rollouts

    def updated(self, event: Updated) -> None: ...

    def publishing(self) -> None: ...

    def published(self) -> None: ...


def load_of_two(says: Says) -> list[Response]:
    """The responses that two updates train on."""
    runtime = LiveRuntime()
    still = Still(runtime)
    fleet = InProcessFleet([TokenByToken(says)], runtime.post)
    runtime.local = fleet
    ledger = Ledger(SamplingParams(max_new_tokens=3), unit="response", max_staleness=0, batch=1)
    controller = Controller(runtime, ledger, FirstToEnd(), fleet, still, Rows(2), still, still)
    controller.run(lambda: ledger.version == 2)
    check(ledger)
    assert sorted(r.request_id for r in still.consumed) == [0, 1]
    return [tuple(r.token_ids.tolist()) for r in still.consumed]


def pool(says: Distribution, draws: int, draw_of: Callable[[Request], int]) -> Distribution:
    """How often the load trains on each response: `draws` of each request, of which `draw_of` says which one counts."""
    found: Counter[Response] = Counter()
    for outcome in product(says, repeat=2 * draws):
        weight = float(np.prod([says[response] for response in outcome]))
        consumed = load_of_two(lambda r, outcome=outcome: outcome[draws * r.id + draw_of(r)])  # type: ignore[misc]
        for response in consumed:
            found[response] += weight / 2  # type: ignore[assignment]
    return dict(found)


def mean_length(distribution: Distribution) -> float:
    return sum(weight * len(response) for response, weight in distribution.items())


def fresh_noise(request: Request) -> int:
    return request.attempt - 1


@pytest.mark.parametrize("says", MODELS)
def test_with_its_own_keys_a_load_is_an_exact_sample(says: Distribution) -> None:
    assert pool(says, 1, lambda request: 0) == pytest.approx(says, abs=1e-12)


@pytest.mark.parametrize("says", MODELS)
def test_redrawn_with_fresh_noise_it_is_biased_towards_short_responses(says: Distribution) -> None:
    found = pool(says, 2, fresh_noise)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert mean_length(found) < mean_length(says) - 0.01
    assert found[(END,)] > says[(END,)]
    assert found[(A, A, A)] < says[(A, A, A)]


def test_the_designs_figures() -> None:
    found = pool(FITTED, 2, fresh_noise)
    distance = sum(abs(found[response] - weight) for response, weight in FITTED.items()) / 2
    assert round(distance, 3) == 0.122
    assert round(mean_length(FITTED), 2) == 1.83
    assert round(mean_length(found), 2) == 1.61
