"""What vLLM's requests said: when it becomes history, with which reward, and how it is kept. Without vLLM itself."""

from __future__ import annotations

import errno
import logging
import math
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Mistral3Config

from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.integrations.vllm import _stop_ids, reward, rewards
from stretto.integrations.vllm_folder import UNWRITTEN, HistoryFolder
from stretto.integrations.vllm_history import (
    EPOCH,
    LARGEST_VISIT,
    MOST_WAITING,
    REST,
    OnlineHistory,
)
from stretto.integrations.vllm_rewards import Rewards
from stretto.records import Rollout, prompt_uid

OURS = {"format": 1, "vocabulary": 1000, "tokenizer": None}
PROMPT = [1, 2]
UID = prompt_uid(np.array(PROMPT))


class Life:
    """An OnlineHistory, what it has handed on, and requests of prompts."""

    def __init__(self, heard: Rewards | None = None, **arguments: int) -> None:
        self.known: list[Rollout] = []
        self.now = EPOCH + 100.0
        self.history = OnlineHistory(self.known.extend, heard, clock=lambda: self.now, **arguments)
        self.serial = 0

    def say(self, *responses: list[int], whole: bool = True, prompt: list[int] = PROMPT) -> list[int]:
        """So many requests begin together and end one by one; their serial numbers."""
        uid = prompt_uid(np.array(prompt))
        for _ in responses:
            self.history.began(uid)
        for response in responses:
            self.serial += 1
            self.history.ended(uid, self.serial, np.array(prompt + response, np.int32), len(prompt), whole)
        return [self.serial - i for i in range(len(responses))][::-1]

    @property
    def texts(self) -> list[list[int]]:
        return [rollout.token_ids.tolist() for rollout in self.known]

    @property
    def rewards(self) -> dict[tuple[int, ...], float]:
        return {tuple(rollout.token_ids.tolist()): rollout.reward for rollout in self.known}


class TestVisits:
    def test_responses_are_history_once_no_sibling_is_in_flight(self) -> None:
        life = Life()
        life.history.began(UID)
        life.say([3], [4])
        assert life.texts == []
        life.history.ended(UID, 99, np.array([*PROMPT, 5], np.int32), 2)
        assert life.texts == [[3], [4], [5]]

    def test_a_preempted_one_waits_for_its_rest(self) -> None:
        """Neither its part nor those of others that were preempted with it count beside the whole."""
        life = Life()
        first, second = life.say([3], [4], whole=False)
        life.history.step()
        life.history.began(UID, first)
        life.history.began(UID, second)
        for serial, said in ((11, [3, 3]), (12, [4, 4])):
            life.history.ended(UID, serial, np.array([*PROMPT, *said], np.int32), 2)
        life.history.flush()
        assert life.texts == [[3, 3], [4, 4]]

    def test_one_that_does_not_come_back_is_taken_as_it_is(self) -> None:
        life = Life()
        life.say([3], whole=False)
        for _ in range(REST - 1):
            life.history.step()
        assert life.texts == []
        life.history.step()
        assert life.texts == [[3]]

    def test_or_when_its_prompt_is_visited_again(self) -> None:
        life = Life()
        life.say([3], whole=False)
        life.history.began(UID)
        assert life.texts == [[3]]

    def test_visits_are_in_the_clocks_order_whoever_saw_them(self) -> None:
        """Two engines: the one that ran later has the newer visits, however many the other one had."""
        early, late = Life(), Life()
        for _ in range(5):
            early.say(*[[3]] * 8)
        late.now += 100
        late.say([4])
        assert [r.visit for r in early.known[::8]] == [100, 101, 102, 103, 104]
        assert late.known[0].visit == 200

    def test_a_prompt_that_is_always_in_flight_is_visited_all_the_same(self) -> None:
        """Else its visit, of which all responses are kept, would have no end."""
        life = Life()
        life.history.began(UID)
        for i in range(1000):
            life.say([i % 7, i])
        sizes = Counter(rollout.visit for rollout in life.known)
        assert sum(sizes.values()) > 990
        assert max(sizes.values()) <= LARGEST_VISIT
        assert list(sizes) == sorted(sizes)

    def test_one_that_comes_back_belongs_to_the_visit_in_which_it_ends(self) -> None:
        life = Life()
        life.history.began(UID)
        (early,) = life.say([1], whole=False)
        life.say(*[[2]] * LARGEST_VISIT)
        life.history.began(UID)  # the next visit
        life.history.began(UID, early)
        life.history.ended(UID, 99, np.array([*PROMPT, 1, 1], np.int32), 2)
        life.history.flush()
        visits = Counter(rollout.visit for rollout in life.known)
        assert [visits[visit] for visit in sorted(visits)] == [LARGEST_VISIT, 1]
        assert life.texts[-1] == [1, 1]

    def test_visits_are_newer_than_what_was_read(self) -> None:
        life = Life(first_visit=10**6)
        life.say([3])
        assert life.known[0].visit == 10**6 + 1

    def test_what_waits_is_bounded(self) -> None:
        """What has waited longest becomes history first."""
        life = Life(most_bytes=4 * 100)
        for i in range(30):
            life.say([i] * 8, whole=False, prompt=[i, 0])
        assert life.texts == [[i] * 8 for i in range(20)]
        life.history.flush()
        assert len(life.texts) == 30


