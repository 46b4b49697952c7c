"""Following requests through vLLM's rows, against a batch that says which request is where."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.integrations.vllm_rows import Left, New, Rows, Step

LONGEST = 64
STOP = 3


@dataclass
class Asked:
    """A request as only the batch knows it."""

    name: int
    prompt: list[int]
    said: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.said


class Batch:
    """Rows as vLLM has them: what has ended leaves anything behind, rows are moved, swapped and re-used."""

    def __init__(self, slots: int) -> None:
        self.tokens = np.full((slots, LONGEST), 9, np.int32)
        self.totals = np.zeros(slots, np.int32)
        self.rows = Rows(slots, LONGEST, {STOP})

    def step(self, asked: list[Asked], new: list[list[int]]) -> Step:
        for row, (one, more) in enumerate(zip(asked, new, strict=True)):
            one.said += more
            self.tokens[row, : len(one.text)] = one.text
            self.totals[row] = len(one.text)
        counts = np.array([len(more) for more in new], np.int64)
        return self.rows.follow(counts, self.totals, self.tokens)


def said(left: Left) -> tuple[list[int], list[int]]:
    return left.tokens[: left.prompt].tolist(), left.tokens[left.prompt :].tolist()


def newest(rows: Rows, slot: int) -> list[int]:
    return rows.texts[slot, rows.last[slot] : rows.length[slot]].tolist()  # type: ignore[no-any-return]


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[list[int]]]], int]:
    """How many rows, requests (prompt, what each step adds), and a seed for the order of rows."""
    token = st.integers(0, 2)  # few: many texts are alike
    more = st.lists(st.lists(token, min_size=1, max_size=3), min_size=1, max_size=6)
    prompt = st.lists(st.integers(10, 11), min_size=1, max_size=2)  # no prompt is a prompt and its response
    request = st.tuples(prompt, more)
    return (
        draw(st.integers(1, 5)),
        draw(st.lists(request, min_size=1, max_size=12)),
        draw(st.integers(0, 2**32)),
    )


@given(lives())
@settings(max_examples=300)
def test_every_response_is_followed_whole(
    life: tuple[int, list[tuple[list[int], list[list[int]]]], int],
) -> None:
    """In any order of rows, each slot's text is a row's, and what leaves is what requests said, from their prompts."""
    slots, requests, seed = life
    random = np.random.default_rng(seed)
    batch = Batch(slots)
    waiting = [(Asked(i, prompt), list(steps)) for i, (prompt, steps) in enumerate(requests)]
    running: list[tuple[Asked, list[list[int]]]] = []
    ended: list[Asked] = []
    heard: list[Left] = []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        random.shuffle(running)
        step = batch.step([one for one, _ in running], [steps.pop(0) for _, steps in running])
        heard += step.left
        for row, (one, _) in enumerate(running):
            slot = step.slots[row]
            assert batch.rows.texts[slot, : batch.rows.length[slot]].tolist() == one.text
        assert len(set(step.slots.tolist())) == len(running)
        ended += [one for one, steps in running if not steps]
        running = [(one, steps) for one, steps in running if steps]
    step = batch.step([], [])
    heard += step.left
    assert sorted(map(said, heard)) == sorted((one.prompt, one.said) for one in ended)


def test_a_new_request_in_an_old_row_is_new() -> None:
    batch = Batch(2)
    first, second = Asked(0, [1, 2]), Asked(1, [1, 2])
    step = batch.step([first], [[5]])
    assert [new.prompt for new in step.new] == [2]
    step = batch.step([second], [[6]])
    assert [said(left) for left in step.left] == [([1, 2], [5])]
    assert [(new.row, new.back) for new in step.new] == [(0, None)]


def test_rows_that_swap_keep_their_slots() -> None:
    batch = Batch(3)
    a, b, c = Asked(0, [1]), Asked(1, [1]), Asked(2, [2])
    before = batch.step([a, b, c], [[4], [5], [6]]).slots.tolist()
    step = batch.step([c, a, b], [[7], [7, 8], [7]])
    assert step.slots.tolist() == [before[2], before[0], before[1]]
    assert not step.new
    assert not step.left
    assert newest(batch.rows, before[0]) == [7, 8]


def test_long_rows_that_swap_are_seen() -> None:
    """Texts of one length are told apart by their ends and some places before, not read whole."""
    random = np.random.default_rng(0)
    rows = Rows(2, 1000)
    tokens = random.integers(0, 9, (2, 1000)).astype(np.int32)
    tokens[1, 800:] = tokens[0, 800:]  # they differ before only
    one = np.ones(2, np.int64)
    before = rows.follow(one, 900 * one, tokens).slots.tolist()
    assert rows.follow(one, 901 * one, tokens).slots.tolist() == before
    step = rows.follow(one, 902 * one, tokens[::-1].copy())
    assert step.slots.tolist() == before[::-1]
    assert not step.new
    assert not step.left


def test_a_request_that_comes_back_keeps_its_prompt() -> None:
    """After a preemption its row holds prompt and response; only what was seen before tells where one begins."""
    batch = Batch(2)
    a, b = Asked(0, [1, 2]), Asked(1, [1, 2])
    batch.step([a, b], [[4, 4], [5]])
    step = batch.step([b], [[6]])
    assert [said(left) for left in step.left] == [([1, 2], [4, 4])]
    step = batch.step([b, a], [[6], []])  # being prefilled again
    assert step.slots.tolist()[1] == -1
    (new,) = batch.step([b, a], [[6], [7]]).new
    assert isinstance(new, New)
    assert (new.row, new.prompt) == (1, 2)
    assert new.back is not None
    assert batch.rows.texts[new.slot, :5].tolist() == [1, 2, 4, 4, 7]


def test_steps_without_a_call_are_caught_up_with() -> None:
    """Near the model's longest text vLLM does not ask for drafts, and goes on."""
    batch = Batch(2)
    a = Asked(0, [1, 2])
    batch.step([a], [[4]])
    a.said += [5, 6]
    step = batch.step([a], [[7]])
    assert not step.new
    assert newest(batch.rows, int(step.slots[0])) == [5, 6, 7]


