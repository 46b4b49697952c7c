from __future__ import annotations

import json

import pytest

from stretto.bench import linear

SMALL = ["--hidden", "16", "--intermediate", "24", "--kv", "8", "--layers", "1", "--vocabulary", "32"]


def test_it_times_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        linear.main([*SMALL, "--tokens", "1", "3", "--threads", "1", "--pairs", "2", "--busy", "--json"]) == 0
    )
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["tokens"] for cell in cells] == [1, 3]
    assert all(cell["torch_ms"] > 0 and cell["ours_ms"] > 0 for cell in cells)
