"""The file that rewards are reported in: what is read of it, whatever becomes of it meanwhile. Without vLLM itself."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.draft import MAX_NODES
from stretto.integrations.vllm import reward, rewards
from stretto.integrations.vllm_rewards import Rewards
from stretto.records import prompt_uid

PROMPT = [1, 2]
UID = prompt_uid(np.array(PROMPT))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rewards.jsonl"


def heard(of: Rewards, token: int) -> float | None:
    """The reward of the response `[token]` to PROMPT, as it is given out: once."""
    found = of.take(UID, np.array([token], np.int32))
    return None if math.isnan(found) else found


def said(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in record.getMessage() for record in caplog.records)


def by_rename(file: Path, then: bytes) -> None:
    other = file.with_name("other")
    other.write_bytes(then)
    os.replace(other, file)


def by_removal(file: Path, then: bytes) -> None:
    file.unlink()
    file.write_bytes(then)  # which may get the number that the old one had


def in_place(file: Path, then: bytes) -> None:
    file.write_bytes(then)


@pytest.mark.parametrize("lines", [1, 3, 5])
@pytest.mark.parametrize("replace", [by_rename, by_removal, in_place])
def test_a_file_that_is_another_one_is_read_from_its_beginning(
    replace: Callable[[Path, bytes], None],
    lines: int,
    file: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Shorter than what was read of the old one, as long, or longer."""
    it = Rewards(file)
    rewards(file, [(PROMPT, [i], float(i)) for i in range(3)])
    it.read()
    for times in range(2):
        first = 10 + 10 * times
        rewards(tmp_path / str(times), [(PROMPT, [first + i], first + float(i)) for i in range(lines)])
        replace(file, (tmp_path / str(times)).read_bytes())
        assert it.read() == [UID]
        assert [heard(it, first + i) for i in range(lines)] == [first + float(i) for i in range(lines)]
    reward(file, PROMPT, [30], 30.0)
    it.read()
    assert heard(it, 30) == 30.0
    assert said(caplog, "rewards are read from its beginning") == 1
    assert said(caplog, "no reward") == 0


def test_what_was_there_before_is_not_read(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward(file, PROMPT, [1], 1.0)
    it = Rewards(file)
    reward(file, PROMPT, [2], 2.0)
    it.read()
    assert (heard(it, 1), heard(it, 2)) == (None, 2.0)
    assert not caplog.records


@pytest.mark.parametrize("replace", [by_rename, by_removal])
def test_the_last_lines_of_a_file_that_was_replaced_are_read_too(
    replace: Callable[[Path, bytes], None], file: Path
) -> None:
    it = Rewards(file)
    reward(file, PROMPT, [1], 1.0)
    it.read()
    reward(file, PROMPT, [2], 2.0)
    replace(file, b"")
    it.read()
    assert heard(it, 2) == 2.0


def test_while_the_file_is_away_nothing_is_lost(file: Path) -> None:
    it = Rewards(file)
    reward(file, PROMPT, [1], 1.0)
    it.read()
    reward(file, PROMPT, [2], 2.0)
    file.rename(file.with_name("rotated"))
    assert it.read() == []
    reward(file, PROMPT, [3], 3.0)
    it.read()
    assert [heard(it, token) for token in (1, 2, 3)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("cut", [1, 40])
def test_half_a_line_waits_for_its_rest(cut: int, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = Rewards(file)
    reward(file.with_name("whole"), PROMPT, [1], 1.0)
    line = file.with_name("whole").read_bytes()
    file.write_bytes(line[:cut])
    assert it.read() == []
    with file.open("ab") as out:
        out.write(line[cut:])
    assert it.read() == [UID]
    assert heard(it, 1) == 1.0
    assert not caplog.records


def test_half_a_line_of_a_file_that_was_replaced_is_not_put_before_the_next_ones(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    it = Rewards(file)
    reward(file, PROMPT, [1], 1.0)
    line = file.read_bytes()
    file.write_bytes(line[:40])
    it.read()
    by_rename(file, line)
    it.read()
    assert heard(it, 1) == 1.0
    assert said(caplog, "no reward") == 0


def test_an_empty_line_is_none_and_not_said(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two writers at once may both have ended a line that a third was killed in."""
    it = Rewards(file)
    reward(file, PROMPT, [1], 1.0)
    with file.open("ab") as out:
        out.write(b"\n\n")
    reward(file, PROMPT, [2], 2.0)
    it.read()
    assert [heard(it, token) for token in (1, 2)] == [1.0, 2.0]
    assert not caplog.records


def test_those_of_other_engines_are_passed_over_with_one_look_at_the_tokens(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several engines read one file: most that is known of a prompt is then of no response here."""
    it, looked = Rewards(file), 0
    others = [[i] * (MAX_NODES - 3 + i % 7) for i in range(100)]
    rewards(file, [(PROMPT, said, float(i)) for i, said in enumerate(others)])
    it.read()

    def counting(*given: Any, **how: Any) -> Any:
        nonlocal looked
        looked += 1
        return blake2b(*given, **how)

    monkeypatch.setattr("stretto.integrations.vllm_rewards.blake2b", counting)
    assert math.isnan(it.take(UID, np.full(MAX_NODES, 1000, np.int32)))
    assert looked == 1
    for i in (99, 5, 42):
        behind = np.array([*others[i], 7], np.int32)  # said behind the limit
        assert it.take(UID, behind) == float(i)
        assert math.isnan(it.take(UID, behind))


def test_a_file_that_cannot_be_read_is_said_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = Rewards(file)
    file.mkdir()
    assert it.read() == it.read() == []
    assert said(caplog, "rewards cannot be read: Is a directory") == 1
    file.rmdir()
    reward(file, PROMPT, [1], 1.0)
    it.read()
    assert heard(it, 1) == 1.0


def test_reported_rewards_are_lines(tmp_path: Path) -> None:
    """Many at once are what one by one would be."""
    one, many = tmp_path / "one", tmp_path / "many"
    graded = [(PROMPT, [3, 4], 1.0), (PROMPT, [5], -1.0)]
    for prompt, response, value in graded:
        reward(one, prompt, response, value)
    rewards(many, graded)
    assert one.read_bytes() == many.read_bytes()
    assert [json.loads(line)["reward"] for line in one.read_text().splitlines()] == [1.0, -1.0]
