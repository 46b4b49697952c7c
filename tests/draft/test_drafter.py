"""The drafter knows what was said after the same text before, in every source, and forgets what has ended."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.draft import SOURCES, Verified, no_drafts
from stretto.draft.budget import Fixed, Goodput
from stretto.draft.cost import CostModel
from stretto.draft.counters import DEPTHS
from stretto.draft.drafter import START, HistoryDrafter
from stretto.history.log import read_rollouts, write_rollouts
from tests.draft.engine import columns, drafter, propose, request, rollout, verify, write
from tests.draft.trees import parent_closed

ROOT = Path(__file__).parents[2]


class TestSources:
    def test_history_is_found_by_the_prompt(self) -> None:
        it = drafter()
        it.remember([rollout([1, 2, 3, 4])])
        it.begin(0, request(0))
        it.begin(1, request(1, group=1, prompt=(5, 6)))
        drafts = propose(it, [0, 1], [0, 0])
        assert drafts.counts.tolist() == [4, 0]
        assert drafts.token_ids.tolist() == [1, 2, 3, 4]
        assert {SOURCES[s] for s in drafts.sources} == {"history"}

    def test_what_is_remembered_later_reaches_the_next_request(self) -> None:
        it = drafter(sources=["history"])
        it.begin(0, request(0))
        propose(it, [0], [0])
        it.remember([rollout([1, 2])])
        it.begin(1, request(1))
        assert propose(it, [0, 1], [0, 0]).counts.tolist() == [0, 2]

    def test_the_prompt_is_quoted(self) -> None:
        it = drafter()
        it.begin(0, request(0))
        write(it, 0, [3, 6, 7])
        drafts = propose(it, [0], [3])
        assert drafts.token_ids.tolist() == [8, 9]
        assert {SOURCES[s] for s in drafts.sources} == {"prompt"}

    def test_the_prompt_goes_on_as_it_did_before(self) -> None:
        it = drafter()
        own = request(0)
        own.prompt_ids = np.array([5, 6, 7, 8, 9, 5, 6, 7])
        it.begin(0, own)
        assert propose(it, [0], [0]).token_ids.tolist()[:2] == [8, 9]

    @pytest.mark.parametrize("source", SOURCES)
    def test_a_source_that_is_off_says_nothing(self, source: str) -> None:
        it = drafter(sources=[other for other in SOURCES if other != source])
        it.remember([rollout([1, 2, 3, 6, 7, 8])])
        for slot in range(2):
            it.begin(slot, request(slot))
            write(it, slot, [1, 4, 6, 7])
        it.begin(2, request(2))
        drafts = [propose(it, [0, 1, 2], [4, 4, 0]) for _ in range(2)]
        assert drafts[0].token_ids.size
        assert SOURCES.index(source) not in drafts[0].sources
        assert it.metrics()[f"spec/drafted/{source}"] == 0


class TestRequests:
    TEXT = (1, 2, 3, 1, 2, 4, 6, 7)

    def filled(self, sources: Collection[str] = SOURCES) -> HistoryDrafter:
        it = drafter(sources=sources)
        it.remember([rollout([1, 2, 3, 1, 2, 4, 6, 7, 8]), rollout([1, 2, 4, 4])])
        return it

    def test_a_resumed_one_is_where_it_was(self) -> None:
        went_on, resumed = self.filled(), self.filled()
        went_on.begin(0, request(0))
        for place, token in enumerate(self.TEXT):
            nothing = propose(went_on, [0], [place], room=0)
            went_on.observe(np.zeros(1, np.int64), nothing, *verify(nothing, [[token]]))
        resumed.begin(3, request(0, tokens=self.TEXT))
        known = len(self.TEXT)
        assert columns(propose(went_on, [0], [known])) == columns(propose(resumed, [3], [known]))
        assert propose(resumed, [3], [known]).token_ids.size

    def test_a_slot_used_again_knows_nothing_of_who_was_there(self) -> None:
        used, fresh = (self.filled(["history", "prompt"]) for _ in range(2))  # in flight it would be known of
        used.begin(0, request(0, group=0, tokens=self.TEXT))
        propose(used, [0], [len(self.TEXT)])
        used.end(0, None)
        for it in (used, fresh):
            it.begin(0, request(7, group=1, tokens=(1, 2)))
        assert columns(propose(used, [0], [2])) == columns(propose(fresh, [0], [2]))

    def test_what_siblings_say_has_its_place_whoever_is_beside_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Room for a step's tokens is reserved where any of its requests is in a group, not only the first."""
        it = drafter(sources=["siblings"])
        it.begin(0, request(0))
        it.begin(1, request(1, group=1))
        it._leave(0)
        reserved: list[int] = []
        reserve = it._pool.reserve

        def noting(size: int) -> Any:
            reserved.append(size)
            return reserve(size)

        monkeypatch.setattr(it._pool, "reserve", noting)
        nothing = no_drafts(2)
        it.observe(np.arange(2), nothing, *verify(nothing, [[1], [2]]))
        propose(it, [0, 1], [1, 1])
        assert reserved == [2]

    def test_the_budget_hears_of_begins_and_natural_ends(self) -> None:
        class Listens(Fixed):
            heard: list[tuple[str, int, float | None]]

            def begin(self, slot: int, predicted_length: float | None = None) -> None:
                self.heard.append(("begin", slot, predicted_length))

            def end(self, slot: int, length: int) -> None:
                self.heard.append(("end", slot, length))

        budget = Listens(4)
        budget.heard = []
        it = drafter(budget=budget)
        it.begin(0, request(0))
        it.end(0, None)
        it.remember([rollout([1]), rollout([1, 2, 3])])
        it.remember([rollout([1, 2, 3, 4], visit=1)])
        it.remember([rollout([1, 2], visit=1), rollout([1] * 30, visit=0)])
        it.begin(2, request(0))
        it.end(2, 7)
        assert budget.heard == [("begin", 0, None), ("begin", 2, 3.0), ("end", 2, 7)]


