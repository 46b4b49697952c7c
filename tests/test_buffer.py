from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from stretto.alternatives import Alternatives
from stretto.buffer import Ledger
from stretto.records import (
    Finished,
    FinishReason,
    Observed,
    Progress,
    Request,
    SamplingParams,
    Scored,
    State,
    Stopped,
    Updated,
    WorkerDown,
    WorkerUp,
)
from tests.invariants import check
from tests.world import prompt


def ledger(*, multi_turn: bool = False, max_new_tokens: int = 100) -> Ledger:
    book = Ledger(SamplingParams(max_new_tokens=max_new_tokens), multi_turn=multi_turn)
    book.apply([WorkerUp(0, 8, 0), WorkerUp(1, 8, 0)])
    return book


def progress(requests: list[Request], tokens: list[list[int]], version: int = 0) -> Progress:
    flat = np.array([t for row in tokens for t in row])
    return Progress(
        worker=0,
        ids=np.array([r.id for r in requests]),
        attempts=np.array([r.attempt for r in requests]),
        counts=np.array([len(row) for row in tokens]),
        version=version,
        token_ids=flat,
        logprobs=-flat / 10,
        raw_logprobs=-flat / 20,
    )


def test_tokens_arrive_with_their_log_probs_and_versions() -> None:
    book = ledger()
    book.admit([(prompt(0), 0)], 2)
    a, b = book.start([0, 1], worker=0)
    book.apply([progress([a, b], [[5], [6, 7]]), progress([b], [[8]], version=3)])
    rollout = book.rollout(1)
    assert rollout.token_ids.tolist() == [6, 7, 8]
    assert rollout.logprobs.tolist() == [-0.6, -0.7, -0.8]
    assert rollout.versions.tolist() == [0, 0, 3]
    assert rollout.oldest_version == 0
    check(book)


def test_alternatives_arrive_with_the_tokens_and_where_there_are_none_they_are_unknown() -> None:
    book = ledger()
    book.admit([(prompt(0), 0)], 2)
    a, b = book.start([0, 1], worker=0)
    first, later = progress([a, b], [[5], [6, 7]]), progress([b], [[8]])
    first.top = Alternatives(np.array([[1], [2], [3]], np.int32), np.full((3, 1), -0.5, np.float32))
    later.top = Alternatives(np.array([[4, 9]], np.int32), np.array([[-0.1, -3.0]], np.float32))
    book.apply([first, later, progress([b], [[9]])])
    one, two = book.rollout(0).top, book.rollout(1).top
    assert one is not None
    assert two is not None
    assert one.token_ids.tolist() == [[1]]
    assert two.token_ids.tolist() == [[2, -1], [3, -1], [4, 9], [-1, -1]]
    assert two.logprobs == pytest.approx(
        np.array([[-0.5, -np.inf], [-0.5, -np.inf], [-0.1, -3.0], [-np.inf, -np.inf]])
    )
    assert book.rollout(1).token_ids.tolist() == [6, 7, 8, 9]
    check(book)


def test_events_of_an_old_attempt_are_dropped_and_counted() -> None:
    book = ledger()
    book.admit([(prompt(0), 0)], 1)
    (old,) = book.start([0], worker=0)
    book.apply([progress([old], [[5]]), WorkerDown(0)])
    (new,) = book.start([0], worker=1)
    assert new.token_ids.tolist() == [5]  # what was received is not lost
    ended = book.apply([progress([old], [[9]]), Finished(0, old.id, old.attempt, FinishReason.STOP)])
    assert ended == []
    assert book.counters["stale_events"] == 2
    book.apply([progress([new], [[6]])])
    assert book.rollout(0).token_ids.tolist() == [5, 6]
    check(book)


@pytest.mark.parametrize(("keep", "tokens", "discarded"), [(True, [5], 0), (False, [], 1)])
def test_stop_keeps_or_drops_the_tokens(keep: bool, tokens: list[int], discarded: int) -> None:
    book = ledger()
    book.admit([(prompt(0), 0)], 1)
    (request,) = book.start([0], worker=0)
    book.stop([0], keep=keep)
    assert book.take_stops() == {0: ([0], [1])}
    book.apply([progress([request], [[5]]), Stopped(0, 0, 1)])
    assert list(book.waiting) == [0]
    assert book.rollout(0).outcome == (State.PARKED if keep else State.PENDING)
    assert book.start([0], worker=1)[0].token_ids.tolist() == tokens
    assert book.counters["discarded_tokens"] == discarded
    check(book)


