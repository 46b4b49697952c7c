"""Who may write a TRL run's history, and what it does to others'. Without TRL itself."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.integrations.trl_history import HistoryFolder
from stretto.lock import Lock
from tests.draft.engine import rollout

VOCABULARY = {"a": 0, "b": 1}


def opened(path: Path, vocabulary: dict[str, int] = VOCABULARY, writes: bool = True) -> HistoryFolder:
    folder = HistoryFolder(path, vocabulary, window=2, max_bytes=1 << 20, writes=writes)
    assert all(folder.load(1000))
    return folder


def said(folder: HistoryFolder, round: int, token: int) -> None:
    folder.write([rollout([token], visit=round)], round)


def known(path: Path) -> list[list[int]]:
    folder = opened(path, writes=False)
    return [r.token_ids.tolist() for rollouts in folder.load(1000) for r in rollouts]


def test_who_begins_again_takes_over_from_one_that_nobody_has_any_more(tmp_path: Path) -> None:
    first = opened(tmp_path)
    said(first, 0, 1)
    del first
    gc.collect()
    second = opened(tmp_path)
    said(second, second.next_round, 2)
    assert known(tmp_path) == [[1], [2]]
    second.release()
    Lock(tmp_path / "lock").release()


def test_what_is_refused_locks_nobody_out(tmp_path: Path) -> None:
    opened(tmp_path).release()
    with pytest.raises(StrettoError, match="has the history of another tokenizer"):
        opened(tmp_path, {"a": 1, "b": 0})
    Lock(tmp_path / "lock").release()


def test_who_has_let_others_write_goes_on_if_none_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What another one wrote is neither replaced nor removed."""
    first = opened(tmp_path)
    said(first, 0, 1)
    first.release()
    said(first, 1, 2)
    first.release()
    assert known(tmp_path) == [[1], [2]]
    assert not caplog.records

    second = opened(tmp_path)
    said(second, 2, 3)
    second.release()
    said(first, 2, 4)
    said(first, 3, 4)
    assert known(tmp_path) == [[2], [3]]
    assert [r.getMessage() for r in caplog.records if "another script has written to" in r.getMessage()]
    Lock(tmp_path / "lock").release()


def test_what_killed_scripts_left_is_removed_by_who_writes(tmp_path: Path) -> None:
    left = tmp_path / ".tmp-round-000003.parquet-7-1"
    left.touch()
    opened(tmp_path, writes=False)
    assert left.exists()
    opened(tmp_path).release()
    assert not left.exists()
