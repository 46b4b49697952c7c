"""The index answers what the responses in its window say, builds aside, and stays within its memory."""

from __future__ import annotations

import itertools
import math
from concurrent import futures

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.alternatives import Alternatives
from stretto.errors import StrettoError
from stretto.history.builds import Weight, reward_weights
from stretto.history.frozen import find_frozen
from stretto.history.index import HistoryIndex, Response
from tests.history.responses import HeldUp, Text, known, response

LARGEST = 2**31 - 1
WEIGHTS: tuple[Weight, ...] = ("count", "reward", "recency", "probability")
Sample = tuple[Text, float]  # tokens and reward


def expected(visits: dict[int, list[Sample]], weight: Weight) -> dict[Text, tuple[float, float]]:
    sums: dict[Text, tuple[float, float]] = {(): (0, 0)}
    for visit, samples in visits.items():
        finite = [reward for _, reward in samples if math.isfinite(reward)]
        for tokens, reward in samples:
            w = 1.0
            if weight == "recency":
                w = 0.5 ** sum(other > visit for other in visits)
            elif weight == "reward" and math.isfinite(reward) and len(set(finite)) > 1:
                mean = sum(finite) / len(finite)
                std = math.sqrt(sum((r - mean) ** 2 for r in finite) / len(finite))
                w = math.exp(min(2.0, max(-2.0, (reward - mean) / std)))
            for stop in range(1, len(tokens) + 1):
                x = math.exp(response(tokens)[1][stop - 1]) if weight == "probability" else 1.0
                for string in {tokens[start:stop] for start in range(stop + 1)}:
                    count, total = sums.get(string, (0, 0))
                    sums[string] = (count + 1, total + w * x)
    return sums


def check(index: HistoryIndex, uid: str, visits: dict[int, list[Sample]], weight: Weight) -> None:
    handle = index.open(uid)
    sums = expected(visits, weight)
    assert (handle == -1) == (len(sums) == 1)
    if handle >= 0:
        found = known(index, handle)
        assert set(found) == set(sums)
        for string, (count, total) in sums.items():
            assert found[string][0] == count
            assert found[string][1] == pytest.approx(total, rel=1e-5)
        index.close(handle)


def test_alternatives_cost_memory_and_are_asked_for() -> None:
    """Behind 1 a response took 2 but could have taken 7."""
    top = Alternatives(
        np.array([[1, -1], [7, 2]], np.int32), np.log(np.array([[0.9, 0.1], [0.6, 0.4]], np.float32))
    )
    told = response((1, 2))._replace(logprobs=np.log([1.0, 0.4]), top=top)
    sizes = []
    for asked in (False, True):
        index = HistoryIndex(alternatives=asked)
        index.add("a", 0, [told])
        index.wait(["a"])
        arrays = (index.open("a"), index.arrays())[1]
        sizes.append(index.metrics()["bytes_per_token"])
        if asked:
            state = int(arrays.target[find_frozen(arrays, 0, 0, 0, 1)])
            begin = int(arrays.row[state])
            assert arrays.likely[begin : begin + 2].tolist() == [7, ~2]
        else:
            assert arrays.row.size == 0
    assert sizes[0] < sizes[1]


SAMPLES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 1, LARGEST]), max_size=6).map(tuple),
        st.sampled_from([0.0, 1.0, -3.0, math.nan, math.inf]),
    ),
    max_size=3,
)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), SAMPLES), max_size=8),
    st.sampled_from(WEIGHTS),
    st.integers(1, 3),
    st.booleans(),
)
def test_counts_and_weights_are_those_of_the_window(
    pieces: list[tuple[str, int, list[Sample]]], weight: Weight, window: int, background: bool
) -> None:
    index = HistoryIndex(window=window, weight=weight)
    model: dict[str, dict[int, list[Sample]]] = {"a": {}, "b": {}}
    for uid, visit, samples in pieces:
        index.add(uid, visit, [response(*sample) for sample in samples])
        if samples:
            model[uid].setdefault(visit, []).extend(samples)
        for old in sorted(model[uid])[:-window]:
            del model[uid][old]
        if background:
            index.prepare(["a", "b", "unknown"])
    index.wait(["a", "b", "unknown"])
    for uid, visits in model.items():
        check(index, uid, visits, weight)
    assert index.open("unknown") == -1
    texts = [tokens for visits in model.values() for samples in visits.values() for tokens, _ in samples]
    assert index.metrics()["tokens"] == sum(map(len, texts))
    assert index.metrics()["prompts"] == sum(bool(visits) for visits in model.values())