class TestRewards:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "rewards.jsonl"

    def test_are_found_whenever_they_come(self, file: Path) -> None:
        """Before the response has left the batch, after, and behind a limit more than was given out."""
        life = Life(Rewards(file))
        reward(file, PROMPT, [3], 0.5)
        life.history.began(UID)
        life.say([3], [4], [5, 5, 5])
        rewards(file, [(PROMPT, [4], 1.0), (PROMPT, [5, 5], 2.0)])
        life.history.ended(UID, 99, np.array([*PROMPT, 6], np.int32), 2)
        life.history.began(UID)  # again: the last one waits no longer
        assert life.rewards == {
            (3,): 0.5,
            (4,): 1.0,
            (5, 5, 5): 2.0,
            (6,): pytest.approx(math.nan, nan_ok=True),
        }

    def test_of_more_prompts_than_are_remembered_unmatched_none_is_lost(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stretto.integrations.vllm_rewards.MOST_REWARDS", 10)
        life = Life(Rewards(file))
        for i in range(100):
            life.say([i, 5], prompt=[i, 0])
        rewards(file, [([i, 0], [i, 5], float(i)) for i in range(100)])
        life.history.flush()
        assert life.rewards == {(i, 5): float(i) for i in range(100)}

    def test_of_more_responses_than_wait_the_newest_are_found(self, file: Path) -> None:
        life = Life(Rewards(file))
        life.say(*[[i, 5] for i in range(100)])
        rewards(file, [(PROMPT, [i, 5], float(i)) for i in range(100)])
        life.history.flush()
        graded = {said: value for said, value in life.rewards.items() if not math.isnan(value)}
        assert graded == {(i, 5): float(i) for i in range(100 - len(graded), 100)}
        assert len(graded) >= MOST_WAITING
        assert len(life.known) == 100

    def test_what_has_its_reward_waits_no_longer(self, file: Path) -> None:
        life = Life(Rewards(file))
        life.say([3])
        reward(file, PROMPT, [3], 1.0)
        for i in range(20):
            life.say([4], prompt=[i, 0, 0])
        life.history.step()
        assert life.texts == [[3]]

    def test_lines_that_are_none_are_said_once(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        life = Life(Rewards(file))
        life.say([3])
        for line in ("none", '{"prompt": 1}', "[]", ""):
            with file.open("a") as out:
                out.write(f"{line}\n")
        reward(file, PROMPT, [3], 1.0)
        life.history.flush()
        assert life.rewards == {(3,): 1.0}
        assert len([r for r in caplog.records if "no reward" in r.getMessage()]) == 1

    def test_of_no_response_do_not_pile_up(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("stretto.integrations.vllm_rewards.MOST_REWARDS", 10)
        heard = Rewards(file)
        life = Life(heard)
        for _ in range(2):
            rewards(file, [([i, 0], [5], 1.0) for i in range(100)])
            life.history.flush()
        assert len(heard._known) == 10
        assert len([r for r in caplog.records if "no response waits" in r.getMessage()]) == 1

    def test_of_no_response_to_one_prompt_do_not_either(
        self, file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Rewards(file)
        rewards(file, [(PROMPT, [i], 1.0) for i in range(500)])
        heard.read()
        assert 0 < len(heard._known[UID]) < 500
        assert "no response waits here" in caplog.text
        assert "other engines that read the file" in caplog.text


def rollouts(size: int, visit: int = 1) -> list[Rollout]:
    life = Life(first_visit=visit)
    life.say(*[[3, i] for i in range(size)])
    return life.known


class TestFolder:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("a", "is a file; name a folder"),
            ("history.json", "is a file"),
            ("a/b", "cannot be read: Not a dir"),
        ],
    )
    def test_that_is_a_file_is_refused_by_name(self, name: str, said: str, tmp_path: Path) -> None:
        (tmp_path / Path(name).parts[0]).write_text("mine")
        with pytest.raises(StrettoError, match=f"^history: {tmp_path / name} {said}"):
            HistoryFolder(tmp_path / name, OURS)
        assert (tmp_path / Path(name).parts[0]).read_text() == "mine"

    def test_engines_of_one_folder_write_side_by_side(self, tmp_path: Path) -> None:
        folder = tmp_path / "history"
        first, second = HistoryFolder(folder, OURS), HistoryFolder(folder, OURS)
        first.append(rollouts(2))
        second.append(rollouts(3, visit=2))
        first.close()
        third = HistoryFolder(folder, OURS)  # where the first was
        assert sum(map(len, third.read(window=8))) == 2
        second.close()
        assert sum(map(len, third.read(window=8))) == 5
        third.close()
        assert sorted(path.name for path in folder.iterdir()) == ["history.json", "rank-0", "rank-1"]

    def test_without_locks_they_do_not_replace_each_others_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flock(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", flock)
        folders = [HistoryFolder(tmp_path, OURS) for _ in range(3)]
        for number, folder in enumerate(folders):
            folder.append(rollouts(2, visit=number))
            folder.close()
        last = HistoryFolder(tmp_path, OURS)
        assert last._next == 2
        assert sum(map(len, last.read(window=8))) == 6
        last.close()

    def test_one_that_starts_while_another_does_is_welcome(self, tmp_path: Path) -> None:
        (tmp_path / ".tmp-history.json-7-1").write_bytes(b"{")
        HistoryFolder(tmp_path, OURS).close()

    def test_of_other_things_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").touch()
        with pytest.raises(StrettoError, match=r"no history\.json"):
            HistoryFolder(tmp_path, OURS)

    def test_what_waits_is_written_in_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that is killed loses what ended since, not all of it."""
        folder = HistoryFolder(tmp_path, OURS)
        folder.append(rollouts(2))
        folder.step()
        assert folder._waiting
        monkeypatch.setattr("stretto.integrations.vllm_folder.EVERY", -1.0)
        folder.step()
        folder._thread.shutdown()
        (file,) = tmp_path.glob("rank-0/*.parquet")
        assert len(read_rollouts(file)) == 2
        folder.close()

    def test_is_written_at_the_end_of_a_process(self, tmp_path: Path) -> None:
        """When threads take no more work."""
        script = (
            "import atexit, json, sys\n"
            "from pathlib import Path\n"
            "from stretto.integrations.vllm_folder import HistoryFolder\n"
            "from tests.integrations.test_vllm_history import OURS, rollouts\n"
            "folder = HistoryFolder(Path(sys.argv[1]), OURS)\n"
            "atexit.register(folder.close)\n"
            "folder.append(rollouts(300))\n"
            "folder.append(rollouts(2))\n"
        )
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
        files = sorted(tmp_path.glob("rank-0/*.parquet"))
        assert [len(read_rollouts(file)) for file in files] == [300, 2]

    def test_whatever_keeps_a_file_from_being_written_is_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = HistoryFolder(tmp_path, OURS)
        broken = rollouts(2)
        broken[0].loss_mask = broken[0].loss_mask[:0]
        folder.append(broken)
        folder._write()
        folder.append(rollouts(3))
        folder.close()
        assert "the history is not kept: " in caplog.text
        (file,) = tmp_path.glob("rank-0/*.parquet")
        assert len(read_rollouts(file)) == 3

    def test_what_a_slow_disk_is_owed_is_bounded(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = HistoryFolder(tmp_path, OURS)
        go_on = threading.Event()

        def wait() -> None:
            go_on.wait(60)

        folder._unwritten.append(folder._thread.submit(wait))
        for _ in range(UNWRITTEN + 3):
            folder.append(rollouts(1))
            folder._write()
        go_on.set()
        folder.close()
        assert "the history is not kept: the disk takes too long" in caplog.text
        assert len(list(tmp_path.glob("rank-0/*.parquet"))) == UNWRITTEN - 1

    def test_a_full_disk_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = HistoryFolder(tmp_path, OURS)
        folder._mine = tmp_path / "nowhere"
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                folder.append(rollouts(2))
                folder._write()
            folder.close()
        assert len([r for r in caplog.records if "not kept" in r.getMessage()]) == 1


def test_of_a_composite_model_the_language_parts_stop_token_is_known() -> None:
    """Its own configuration has no attribute of that name."""
    whole = Mistral3Config(text_config={"model_type": "mistral", "eos_token_id": 7})
    assert not hasattr(whole, "eos_token_id")

    class ModelConfig:
        """What is asked of vLLM's."""

        hf_config = whole
        hf_text_config = whole.get_text_config()

        def try_get_generation_config(self) -> dict[str, Any]:
            return {"eos_token_id": [8, 9]}

    assert _stop_ids(ModelConfig()) == {7, 8, 9}
