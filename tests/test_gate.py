from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.buffer import Ledger
from stretto.gate import in_the_way
from stretto.history.log import read_rollouts, write_rollouts
from stretto.records import (
    Finished,
    FinishReason,
    Loaded,
    SamplingParams,
    Scored,
    State,
    Stopped,
    Updated,
    WorkerUp,
)
from stretto.staleness import Strategy, Unit
from tests.invariants import check
from tests.test_buffer import progress
from tests.world import prompt


def chosen(
    deadline: list[int], tokens: list[int], *, batch: int, eta: int, unit: list[int] | None = None
) -> list[int]:
    units = np.array(range(len(deadline)) if unit is None else unit, np.int64)
    found = in_the_way(
        np.array(deadline, np.int64), np.array(tokens, np.int64), units, batch=batch, max_staleness=eta
    )
    return [int(i) for i in np.flatnonzero(found)]


def test_nothing_is_in_the_way_while_all_can_be_taken_in_time() -> None:
    assert chosen([1, 1, 2, 2, 2, 2], [9] * 6, batch=2, eta=3) == [4, 5]
    assert chosen([1, 1, 2, 2], [9] * 4, batch=2, eta=3) == []
    assert chosen([], [], batch=2, eta=1) == []


def test_under_eta_0_nothing_may_be_left_behind() -> None:
    assert chosen([0, 1, 0], [5, 5, 5], batch=8, eta=0) == [0, 2]


def test_the_least_work_is_lost_and_the_newest_among_equals() -> None:
    assert chosen([1, 1, 1, 1], [7, 3, 3, 9], batch=3, eta=1) == [2]
    assert chosen([1, 1, 1, 1], [7, 3, 3, 9], batch=2, eta=1) == [1, 2]


def test_a_group_is_as_urgent_as_its_oldest_member_and_takes_all_its_members_places() -> None:
    # Two groups of two, each with an old member: both would have to be in the next batch, which takes one.
    unit = [0, 0, 1, 1]
    assert chosen([1, 3, 1, 3], [5, 5, 4, 4], unit=unit, batch=2, eta=2) == [2]
    assert chosen([1, 3, 1, 3], [5, 5, 4, 4], batch=2, eta=2) == []  # as single responses they fit


def late(deadline: list[int], unit: list[int], without: set[int], k: int) -> int:
    """Places that what is due by k takes."""
    due = {unit[i] for i in range(len(unit)) if i not in without and deadline[i] <= k}
    return sum(u in due for u in unit)


def fits(deadline: list[int], unit: list[int], without: set[int], batch: int, eta: int) -> bool:
    return all(late(deadline, unit, without, k) <= k * batch for k in range(eta + 1))


@settings(max_examples=300)
@given(
    held=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(0, 5)), max_size=30),
    batch=st.integers(1, 6),
    eta=st.integers(0, 5),
    grouped=st.booleans(),
)
def test_what_is_left_can_be_taken_in_time_whatever_the_groups(
    held: list[tuple[int, int, int]], batch: int, eta: int, grouped: bool
) -> None:
    deadline = [min(d, eta + 1) for d, _, _ in held]
    tokens, unit = [t for _, t, _ in held], [g if grouped else i for i, (_, _, g) in enumerate(held)]
    out = set(chosen(deadline, tokens, batch=batch, eta=eta, unit=unit))
    assert fits(deadline, unit, out, batch, eta)
    assert all(deadline[i] <= eta for i in out)