def test_a_response_that_ends_before_the_stop_arrives_has_ended() -> None:
    book = ledger()
    book.admit([(prompt(0), 0)], 1)
    (request,) = book.start([0], worker=0)
    book.stop([0], keep=False)
    ended = book.apply([progress([request], [[5]]), Finished(0, 0, 1, FinishReason.STOP)])
    assert [r.token_ids.tolist() for r in ended] == [[5]]
    check(book)


def test_an_update_takes_whole_scored_groups_only() -> None:
    book = ledger()
    book.admit([(prompt(0), 0), (prompt(1), 0)], 2)
    requests = book.start(range(4), worker=0)
    book.apply([Finished(0, r.id, r.attempt, FinishReason.STOP) for r in requests])
    book.apply([Scored(0, 1, 1.0), Scored(2, 1, 1.0), Scored(3, 1, 0.0)])
    with pytest.raises(ValueError, match="whole scored groups"):
        book.harvest([0, 2, 3])
    with pytest.raises(ValueError, match="scored responses"):
        book.harvest([1, 0, 2, 3])
    with pytest.raises(ValueError, match="whole scored groups"):
        book.harvest([2])
    assert [r.request_id for r in book.harvest([3, 2]).rollouts] == [2, 3]
    book.apply([Updated(1)])
    book.apply([Scored(1, 1, float("nan"), "timeout", message="took 30 s")])
    assert list(book.view.ready_groups) == [0]
    assert book.counters["reward_timeouts"] == 1
    check(book)


def one_of_two_consumed() -> Ledger:
    """Two prompts' single responses are scored, and the first is consumed."""
    book = ledger()
    book.admit([(prompt(0), 0), (prompt(1), 0)], 1)
    requests = book.start([0, 1], worker=0)
    book.apply([progress(requests, [[1], [2]]), *(Finished(0, r.id, 1, FinishReason.STOP) for r in requests)])
    book.apply([Scored(0, 1, 1.0), Scored(1, 1, 1.0)])
    book.harvest([0])
    return book


def test_finished_responses_are_reported_once_whatever_became_of_them() -> None:
    book = one_of_two_consumed()
    assert [(r.request_id, r.outcome) for r in book.take_finished()] == [
        (0, State.CONSUMED),
        (1, State.SCORED),
    ]
    assert book.take_finished() == []
    book.apply([Updated(1)])
    assert [r.token_ids.tolist() for r in book.harvest([1]).rollouts] == [[2]]


def test_turns_alternate_and_the_environments_tokens_are_not_trained_on() -> None:
    book = ledger(multi_turn=True, max_new_tokens=8)
    book.admit([(prompt(0), 0)], 1)
    (first,) = book.start([0], worker=0)
    (ended,) = book.apply([progress([first], [[1, 2]]), Finished(0, 0, 1, FinishReason.STOP)])
    assert (ended.outcome, ended.turn) == (State.WAITING, 0)
    book.apply([Observed(0, 1, np.array([30, 31]), done=False)])
    check(book)
    (second,) = book.start([0], worker=1)
    assert (second.token_ids.tolist(), second.turn_start) == ([1, 2, 30, 31], 4)
    book.apply([progress([second], [[3]], version=1), Finished(1, 0, 2, FinishReason.STOP)])
    (finished,) = book.apply([Observed(0, 2, np.array([], np.int64), done=True)])
    assert finished.outcome == State.FINISHED
    assert finished.loss_mask.tolist() == [True, True, False, False, True]
    assert finished.versions.tolist() == [0, 0, 0, 0, 1]
    assert (finished.turn, finished.turn_start) == (1, 4)


def test_an_observation_that_leaves_no_room_ends_the_response() -> None:
    book = ledger(multi_turn=True, max_new_tokens=4)
    book.admit([(prompt(0), 0)], 1)
    (first,) = book.start([0], worker=0)
    book.apply([progress([first], [[1, 2]]), Finished(0, 0, 1, FinishReason.STOP)])
    (finished,) = book.apply([Observed(0, 1, np.array([30, 31]), done=False)])
    assert finished.finish_reason == FinishReason.LENGTH
    assert finished.token_ids.tolist() == [1, 2]


