"""The comparisons of runs and visits with drafts and without, on the smallest scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.bench import inflight, rollout
from stretto.config import load_config
from stretto.errors import StrettoError

SMALL = [
    "--data.limit=2", "--schedule.prompts=2", "--schedule.samples=2", "--sampling.max_new_tokens=24", "--threads=1",
]  # fmt: skip


def test_both_runs_say_the_same_and_one_drafts(tmp_path: Path) -> None:
    base = load_config("demo", [*SMALL, "--eval.enabled=false", "--checkpoint.every=100"])
    table = rollout.compare(base, 2, tmp_path)
    assert [row["visit"] for row in table] == [1, 2]
    assert all(row["same_responses"] == row["responses"] == 4 for row in table)
    assert table[1]["acceptance_length"] > 1


def test_steps_that_do_not_divide_a_visit_are_refused(tmp_path: Path) -> None:
    base = load_config("demo", [*SMALL, "--data.limit=3"][1:])
    with pytest.raises(StrettoError, match="does not divide the 3 rows"):
        rollout.compare(base, 1, tmp_path)


def test_a_second_visit_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "2", "--samples", "2", "--in-flight", "2", "--responses", "1", "--pairs", "1"]
    assert inflight.main([*sizes, "--busy", "--json", *SMALL]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["same_responses"] == row["responses"] == 2
    assert row["tokens_per_step"] > 1


def test_drafts_that_changed_a_response_are_a_failure() -> None:
    same = {"same_responses": 4, "responses": 4}
    assert rollout.status([same, same]) == 0
    assert rollout.status([same, {**same, "same_responses": 3}]) == 1


def test_the_building_thread_counts_as_drafting() -> None:
    line = {f"spec/{part}_seconds": 1.0 for part in ("begin", "propose", "observe", "end", "index/build")}
    assert rollout.draft_seconds(line) == 5.0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--draft.budget=none"], "drafts nothing, so there is nothing to compare"),
        (["--useless", "--prompts", "1"], "it needs two or more"),
    ],
)
def test_what_cannot_be_compared_in_flight_is_said(asked: list[str], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        inflight.main([*asked, "--busy", *SMALL])