@settings(max_examples=300)
@given(
    held=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=8),
    size=st.integers(1, 3),
    batch=st.integers(1, 7),
    eta=st.integers(0, 3),
    data=st.data(),
)
def test_no_smaller_loss_would_do_where_groups_are_of_one_size_and_age(
    held: list[tuple[int, int]], size: int, batch: int, eta: int, data: st.DataObject
) -> None:
    """Against every set of groups: scheduling unit jobs by deadlines, where taking out the cheapest is optimal."""
    unit = [u for u in range(len(held)) for _ in range(size)]
    deadline = [min(held[u][0], eta + 1) for u in unit]
    tokens = [held[u][1] + data.draw(st.integers(0, 2)) for u in unit]
    out = set(chosen(deadline, tokens, batch=batch, eta=eta, unit=unit))
    ways = (
        {i for i, u in enumerate(unit) if u in given_up}
        for count in range(len(held) + 1)
        for given_up in combinations(range(len(held)), count)
    )
    least = min(sum(tokens[i] for i in way) for way in ways if fits(deadline, unit, way, batch, eta))
    assert sum(tokens[i] for i in out) == least
    for u in {unit[i] for i in out}:  # giving one group its tokens back would be one too many
        assert not fits(deadline, unit, {i for i in out if unit[i] != u}, batch, eta)


def test_groups_of_several_sizes_may_lose_more_than_the_least() -> None:
    # One place too few: the group of one has the fewer tokens and makes room enough. Two too few: it goes as well.
    deadline, tokens, unit = [1] * 5, [1, 5, 5, 9, 9], [0, 1, 1, 2, 2]
    assert chosen(deadline, tokens, unit=unit, batch=4, eta=1) == [0]
    assert chosen(deadline, tokens, unit=unit, batch=3, eta=1) == [0, 1, 2]


def started(
    *,
    groups: int,
    samples: int = 1,
    unit: Unit = "group",
    strategy: Strategy = "refresh",
    eta: int,
    batch: int,
) -> Ledger:
    """Every request runs, and has its id + 1 tokens of version 0."""
    book = Ledger(
        SamplingParams(max_new_tokens=100), unit=unit, strategy=strategy, max_staleness=eta, batch=batch
    )
    book.apply([WorkerUp(0, 64, 0)])
    book.admit([(prompt(i), 0) for i in range(groups)], samples)
    requests = book.start(range(groups * samples), 0)
    book.apply([progress(requests, [[9] * (i + 1) for i in range(len(requests))])])
    return book


def end(book: Ledger, *ids: int, scored: bool = True) -> None:
    attempts = [int(book.columns.attempt[i]) for i in ids]
    book.apply([Finished(0, i, a, FinishReason.STOP) for i, a in zip(ids, attempts, strict=True)])
    if scored:
        book.apply([Scored(i, a, 1.0) for i, a in zip(ids, attempts, strict=True)])


def test_what_runs_is_refreshed_when_its_worker_has_let_go_of_it() -> None:
    book = started(groups=3, eta=0, batch=1)
    end(book, 0)
    assert book.gate([0]).in_the_way == [1, 2]
    book.harvest([0])
    assert book.take_stops() == {0: ([2, 1], [1, 1])}
    assert book.view.state(1) == State.RUNNING
    assert book.gate([]).in_the_way == []  # already on its way out
    end(book, 1, scored=False)  # before it heard of it: that doesn't make it a response
    check(book)
    assert list(book.waiting) == [1]
    (request,) = book.start([1], 0)
    assert (request.token_ids.tolist(), request.draft_ids.tolist(), request.attempt) == ([], [9, 9], 2)
    assert book.columns.key[1] == request.key
    assert (book.view.refreshes(1), book.counters["refreshes"], book.counters["forced_refreshes"]) == (
        1,
        1,
        2,
    )
    assert (book.counters["discarded_tokens"], book.counters["reverified_tokens"]) == (2, 2)


def test_a_scored_response_loses_its_reward_and_late_answers_do_not_count() -> None:
    book = started(groups=2, samples=2, eta=0, batch=2)
    end(book, 0, 1, 2)
    end(book, 3, scored=False)
    assert list(book.view.ready_groups) == [0]
    book.harvest([0, 1])
    check(book)
    assert [book.view.state(i) for i in (2, 3)] == [State.PENDING, State.PENDING]
    assert book.view.unfinished(1) == 2
    book.apply([Scored(3, 1, 1.0), Updated(1), Loaded(0, 1)])
    assert book.counters["stale_events"] == 1
    requests = book.start([2, 3], 0)
    book.apply([progress(requests, [[4], [4]], version=1)])
    end(book, 2, 3)
    assert [r.oldest_version for r in book.harvest([2, 3]).rollouts] == [1, 1]
    assert [r.draft_ids.tolist() for r in book.take_finished()] == [[], [], [9] * 3, [9] * 4]
    check(book)