class TestProposals:
    @settings(max_examples=40)
    @given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 5), st.integers(0, 10**6))
    def test_are_the_best_within_what_the_step_takes(
        self, most: int, nodes: int, room: int, seed: int
    ) -> None:
        draw = random.Random(seed)
        it = drafter(budget=Fixed(nodes), max_nodes=10)
        it.remember([rollout([draw.randrange(4) for _ in range(12)]) for _ in range(3)])
        for slot in range(4):
            it.begin(slot, request(slot, tokens=[draw.randrange(4)] * (slot % 2)))
        known = [0, 1, 0, 1]
        drafts = propose(it, range(4), known, room, most)
        everything = propose(it, range(4), known, room)
        assert drafts.token_ids.size == min(most, everything.token_ids.size)
        assert drafts.counts.max(initial=0) <= nodes
        assert drafts.depth.max(initial=0) <= room
        assert parent_closed(drafts, np.ones(drafts.token_ids.size, np.bool_))
        best = np.sort(everything.estimates)[::-1][: drafts.token_ids.size]
        assert np.sort(drafts.estimates)[::-1].tolist() == best.tolist()

    def test_noise_is_that_of_the_request(self) -> None:
        """Two tokens are as probable; which comes first is decided by each request's own key."""
        it = drafter(slots=32, sources=["history"])
        it.remember([rollout([token]) for token in (1, 2) for _ in range(4)])
        for slot in range(32):
            it.begin(slot, request(slot))
        drafts = propose(it, range(32), [0] * 32)
        first = drafts.token_ids[np.cumsum(drafts.counts) - drafts.counts]
        assert set(first.tolist()) == {1, 2}

    def test_a_steps_price_keeps_hopeless_nodes_from_being_grown(self) -> None:
        cost = CostModel()
        cost.fit([(1, 1.0), (101, 51.0)])  # half as much as a step
        it = drafter(budget=Goodput(cost), sources=["history"])
        it.remember([rollout([1, 2, 3, 4, 5]) for _ in range(30)] + [rollout([t]) for t in range(9, 14)])
        it.begin(0, request(0))
        first = propose(it, [0], [0])
        proposed = it.metrics()["spec/proposed"]
        again = propose(it, [0], [0])
        assert columns(again) == columns(first)
        assert first.token_ids.size <= it.metrics()["spec/proposed"] < proposed

    def test_what_was_learnt_is_state(self) -> None:
        it, other = (drafter(sources=["history", "prompt"]) for _ in range(2))
        for one in (it, other):
            one.remember([rollout([1, 2, 3, 1, 2, 4]), rollout([2, 2, 3])])
        for id in range(20):
            it.begin(0, request(id, group=id))
            write(it, 0, [1, 2, 2, 2, 3, 1])
            it.end(0, 6)
        state = json.loads(json.dumps(it.state_dict()))
        for one in (it, other):
            one.begin(0, request(50, group=50))
        untaught = columns(propose(other, [0], [0]))
        other.load_state_dict(state | {"budget": {"of": "another kind"}}, budget=False)
        assert other.calibration.state_dict() == it.calibration.state_dict()
        other.load_state_dict(state)
        assert other.state_dict() == it.state_dict()
        assert columns(propose(other, [0], [0])) == columns(propose(it, [0], [0])) != untaught

    def test_a_step_that_nothing_was_proposed_for_says_nothing_about_the_last_proposal(self) -> None:
        """vLLM draws for requests that it has just prefilled; there is nothing to propose for before."""
        it = drafter(sources=["history"])
        it.remember([rollout([1, 2, 3])])
        it.begin(0, request(0))
        assert propose(it, [0], [0]).token_ids.size
        before = it.state_dict()["calibration"]["counts"]
        none = np.zeros(0, np.bool_)
        it.observe(np.array([0]), no_drafts(1), Verified(none, none, np.ones(1, np.int64)), np.array([1]))
        assert it.state_dict()["calibration"]["counts"] == before

    def test_how_long_nothing_was_worth_checking_is_state(self) -> None:
        it, other = (drafter(sources=["history"], pause=8) for _ in range(2))
        it.begin(0, request(0))
        for _ in range(6):
            propose(it, [0], [0])
        other.load_state_dict(json.loads(json.dumps(it.state_dict())))
        assert other.state_dict()["pauses"] == it.state_dict()["pauses"] == {"fruitless": 6, "credit": 12}
        old = it.state_dict()
        del old["pauses"]  # as checkpoints of before
        other = drafter(sources=["history"], pause=8)
        other.load_state_dict(old)
        assert other.state_dict()["pauses"]["fruitless"] == 0

    def test_of_another_versions_calibration_nothing_is_taken(self, caplog: pytest.LogCaptureFixture) -> None:
        it, fresh = drafter(), drafter()
        state = it.state_dict()
        state["calibration"]["counts"] = state["calibration"]["counts"][1:]
        it.load_state_dict(state)
        assert it.state_dict() == fresh.state_dict()
        assert caplog.messages[0].startswith(
            "what drafts are worth is learnt anew: calibration: stored counts"
        )


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=4),
    st.floats(0.01, 1.0),
)
def test_histories_from_the_log_are_those_that_were_live(texts: list[list[int]], probability: float) -> None:
    batch = [rollout(text, probability=probability ** (i + 1)) for i, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        write_rollouts(Path(folder) / "log.parquet", batch, step=0)
        logged = read_rollouts(Path(folder) / "log.parquet")
    live, resumed = drafter(sources=["history"]), drafter(sources=["history"])
    live.remember(batch)
    resumed.remember(logged)
    uid = batch[0].prompt.uid
    for it in (live, resumed):
        it.index.wait([uid])
        assert it.index.open(uid) == 0
    for ours, theirs in zip(live.index.arrays(), resumed.index.arrays(), strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def test_metrics_count_what_each_source_said() -> None:
    it = drafter()
    it.remember([rollout([1, 2, 3, 4])])
    it.begin(0, request(0))
    drafts = propose(it, [0], [0])
    it.observe(np.zeros(1, np.int64), drafts, *verify(drafts, [[1, 2, 5, 5]]))
    found = it.metrics()
    assert found["spec/proposed"] == found["spec/drafted/history"] == 4
    assert found["spec/accepted/history"] == 2
    assert [found[f"spec/acceptance/{depth}"] for depth in (1, 2, 3)] == [1.0, 1.0, 0.0]
    assert np.isnan([found[f"spec/acceptance/{depth}"] for depth in range(4, DEPTHS + 1)]).all()
    assert found["spec/index/tokens"] == 5  # the beginning is one
    assert it.metrics()["spec/proposed"] == 0


def play(seed: int, steps: int = 60) -> None:
    """Requests come, go on, are stopped, resumed and end, in every order; what is proposed are trees of tokens."""
    draw, slots = random.Random(seed), 3
    it = drafter(slots=slots, max_nodes=6, generation=20)
    waiting = [(id, id // 2, [draw.randrange(1, 5) for _ in range(draw.randrange(1, 9))]) for id in range(12)]
    known: dict[int, int] = {}
    running: dict[int, tuple[int, int, list[int]]] = {}  # slot -> id, group, response
    for visit in range(steps):
        free = [slot for slot in range(slots) if slot not in running]
        if waiting and free:
            id, group, text = running[free[0]] = waiting.pop(draw.randrange(len(waiting)))
            it.begin(free[0], request(id, group, tokens=text[: known.setdefault(id, 0)]))
        chosen = sorted(running)
        if not chosen:
            break
        so_far = [known[running[slot][0]] for slot in chosen]
        futures = [running[slot][2][done:] for slot, done in zip(chosen, so_far, strict=True)]
        drafts = propose(it, chosen, so_far, room=4, most=draw.randrange(12))
        assert START not in drafts.token_ids
        assert parent_closed(drafts, np.ones(drafts.token_ids.size, np.bool_))
        verified, tokens = verify(drafts, futures)
        it.observe(np.array(chosen, np.int64), drafts, verified, tokens)
        for slot, emitted in zip(chosen, verified.emitted.tolist(), strict=True):
            id, group, text = running[slot]
            known[id] += emitted
            if known[id] == len(text):
                it.end(slot, len(text))
                it.remember([rollout(text, visit // 20)])
                del running[slot]
            elif draw.random() < 0.2:
                it.end(slot, None)
                waiting.append(running.pop(slot))


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_begins_stops_and_ends(seed: int) -> None:
    play(seed)


def test_what_is_never_worth_checking_is_asked_for_less_often() -> None:
    cost = CostModel()
    cost.fit([(1, 1.0), (2, 1000.0)])
    it = drafter(budget=Goodput(cost), sources=["history"], pause=8)
    it.remember([rollout([1, 2, 3, 4] * 20)])
    it.begin(0, request(0))

    def asked(steps: int) -> list[bool]:
        found = []
        for _ in range(steps):
            it.budget.floor = 0.0  # so that what was asked for was offered
            it.metrics()
            assert not propose(it, [0], [0]).counts.any()
            found.append(it.metrics()["spec/proposed"] > 0)
        return found

    assert [i for i, yes in enumerate(asked(30)) if yes] == [0, 1, 2, 4, 8, 16, 24]


def test_what_was_said_while_nothing_was_asked_for_is_known_afterwards() -> None:
    cost = CostModel()
    cost.fit([(1, 1.0), (2, 1000.0)])
    it = drafter(budget=Goodput(cost), sources=["history", "siblings"], pause=8)
    text = list(range(1, 41))
    it.remember([rollout(text)])
    it.begin(0, request(0))
    for token in text[:24]:
        assert not propose(it, [0], [0]).counts.any()
        none = np.zeros(0, np.bool_)
        it.observe(np.array([0]), no_drafts(1), Verified(none, none, np.ones(1, np.int64)), np.array([token]))
    it.begin(1, request(1, tokens=text[:5]))
    it.budget = Fixed(4)
    drafts = propose(it, [0, 1], [24, 5])  # the 25th step, which is asked
    assert drafts.token_ids.tolist() == [25, 26, 27, 28, 6, 7, 8, 9]


SCRIPT = """
from numba.core import event
from tests.draft.engine import drafter
from tests.draft.test_drafter import play

compiled = []

class Listener(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        pass

drafter()
with event.install_listener("numba:compile", Listener()):
    play(0)
print(compiled)
"""


def test_nothing_is_compiled_after_the_constructor() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
