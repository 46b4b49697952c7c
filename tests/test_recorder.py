"""What whole runs write down about themselves, beyond what `tests/test_trainer.py` asks of every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.buffer import Ledger
from stretto.history.lengths import Ended
from stretto.history.log import read_ended, read_rollouts
from stretto.records import SamplingParams, WorkerDown, WorkerUp
from stretto.trainer import Trainer
from tests.test_trainer import metrics, small

LENGTHS = ("lengths/rank_correlation", "lengths/tail_recall")


def predictions(folder: Path) -> list[list[Any]]:
    return [[line.get(name) for name in LENGTHS] for line in metrics(folder)]


def test_lengths_are_predicted_from_what_has_finished_and_after_a_resume_as_if_it_had_not_stopped(
    tmp_path: Path,
) -> None:
    visits: dict[str, Any] = {"data.limit": 4, "steps": 4, "schedule.prompts": 2, "draft.budget": "none"}
    whole = Trainer(small(tmp_path, "whole", **visits)).run().folder
    halves = Trainer(small(tmp_path, "halves", **visits | {"steps": 2})).run().folder
    Trainer.resume(halves, {"steps": 4}).run()
    found = predictions(whole)
    assert found[0] == [None, None]
    assert all(-1 <= correlation <= 1 and 0 <= recall <= 1 for correlation, recall in found[1:])
    assert predictions(halves) == found
    path = whole / "rollouts/step-000003.parquet"
    logged, ended = read_rollouts(path), read_ended(path)
    assert [(e.prompt.uid, e.prompt.token_ids.tolist(), *e[1:]) for e in ended] == [
        (e.prompt.uid, e.prompt.token_ids.tolist(), *e[1:])
        for e in (Ended.of(r, r.token_ids.size) for r in logged)
    ]


def test_slots_count_while_their_workers_are_up() -> None:
    now = [1.0]
    ledger = Ledger(SamplingParams(), now=lambda: now[0])
    for event in (WorkerUp(0, 8, 0), WorkerUp(1, 4, 0), WorkerDown(0), None):
        ledger.apply([event] if event is not None else [])
        now[0] += 2.0
    assert ledger.slot_seconds() == 8 * 2 + 12 * 2 + 4 * 4
    assert ledger.slot_seconds() == 56


@pytest.mark.parametrize("budget", ["none", "fixed"])
def test_what_is_sent_back_is_counted_as_reverified_once(budget: str, tmp_path: Path) -> None:
    """On policy, nothing is resumed and no K/V outlives an update: all that is verified again is what was dropped."""
    sorted_loads = {"schedule.kind": "sorted", "schedule.load_prompts": 2, "schedule.max_staleness": 0}
    config = small(tmp_path, budget, steps=2, **sorted_loads, **{"draft.budget": budget})
    folder = Trainer(config).run().folder
    lines = metrics(folder)
    rollouts = [r for step in (1, 2) for r in read_rollouts(folder / f"consumed/step-00000{step}.parquet")]
    assert len(rollouts) == 12
    assert all(r.refreshes <= 1 for r in rollouts)
    dropped = sum(r.draft_ids.size for r in rollouts)
    assert dropped > 0
    assert [line["rollout/reverified_tokens"] for line in lines] == [0, dropped]
    assert sum(line["rollout/discarded_tokens"] for line in lines) == dropped
    assert sum(line["rollout/refreshes"] for line in lines) == sum(r.refreshes for r in rollouts)