def test_an_update_waits_for_what_has_used_up_its_budget() -> None:
    book = started(groups=2, eta=0, batch=1)
    book.columns.refreshes[1] = 2
    end(book, 0)
    assert book.gate([0]).blocked == [1]
    with pytest.raises(ValueError, match="makes the update wait for 1 requests, first 1"):
        book.harvest([0])
    end(book, 1)
    assert book.gate([0]).blocked == []  # it has had its time
    book.harvest([0])
    assert book.view.state(1) == State.PENDING
    check(book)


def test_waiting_is_for_what_it_helps() -> None:
    book = started(groups=3, eta=0, batch=1, strategy="wait")
    end(book, 0, 1)
    assert book.gate([0]).in_the_way == [1, 2]
    assert book.gate([0]).blocked == [2]  # 1 has ended: no waiting makes room for it
    end(book, 2, scored=False)
    assert book.gate([0]).blocked == [2]
    book.apply([Scored(2, 1, 0.0)])
    book.harvest([0])
    assert book.view.state(2) == State.PENDING


def test_dropping_takes_the_whole_group() -> None:
    book = started(groups=2, samples=2, eta=1, batch=2, strategy="drop")
    book.apply([Updated(1), Loaded(0, 1)])
    end(book, 0, 1)
    assert book.gate([0, 1]).in_the_way == [2, 3]
    book.harvest([0, 1])
    check(book)
    assert [book.view.state(i) for i in (2, 3)] == [State.DISCARDED, State.DISCARDED]
    assert book.take_stops() == {0: ([2, 3], [1, 1])}
    assert (book.counters["discarded/stale"], book.counters["discarded_tokens"], book.alive) == (2, 7, 0)
    logged = {r.request_id: (r.outcome, r.discard_reason, len(r.token_ids)) for r in book.take_finished()}
    assert logged[3] == (State.DISCARDED, "stale", 4)
    check(book)


def test_what_was_told_to_drop_its_tokens_cannot_end_after_the_update() -> None:
    book = started(groups=2, eta=0, batch=1)
    book.stop([1], keep=False)
    end(book, 0)
    assert book.gate([0]).in_the_way == []
    book.harvest([0])
    end(book, 1, scored=False)
    assert book.view.state(1) == State.PENDING
    check(book)


def test_first_tokens_that_are_on_their_way_are_as_old_as_their_workers_weights() -> None:
    book = Ledger(SamplingParams(), max_staleness=0, batch=1)
    book.apply([WorkerUp(0, 8, 0)])
    book.admit([(prompt(0), 0), (prompt(1), 0)], 1)
    requests = book.start([0, 1], 0)
    book.apply([progress(requests[:1], [[1]])])
    end(book, 0)
    assert book.gate([0]).in_the_way == [1]


@pytest.mark.parametrize("ends_before_the_update", [True, False])
def test_what_old_weights_sampled_meanwhile_is_generated_again(ends_before_the_update: bool) -> None:
    book = started(groups=1, eta=0, batch=1)
    end(book, 0)
    book.harvest([0])
    book.admit([(prompt(1), 0)], 1)
    requests = book.start([1], 0)
    book.apply([progress(requests, [[5, 5]])])
    if ends_before_the_update:
        end(book, 1)
        book.apply([Updated(1)])
    else:
        book.columns.first_version[1] = -1  # as if its tokens were still on their way
        book.apply([Updated(1), progress(requests, [[5, 5]])])
        end(book, 1, scored=False)
    assert book.view.state(1) == State.PENDING
    check(book)