def test_a_ledger_is_restored_from_what_was_in_flight() -> None:
    book = ledger()
    book.admit([(prompt(i), 0) for i in range(3)], 2)
    requests = book.start(range(5), worker=0)
    book.apply([progress(requests, [[i, i + 1] for i in range(5)], version=1)])
    book.apply([Finished(0, i, 1, FinishReason.STOP) for i in (0, 1, 2)])
    book.apply([Scored(0, 1, 0.5, parts={"a": 0.5}), Scored(1, 1, 1.0)])
    book.harvest([0, 1])
    book.take_finished()
    copy = ledger()
    unanswered = copy.load_state_dict(book.state_dict(), book.in_flight())
    check(copy)
    assert [r.request_id for r in unanswered] == [2]
    assert list(copy.waiting) == [3, 4, 5]
    assert copy.rollout(3).outcome == State.PARKED
    assert copy.rollout(5).outcome == State.PENDING
    assert copy.rollout(3).token_ids.tolist() == [3, 4]
    assert copy.admit([(prompt(9), 0)], 1).first == 6
    assert copy.rollout(6).group_id == 3
    check(copy)


def test_starting_what_is_not_waiting_is_refused() -> None:
    book = ledger()
    book.admit([(prompt(0), 0)], 1)
    book.start([0], worker=0)
    with pytest.raises(ValueError, match="request 0 is RUNNING"):
        book.start([0], worker=1)


def test_an_observation_must_leave_room_in_the_context() -> None:
    book = Ledger(SamplingParams(max_new_tokens=100), multi_turn=True, max_model_len=3 + 5)
    book.apply([WorkerUp(0, 8, 0)])
    book.admit([(prompt(0), 0)], 1)
    (first,) = book.start([0], worker=0)
    book.apply([progress([first], [[1, 2]]), Finished(0, 0, 1, FinishReason.STOP)])
    (finished,) = book.apply([Observed(0, 1, np.array([30, 31, 32]), done=False)])
    assert finished.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(("strategy", "state"), [("refresh", State.PENDING), ("drop", State.DISCARDED)])
def test_what_a_later_event_gives_up_is_not_graded(
    strategy: Literal["refresh", "drop"], state: State
) -> None:
    """One response ends while an update is made that leaves its tokens too old, and both are heard of at once."""
    book = Ledger(SamplingParams(), max_staleness=0, strategy=strategy)
    book.apply([WorkerUp(0, 2, 0)])
    book.admit([(prompt(0), 0), (prompt(1), 0)], 1)
    first, second = book.start([0, 1], worker=0)
    book.apply([progress([first], [[5]]), Finished(0, 0, 1, FinishReason.STOP)])
    book.apply([Scored(0, 1, 1.0)])
    book.harvest([0])
    ended = book.apply([progress([second], [[6]]), Finished(0, 1, 1, FinishReason.STOP), Updated(1)])
    assert ended == []
    assert book.rollout(1).outcome == state
    check(book)


def test_what_has_been_logged_leaves_no_objects_behind() -> None:
    book = ledger()
    book.admit([(prompt(0), 0)], 1)
    (request,) = book.start([0], worker=0)
    book.apply([progress([request], [[5]]), Finished(0, 0, 1, FinishReason.STOP)])
    book.apply([Scored(0, 1, 1.0, parts={"format": 1.0})])
    book.harvest([0])
    (rollout,) = book.take_finished()
    assert rollout.reward_parts == {"format": 1.0}
    assert book.columns.reward_parts[0] is None
    check(book)


def test_who_keeps_no_log_forgets_what_is_over_all_the_same() -> None:
    book = one_of_two_consumed()
    book.forget_finished()
    check(book)
    assert list(book.groups.members) == [1]
    assert book.take_finished() == []
    book.apply([Updated(1)])
    assert [r.token_ids.tolist() for r in book.harvest([1]).rollouts] == [[2]]
    check(book)
    assert (book.groups.members, book.tokens, book._records) == ({}, {}, {})
