"""What a drafter in vLLM must not lose is written however it ends. Without vLLM itself."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from stretto.draft.budget import Fixed
from stretto.draft.drafter import HistoryDrafter
from stretto.history.index import HistoryIndex
from stretto.history.log import read_rollouts
from stretto.integrations.vllm_folder import HistoryFolder
from stretto.integrations.vllm_memory import Memory
from stretto.integrations.vllm_rows import Step
from stretto.records import prompt_uid
from tests.integrations.test_vllm_history import OURS
from tests.integrations.test_vllm_rows import STOP, Asked, Batch

SLOTS = 4


class Life:
    """A batch, and the memory that hears of it, which a drafter owns."""

    def __init__(self, path: Path) -> None:
        self.batch, self.path = Batch(SLOTS), path
        folder = HistoryFolder(path, OURS)
        drafter = HistoryDrafter(HistoryIndex(), Fixed(8), slots=SLOTS)
        self.memory = Memory(self.batch.rows, drafter, folder, None, 0, 1 << 20)

    def step(self, asked: list[Asked], new: list[list[int]]) -> Step:
        step = self.batch.step(asked, new)
        self.memory.step()
        for left in step.left:
            self.memory.left(left)
        for one in step.new:
            text = self.batch.rows.texts[one.slot, : one.prompt]
            self.memory.began(one, prompt_uid(text.astype(np.int64)))
        return step


def kept(path: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts and responses in the folder."""
    files = sorted(path.glob("rank-*/*.parquet"))
    rollouts = [rollout for file in files for rollout in read_rollouts(file)]
    return sorted((r.prompt.token_ids.tolist(), r.token_ids.tolist()) for r in rollouts)


def test_what_is_in_flight_is_kept_up_to_its_stop_token(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.step([Asked(0, [1, 2]), Asked(1, [8])], [[4, STOP, 5], [6]])
    life.memory.close()
    assert kept(tmp_path) == [([1, 2], [4, STOP]), ([8], [6])]


def test_closed_in_the_middle_of_a_step_it_keeps_what_it_has_heard_of(tmp_path: Path) -> None:
    """A signal came when the rows had been followed: one that has just begun is nobody's yet, in a slot of its own or
    in that of one whose end was not heard of.
    """
    life = Life(tmp_path)
    first, second, late, later = (Asked(i, [i, 9]) for i in range(4))
    life.step([first, second], [[4], [5]])
    life.batch.step([first, late, later], [[4], [6], [7]])
    life.memory.close()
    assert kept(tmp_path) == [([0, 9], [4, 4])]
    HistoryFolder(tmp_path, OURS).close()
    assert not (tmp_path / "rank-1").exists()  # the lock was released


def test_is_written_when_its_owner_has_gone(tmp_path: Path) -> None:
    """An engine is deleted and another one made, in one process: that one has what the first one heard."""

    class Owner:
        """A drafter."""

        def __init__(self) -> None:
            self.itself = self  # as in what vLLM makes, so that only the collector finds it
            self.life = Life(tmp_path)
            self.life.memory.keep_beyond(self)

    owner = Owner()
    request = Asked(0, [1, 2])
    owner.life.step([request], [[4, STOP]])
    owner.life.step([], [])
    owner.life.step([Asked(1, [8])], [[6]])
    del owner
    gc.collect()
    assert kept(tmp_path) == [([1, 2], [4, STOP]), ([8], [6])]
    HistoryFolder(tmp_path, OURS).close()
    assert not (tmp_path / "rank-1").exists()


def test_closed_again_it_does_nothing_and_hears_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.step([Asked(0, [1])], [[4]])
    life.memory.close()
    life.step([Asked(1, [2])], [[4]])
    life.step([], [])
    life.memory.close()
    assert kept(tmp_path) == [([1], [4])]