def test_single_responses_are_taken_from_their_groups_one_by_one() -> None:
    book = started(groups=1, samples=3, unit="response", eta=1, batch=2)
    end(book, 2)
    assert list(book.view.ready_groups) == []
    assert [r.request_id for r in book.harvest([2]).rollouts] == [2]
    book.apply([Updated(1), Loaded(0, 1)])
    book.take_finished()
    check(book)
    end(book, 0, 1)
    assert list(book.view.ready_groups) == [0]
    book.harvest([0])  # 1 is too old for the update after this one
    assert book.view.state(1) == State.PENDING
    check(book)


def test_parts_of_an_update_are_consumed_at_once_and_the_last_one_asks_the_gate() -> None:
    book = started(groups=3, eta=0, batch=2)
    end(book, 0)
    part = book.harvest([0], final=False)
    assert (part.final, book.updating, book.view.state(2)) == (False, False, State.RUNNING)
    end(book, 1)
    last = book.harvest([1])
    assert (last.final, last.version, book.updating) == (True, 0, True)
    book.apply([Finished(0, 2, 1, FinishReason.STOP)])
    assert book.view.state(2) == State.PENDING
    with pytest.raises(ValueError, match="the learner is at an update"):
        book.harvest([])
    check(book)


def test_a_draft_is_counted_as_verified_again_once_however_often_its_request_is_started() -> None:
    book = started(groups=2, eta=0, batch=1)
    end(book, 0)
    book.harvest([0])
    end(book, 1, scored=False)
    book.apply([Updated(1), Loaded(0, 1)])
    requests = book.start([1], 0, max_new=1)
    book.apply([progress(requests, [[9]], version=1), Stopped(0, 1, requests[0].attempt)])
    assert book.view.state(1) == State.PARKED
    (request,) = book.start([1], 0)
    assert (request.token_ids.tolist(), request.draft_ids.tolist()) == ([9], [9, 9])
    assert book.counters["reverified_tokens"] == 2


def test_a_resume_gives_back_what_was_dropped_as_drafts(tmp_path: Path) -> None:
    """From the ledger through the log of a checkpoint into a fresh ledger, and out to an engine."""
    book = started(groups=5, eta=0, batch=1)
    end(book, 0)
    end(book, 1)
    book.harvest([0])  # 1 had its reward, 2 to 4 run: all lose their tokens
    end(book, 2, scored=False)
    book.apply([Updated(1), Loaded(0, 1)])
    requests = book.start([2], 0)
    book.apply([progress(requests, [[9]], version=1)])  # has begun to say again what it said
    write_rollouts(tmp_path / "in_flight", book.in_flight(), step=1, exact=True)
    in_flight = read_rollouts(tmp_path / "in_flight", [prompt(i) for i in range(5)])
    drafts = {r.request_id: r.draft_ids.tolist() for r in in_flight}
    assert drafts == {1: [9] * 2, 2: [9] * 3, 3: [9] * 4, 4: [9] * 5}
    assert [r.refreshes for r in in_flight] == [1, 1, 1, 1]
    again = Ledger(book.sampling, max_staleness=0, batch=1)
    assert again.load_state_dict(book.state_dict(), in_flight) == []
    again.apply([WorkerUp(0, 64, 1)])
    check(again)
    before = again.counters["reverified_tokens"]
    told = {r.id: r for r in again.start([1, 2, 3, 4], 0)}
    assert {i: r.draft_ids.tolist() for i, r in told.items()} == drafts
    assert [told[i].token_ids.tolist() for i in (1, 2, 3)] == [[], [9], []]
    assert [told[i].key for i in (1, 2, 3, 4)] == [int(book.columns.key[i]) for i in (1, 2, 3, 4)]
    assert again.counters["reverified_tokens"] - before == 2 + 4 + 5  # of 2 it had been counted
    assert 3 in again.drafts
