from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.responses import Span, uniform
from stretto.engine.simulated import SimulatedEngine, StepCost
from stretto.records import (
    Finished,
    FinishReason,
    Leapt,
    Loaded,
    Running,
    Scored,
    WorkerDown,
    WorkerUp,
)
from stretto.weights import WeightsRef
from tests.engine.simulated_log import COST, build, lengths, request


def one_by_one(whole: Sequence[int], slots: int, prompt: int, stops: dict[int, float]) -> dict[int, float]:
    """When each response ends, every step on its own: requests 0, 1, ... submitted at 0."""
    queue, running, tokens = list(range(len(whole))), dict[int, int](), dict[int, int]()
    now, ends = 0.0, {}
    while queue or running:
        extra = 0
        for number in [n for n, when in stops.items() if when <= now and n not in ends]:
            if number in queue:
                queue.remove(number)
            else:
                del running[number]
            ends[number] = now
        while queue and len(running) < slots:
            number = queue.pop(0)
            running[number] = tokens[number] = 0
            extra += prompt
        if not running:
            break
        # The token of the first step is counted when the response enters.
        context = sum(prompt + running[n] + 1 for n in running)
        now += COST.base + COST.per_token * len(running) + COST.per_context * context
        now += COST.per_prefill * extra
        for number in list(running):
            running[number] += 1
            if running[number] == whole[number]:
                del running[number]
                ends[number] = now
    return ends


@settings(max_examples=60)
@given(
    whole=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    stops=st.dictionaries(st.integers(0, 11), st.floats(0.001, 2.0), max_size=4),
)
def test_leaping_ends_when_going_step_by_step_does(
    whole: list[int], slots: int, stops: dict[int, float]
) -> None:
    stops = {number: when for number, when in stops.items() if number < len(whole)}
    log = build(lengths(*whole), slots=slots)
    log.engine.submit([request(n) for n in range(len(whole))])
    for number, when in stops.items():
        log.at(when, lambda n=number: log.engine.stop([n], [1]))  # type: ignore[misc]
    ends = {n: when for n, (when, _) in log.run().ends().items()}
    expected = one_by_one(whole, slots, 4, stops)
    assert ends.keys() == expected.keys()
    for number, when in expected.items():
        assert ends[number] == pytest.approx(when, rel=1e-9), number


def test_every_token_is_reported_once_and_before_the_end() -> None:
    log = build(lengths(5, 9, 3, 12), slots=2)
    log.engine.submit([request(n) for n in range(4)])
    log.run()
    assert log.tokens() == {0: 5, 1: 9, 2: 3, 3: 12}
    assert {n: why for n, (_, why) in log.ends().items()} == dict.fromkeys(range(4), "stop")


def test_a_reward_that_takes_no_time_comes_with_the_end_and_a_chunk_has_none() -> None:
    log = build(lengths(5, 25), score=lambda r: 0.5 + r.id)
    log.engine.submit([request(0), request(1, max_new=10)])
    when = log.run().ends()[0][0]
    assert [event for at, event in log.events if at == when] == [
        Leapt(0, 0, 1, 5, 0),
        Finished(0, 0, 1, FinishReason.STOP),
        Scored(0, 1, 0.5),
    ]
    assert sum(isinstance(event, Scored) for _, event in log.events) == 1


def test_tokens_are_told_when_a_report_is_wanted() -> None:
    log = build(lengths(1000), cost=StepCost(base=1.0, per_token=0.0))
    log.engine.submit([request(0)])
    log.at(10.5, log.engine.report)
    (leapt,) = log.runtime.wait()
    assert isinstance(leapt, Leapt)
    assert leapt.count == 11  # with the step in hand
    assert log.runtime.now() == pytest.approx(11.0)


def test_the_limit_ends_an_endless_response() -> None:
    log = build(lambda r: 10**12)
    log.engine.submit([request(0, limit=50)])
    log.run()
    assert log.ends()[0][1] == FinishReason.LENGTH
    assert log.tokens() == {0: 50}


