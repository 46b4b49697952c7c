"""metrics.jsonl: strict JSON, and lines that are damaged, torn or missing are said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stretto import metrics_file
from stretto.errors import StrettoError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file with three steps."""
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        metrics_file.append(path, {"step": step, "loss": 1 / step})
    return path


def steps(path: Path) -> list[int]:
    return [row["step"] for row in metrics_file.read(path)]


def test_lines_are_strict_json(path: Path) -> None:
    row = {"step": 4, "nan": float("nan"), "inf": [np.float32("inf")], "n": np.int64(3), "x": np.float32(0.5)}
    metrics_file.append(path, row)
    line = path.read_text().splitlines()[-1]
    plain = {"step": 4, "nan": None, "inf": [None], "n": 3, "x": 0.5}
    assert json.loads(line, parse_constant=pytest.fail) == plain
    with pytest.raises(ValueError, match='integer "step"'):
        metrics_file.append(path, {"loss": 1.0})


@pytest.mark.parametrize("torn", [b"{", b'{"step": 4}', b"\0\0\0"])
def test_a_torn_last_line_is_left_out_and_repaired(
    path: Path, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps(path) == [1, 2, 3]
    assert "the last line is incomplete" in caplog.text
    metrics_file.repair(path)
    assert "removed an incomplete last line" in caplog.text
    assert path.read_bytes() == whole


def test_a_damaged_line_is_named(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(StrettoError, match=r"metrics\.jsonl, line 2"):
        metrics_file.read(path)
    with pytest.raises(StrettoError, match=r"metrics\.jsonl, line 2 is damaged"):
        metrics_file.rewind(path, 3)
    assert metrics_file.rewind(path, 1) == 2  # what is later than the checkpoint is written again anyway
    assert path.read_bytes() == lines[0]


def test_missing_lines_before_a_checkpoint_are_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics_file.check(path, 4)
    assert not caplog.text
    path.unlink()
    metrics_file.check(path, 1)  # its own line may be owed, until its evaluation is made
    assert not caplog.text
    metrics_file.check(path, 4)
    assert "lacks 3 of the 3 steps before checkpoint 4, the first is 1" in caplog.text