def test_a_request_that_began_in_a_step_without_a_call_has_its_prompt() -> None:
    """If the prompt was seen before; it is the longest of those that the text begins with."""
    batch = Batch(3)
    a, b = Asked(0, [1, 2]), Asked(1, [1, 2, 7])
    batch.step([a, b], [[4], [4]])
    a.said += [5]  # no call, and these two have begun
    c, d = Asked(2, [1, 2, 7], [6, 6]), Asked(3, [8, 8], [6])
    new = batch.step([a, c, d], [[7], [5], [5]]).new
    assert [(one.row, one.prompt) for one in new] == [(1, 3), (2, 3)]  # of the other nothing was known
    assert [one.prompt for one in batch.step([a, Asked(4, [1, 2, 7, 9])], [[7], [5]]).new] == [4]


def test_what_is_behind_a_stop_token_is_no_response() -> None:
    batch = Batch(1)
    batch.step([Asked(0, [1])], [[4, STOP, 5]])
    (left,) = batch.step([], []).left
    assert said(left) == ([1], [4, STOP])
    assert left.stopped


def test_the_next_turn_goes_on_from_the_first_prompt() -> None:
    batch = Batch(1)
    batch.step([Asked(0, [1])], [[4, STOP]])
    batch.step([], [])
    (new,) = batch.step([Asked(1, [1, 4, STOP, 8, 8])], [[6]]).new
    assert new.prompt == 1


COMPILED = """
import numpy as np
from stretto.draft import no_drafts
from stretto.draft.compile import compile_kernels
from stretto.draft.paths import judge
from stretto.integrations.vllm_rows import Rows, _goes_on, _take

compile_kernels()
rows = Rows(2, 8, {3})
kernels = judge, _goes_on, _take
before = [len(kernel.signatures) for kernel in kernels]
for total in (3, 4):
    slots = rows.follow(np.ones(2, np.int64), np.full(2, total, np.int32), np.zeros((2, 8), np.int32)).slots
drafts, begins = no_drafts(2), rows.last[slots]
emitted = np.where(np.zeros(2, np.bool_), 0, rows.length[slots] - begins)
judge(drafts.counts, drafts.token_ids, begins, emitted, rows.texts.reshape(-1))
assert before == [len(kernel.signatures) for kernel in kernels] == [1, 1, 1], before
"""


def test_no_step_compiles_anything() -> None:
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=120)


def test_what_has_left_is_forgotten_in_time() -> None:
    batch = Batch(1)
    for i in range(1000):
        batch.step([Asked(i, [i])], [[4]])
        batch.step([], [])
    assert len(batch.rows._left) <= 256