def test_a_chunk_ends_with_its_tokens_kept_and_goes_on_from_them() -> None:
    log = build(lengths(25))
    log.engine.submit([request(0, max_new=10)])
    log.run()
    assert (log.tokens(), log.ends()[0][1]) == ({0: 10}, "stopped")
    log.engine.submit([request(0, tokens=10, max_new=20)])
    log.run()
    assert (log.tokens(), log.ends()[0][1]) == ({0: 25}, FinishReason.STOP)


@pytest.mark.parametrize(("running", "prefilled"), [("continue", 0), ("recompute", 2 * 4 + 2 * 6)])
def test_new_weights_come_between_two_steps_and_tokens_keep_their_version(
    running: Running, prefilled: int
) -> None:
    log = build(lengths(30, 30), cost=StepCost(base=1.0, per_token=0.0), load_seconds=7.0)
    log.engine.submit([request(0), request(1)])
    log.at(4.5, lambda: log.engine.load(WeightsRef(1, "copy", {}), running))
    log.run()
    by_version: dict[int, int] = {}
    for _, event in log.events:
        if isinstance(event, Leapt):
            by_version[event.version] = by_version.get(event.version, 0) + event.count
    assert by_version == {0: 10, 1: 50}
    assert [when for when, event in log.events if isinstance(event, Loaded)] == pytest.approx([12.0])
    assert log.ends()[0][0] == pytest.approx(37.0)
    counted = log.engine.metrics()
    assert counted["recomputed_tokens"] == pytest.approx(prefilled)
    assert counted["sync_seconds"] == 7.0
    assert counted["busy_slot_seconds"] == pytest.approx(60.0)


def test_the_seconds_of_a_load_count_as_they_pass_and_not_when_the_worker_is_down() -> None:
    log = build(lengths(30), cost=StepCost(base=1.0, per_token=0.0), load_seconds=7.0)
    log.engine.submit([request(0)])
    log.at(4.5, lambda: log.engine.load(WeightsRef(1, "copy", {}), "continue"))  # from 5 to 12
    counted: list[float] = []
    log.at(8.0, lambda: counted.append(log.engine.metrics()["sync_seconds"]))
    log.at(10.0, log.engine.fail)
    counted.append(log.run().engine.metrics()["sync_seconds"])
    assert counted == [3.0, 2.0]


def test_new_weights_may_stop_what_runs() -> None:
    log = build(lengths(30, 30, 5), slots=2)
    log.engine.submit([request(n) for n in range(3)])
    log.at(0.1, lambda: log.engine.load(WeightsRef(1, "copy", {}), "stop"))
    log.run()
    assert {n: why for n, (_, why) in log.ends().items()} == {0: "stopped", 1: "stopped", 2: "stop"}