def test_reward_weights() -> None:
    assert reward_weights([1.0, 0.0, 0.0, 1.0]).tolist() == [math.e, 1 / math.e, 1 / math.e, math.e]
    assert reward_weights([-1.0, -1.0]).tolist() == [1.0, 1.0]
    assert reward_weights([math.nan, 2.0, 4.0]).tolist() == [1.0, 1 / math.e, math.e]
    assert reward_weights([math.nan]).tolist() == [1.0]
    assert reward_weights([]).tolist() == []
    assert reward_weights([100.0, *[0.0] * 20])[0] == math.exp(2.0)


def test_open_handles_share_one_automaton_and_keep_an_older_one_until_they_are_closed() -> None:
    index = HistoryIndex(window=1)
    index.add("a", 0, [response((1, 2))])
    index.add("b", 0, [response((7,))])
    index.wait("ab")
    first, other = index.open("a"), index.open("b")
    assert index.open("a") == first != other
    index.add("a", 1, [response((3,))])
    assert index.open("a") == first  # the newest that is ready
    index.wait(["a"])
    second = index.open("a")
    assert second not in (first, other)
    assert set(known(index, first)) == {(), (1,), (2,), (1, 2)}
    assert set(known(index, second)) == {(), (3,)}
    for _ in range(3):
        index.close(first)
    assert set(known(index, second)) == {(), (3,)}
    assert set(known(index, other)) == {(), (7,)}
    with pytest.raises(KeyError):
        index.close(first)
    index.close(other)
    assert set(known(index, index.open("b"))) == {(), (7,)}


def test_memory_is_bounded_and_the_longest_unvisited_goes_first_oldest_visit_first() -> None:
    tokens = tuple(range(100))
    index = HistoryIndex(max_bytes=5 * 400)
    for uid in "abc":
        index.add(uid, 0, [response(tokens)])
    index.add("a", 1, [response(tokens)])
    index.add("b", 1, [response(tokens)])
    assert index.metrics()["dropped_visits"] == 0
    index.add("a", 1, [response((1,))])  # order of last responses: c, b, a; four bytes too many
    metrics = index.metrics()
    assert (metrics["dropped_visits"], metrics["dropped_prompts"], metrics["prompts"]) == (1, 1, 2)
    index.add("d", 0, [response(tokens)])
    metrics = index.metrics()
    assert (metrics["dropped_visits"], metrics["dropped_prompts"], metrics["prompts"]) == (1, 0, 3)
    assert metrics["bytes"] == 4 * 400 + 4
    index = HistoryIndex(max_bytes=399)
    index.add("a", 0, [response(tokens)])
    assert index.metrics()["prompts"] == 0
    index = HistoryIndex(max_bytes=500)  # enough for the responses, not for an automaton
    index.add("a", 0, [response(tokens)])
    index.wait(["a"])
    assert index.metrics()["prompts"] == 0


def test_what_is_open_is_never_dropped() -> None:
    index = HistoryIndex(max_bytes=3000)
    index.add("a", 0, [response((1, 2, 1, 2))])
    index.wait(["a"])
    handle = index.open("a")
    strings = known(index, handle)
    for visit in range(40):
        index.add("b", visit, [response(tuple(range(visit, visit + 60)))])
        index.wait("ab")
        if visit % 2:
            opened = index.open("b")
            if opened >= 0:
                index.close(opened)
        assert index.metrics()["bytes"] <= 3000 + 1500  # an automaton of b's, which was open beside a's
        assert known(index, handle) == strings
    index.close(handle)
    index.add("b", 99, [response(tuple(range(200)))])
    assert index.metrics()["bytes"] <= 3000