def test_a_prompt_is_prefilled_and_held_once_for_a_group() -> None:
    log = build(lengths(8, 8, 8))
    log.engine.submit([request(n, prompt=100, group=n // 2) for n in range(3)])
    log.run()
    assert log.engine.metrics()["prefill_tokens"] == 200


def test_siblings_wait_a_step_for_the_prompt_that_one_of_them_computes() -> None:
    log = build(lengths(3, 3, 3, 2), slots=3, cost=StepCost(base=1.0, per_token=0.0))
    log.engine.submit([request(0, group=0), request(1, group=0), request(2, group=1), request(3, group=0)])
    log.run()
    # The last one comes when the prompt has been computed.
    assert {n: when for n, (when, _) in log.ends().items()} == {0: 3.0, 1: 4.0, 2: 3.0, 3: 5.0}
    assert log.tokens() == {0: 3, 1: 3, 2: 3, 3: 2}
    assert log.engine._context == 0


class TestMemory:
    def test_the_newest_is_preempted_and_recomputed_and_loses_nothing(self) -> None:
        log = build(lengths(40, 40, 40), kv_tokens=100)
        log.engine.submit([request(n) for n in range(3)])
        log.run()
        counted = log.engine.metrics()
        assert log.tokens() == {0: 40, 1: 40, 2: 40}
        assert counted["preemptions"] >= 1
        assert log.ends()[0][0] <= log.ends()[1][0] <= log.ends()[2][0]
        roomy = build(lengths(40, 40, 40))
        roomy.engine.submit([request(n) for n in range(3)])
        roomy.run()
        assert roomy.ends()[2][0] < log.ends()[2][0]

    def test_a_sibling_that_comes_back_alone_computes_the_prompt_itself_and_waits_for_nobody(self) -> None:
        spans: list[Span] = []
        log = build(lengths(11, 10, 20), kv_tokens=32, cost=StepCost(base=1.0, per_token=0.0), spans=spans)
        log.engine.submit([request(0, group=1), request(1, group=0), request(2, group=0)])
        assert log.run().tokens() == {0: 11, 1: 10, 2: 20}
        first, second = (span for span in spans if span.id == 2)
        assert (first.why, second.start) == ("preempted", log.ends()[1][0])
        assert first.end - first.start == first.tokens + 1  # a step until the prompt is there
        assert second.end - second.start == 20 - first.tokens

    @settings(max_examples=40)
    @given(whole=st.lists(st.integers(1, 40), min_size=1, max_size=8), kv=st.integers(45, 120))
    def test_what_is_held_never_exceeds_it(self, whole: list[int], kv: int) -> None:
        log = build(lengths(*whole), kv_tokens=kv, slots=4)
        log.engine.submit([request(n) for n in range(len(whole))])
        advance = SimulatedEngine._advance

        def checked(engine: SimulatedEngine, steps: int) -> None:
            advance(engine, steps)
            assert engine._context <= kv

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimulatedEngine, "_advance", checked)
            assert log.run().tokens() == dict(enumerate(whole))


class TestDropped:
    def test_the_prefix_kept_is_geometric(self) -> None:
        """Mean of 4,000 draws at a = 0.9 (mean 9.0, sd 9.5): within 4 standard errors, wrong once in 16,000."""
        a, kept = 0.9, []
        for number in range(4000):
            log = build(lambda r: 10_000, agreement=a)
            log.engine.submit([request(number, draft=1000)])
            kept.append(log.run().engine.metrics()["reverified_kept"])
        assert np.mean(kept) == pytest.approx(a / (1 - a), abs=4 * 9.5 / np.sqrt(4000))

    def test_what_is_kept_comes_with_one_pass(self) -> None:
        cost = StepCost(base=1.0, per_token=0.0, per_prefill=0.01)
        log = build(lengths(101), agreement=1.0, cost=cost)
        log.engine.submit([request(0, draft=100, prompt=0)])
        log.run()
        assert log.ends()[0][0] == pytest.approx(1.0 + 100 * 0.01)
        assert log.tokens() == {0: 101}

    def test_without_agreement_all_is_made_again(self) -> None:
        log = build(lengths(50), cost=StepCost(base=1.0, per_token=0.0))
        log.engine.submit([request(0, draft=40)])
        assert log.run().ends()[0][0] == pytest.approx(50.0)


def test_several_tokens_per_step_end_sooner_and_count_whole() -> None:
    log = build(
        lengths(50, 51), cost=StepCost(base=1.0, per_token=0.0), speed=lambda r: 2.5, nodes=lambda r: 3.0
    )
    log.engine.submit([request(0), request(1)])
    log.run()
    # The first step gives one token, each later one 2.5.
    assert [log.ends()[n][0] for n in (0, 1)] == pytest.approx([21.0, 21.0])
    assert log.tokens() == {0: 50, 1: 51}
    assert log.engine.metrics()["drafted_tokens"] == pytest.approx(21 * 2 * 3)


def test_an_old_attempt_of_a_request_may_still_run_beside_the_new_one() -> None:
    """Its worker was thought dead, the request came back to it, and nobody can stop what nobody knows of."""
    log = build(lengths(10, 5), slots=2, cost=StepCost(base=1.0, per_token=0.0))
    again = replace(request(0, tokens=2), attempt=2)
    log.engine.submit([request(0)])
    log.at(3.5, lambda: log.engine.submit([again, request(1)]))
    log.at(20.0, lambda: log.engine.stop([0], [1]))  # gone: nothing happens
    log.run()
    ends = [(when, e.id, e.attempt) for when, e in log.events if isinstance(e, Finished)]
    assert ends == [(10.0, 0, 1), (12.0, 0, 2), (15.0, 1, 1)]


def test_a_worker_that_fails_has_told_its_tokens_and_comes_back_empty() -> None:
    log = build(lengths(100, 100), cost=StepCost(base=1.0, per_token=0.0))
    log.engine.start()
    log.engine.submit([request(0), request(1)])
    log.at(10.0, log.engine.fail)
    log.run()
    assert log.tokens() == {0: 10, 1: 10}
    assert isinstance(log.events[-1][1], WorkerDown)
    log.engine.submit([request(0, tokens=10)])  # said before the news came: lost with the worker
    assert log.run().tokens() == {0: 10, 1: 10}
    log.engine.start()
    log.run()
    log.engine.submit([request(0, tokens=10)])
    assert log.run().tokens() == {0: 100, 1: 10}


def test_what_is_said_to_a_worker_before_it_is_known_that_it_went_down_is_lost_though_it_comes_back() -> None:
    """Else it would run what the ledger takes back when it hears of that, and starts once more."""
    log = build(lengths(30, 30), cost=StepCost(base=1.0, per_token=0.0), load_seconds=7.0)
    log.engine.start()
    log.engine.submit([request(0)])
    log.at(4.5, lambda: log.engine.load(WeightsRef(1, "copy", {}), "continue"))
    log.at(5.5, log.engine.fail)  # told when it has its weights, at 12
    log.at(6.5, log.engine.start)
    log.at(7.5, lambda: log.engine.submit([request(1)]))
    log.at(8.5, lambda: log.engine.load(WeightsRef(2, "copy", {}), "continue"))
    log.at(9.5, log.engine.start)  # it is about to
    log.run()
    told = [event for when, event in log.events if when == 12.0]
    assert told == [Loaded(0, 1), WorkerDown(0), WorkerUp(0, log.engine.slots, 1)]
    assert log.events[-1][1] is told[-1]
    assert log.tokens() == {0: 5}
    log.engine.submit([request(1)])
    assert log.run().tokens() == {0: 5, 1: 30}


def test_a_worker_that_fails_before_it_is_there_does_not_come() -> None:
    log = build(lengths(30))
    log.engine.absent()
    log.engine.pause(10.0)  # the trainer has its device
    log.engine.start()
    log.at(5.0, log.engine.fail)
    log.run()
    assert not log.events
    assert not log.engine.alive
    log.engine.start()
    log.run()
    assert [event for _, event in log.events] == [WorkerUp(0, log.engine.slots, 0)]


def test_spans_say_who_was_where() -> None:
    spans: list[Span] = []
    log = build(lengths(10, 20, 5), slots=2, cost=StepCost(base=1.0, per_token=0.0), spans=spans)
    log.engine.submit([request(n) for n in range(3)])
    log.run()
    found = [(s.id, s.slot, s.start, s.end, s.tokens, s.why) for s in spans]
    assert found == [
        (0, 0, 0.0, 10.0, 10, "stop"),
        (2, 0, 10.0, 15.0, 5, "stop"),
        (1, 1, 0.0, 20.0, 20, "stop"),
    ]


def test_uniform_is_uniform() -> None:
    """Kolmogorov-Smirnov distance of 20,000 draws: above 1.95 / sqrt(n) once in 1,000."""
    drawn = np.sort([uniform(n, 3) for n in range(20_000)])
    distance = np.abs(drawn - (np.arange(20_000) + 0.5) / 20_000).max()
    assert distance < 1.95 / np.sqrt(20_000)


def test_engines_are_kept_small() -> None:
    """Of a large cluster's each is looked at in turn."""
    assert not hasattr(build(lengths(1)).engine, "__dict__")