def test_a_prompt_that_loses_a_visit_is_built_from_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    for under_way in (False, True):
        with monkeypatch.context() as patched:
            held_up = HeldUp(patched)
            index = HistoryIndex(max_bytes=31_000)
            index.add("a", 0, [response(tuple(range(100)))])
            index.add("a", 1, [response((500,))])
            if under_way:  # what is being built still contains the visit
                index.prepare(["a"])
                assert held_up.begun.wait(30)
            else:
                index.wait(["a"])
            index.add("b", 0, [response(tuple(range(7675)))])
            assert index.metrics()["dropped_visits"] == 1
            for visit in (1, 2):  # now there is room again
                index.add("b", visit, [response((1,))])
            index.prepare(["b"])
            assert index.open("a") == -1
            held_up.go.set()
            futures.wait([job.future for job in index._jobs.values()], timeout=30)  # nobody has to ask for it
        assert set(known(index, index.open("a"))) == {(), (500,)}


def test_a_huge_bound_does_not_reserve_what_no_machine_has() -> None:
    index = HistoryIndex(max_bytes=1 << 60)
    assert sum(array.nbytes for array in index.arrays()) <= 1 << 28


def test_metrics_are_since_the_last_call_and_use_the_clock_given() -> None:
    ticks = itertools.count()
    index = HistoryIndex(weight="recency", clock=lambda: float(next(ticks)))
    index.add("a", 0, [response((1, 2, 3))])
    index.wait(["a"])
    index.wait(["a"])
    metrics = index.metrics()
    assert (metrics["build_seconds"], metrics["built_tokens"], metrics["states"]) == (1.0, 3, 4)
    automaton = 4 * (4 * 5 + 1 + 5 * 2)  # 4 states of 5 numbers, `first` has one more, 5 edges of 2 numbers
    assert metrics["bytes_per_token"] == automaton / 3
    assert metrics["bytes"] == automaton + 3 * 4
    assert index.metrics()["built_tokens"] == 0


@pytest.mark.parametrize(
    ("weight", "tokens", "logprobs", "message"),
    [
        (
            "count",
            [1, 2**31],
            [],
            r"prompt p, visit 3, response 1: token id 2147483648 is not in 0 .. 2147483647",
        ),
        ("reward", [-1], [], "token id -1 is not in"),
        ("probability", [1, 2], [-0.5], "2 tokens, but 1 log-probs"),
        ("probability", [1], [math.nan], "NaN or above 0"),
        ("probability", [1], [0.5], "NaN or above 0"),
    ],
)
def test_bad_responses_are_refused_and_nothing_of_their_piece_is_kept(
    weight: Weight, tokens: list[int], logprobs: list[float], message: str
) -> None:
    index = HistoryIndex(weight=weight)
    bad = Response(np.array(tokens, np.int64), np.array(logprobs, np.float64), 0.0)
    with pytest.raises(StrettoError, match=message):
        index.add("p", 3, [response((1,)), bad])
    assert index.metrics()["prompts"] == 0


def test_alternatives_of_other_places_are_refused() -> None:
    index = HistoryIndex(alternatives=True)
    with pytest.raises(
        StrettoError, match=r"prompt p, visit 0, response 0: 2 tokens, but alternatives at 1 places"
    ):
        index.add("p", 0, [response((1, 2))._replace(top=Alternatives.none(1, 2))])


def test_recency_counts_visits_that_are_stored() -> None:
    """Another run's are a million visits older than this one's."""
    index = HistoryIndex(weight="recency")
    for visit, token in ((-(1 << 20), 1), (0, 2)):
        index.add("a", visit, [response((token,))])
    index.wait("a")
    found = known(index, index.open("a"))
    assert [found[1,][1], found[2,][1]] == [0.5, 1.0]


def test_bad_settings_are_named() -> None:
    with pytest.raises(StrettoError, match='did you mean "recency"?'):
        HistoryIndex(weight="recent")  # type: ignore[arg-type]
    with pytest.raises(StrettoError, match=r"window \(0\)"):
        HistoryIndex(window=0)
    with pytest.raises(StrettoError, match=r"max_bytes \(0\)"):
        HistoryIndex(max_bytes=0)
