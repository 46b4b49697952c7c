from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stretto.simulate.scenario import parse_scenario
from studies import published

FILES = sorted(published.SCENARIOS.glob("*.toml"))
TREE: dict[str, Any] = {
    "published": {
        "source": "a paper",
        "baseline": "old",
        "rows": {"old": {"slot_idle": 0.5}, "new": {"speedup": 1.4, "slot_idle": 0.1}},
        "against": {"new": {"row": "old", "speedup": 1.2}},
    },
    "run": {"steps": 2},
    "cluster": {"workers": 1, "slots": 8},
    "cost": {"preset": "7b-h100"},
    "workload": {"lognormal": [50.0, 0.5], "max_new_tokens": 500},
    "schedule": [
        {"name": "old", "kind": "synchronous", "prompts": 2, "samples": 2},
        {"name": "new", "kind": "nothing yet"},
    ],
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_scenario_has_its_baseline_and_its_published_rows(path: Path) -> None:
    tree = tomllib.loads(path.read_text("utf-8"))
    names = {table["name"] for table in tree["schedule"]}
    known = tree["published"]
    assert {known["baseline"], *known["rows"], *known.get("against", {})} <= names
    baseline = [table for table in tree["schedule"] if table["name"] == known["baseline"]]
    parse_scenario({k: v for k, v in tree.items() if k != "published"} | {"schedule": baseline}, Path())


def test_sensitivity_changes_one_thing_at_a_time() -> None:
    tree = tomllib.loads((published.SCENARIOS / "sortedrl.toml").read_text("utf-8"))
    found = dict(published.variants(tree))
    assert list(found) == [
        "",
        "a / (b Q) = 0.16",
        "a / (b Q) = 8",
        "Q = 128",
        "load = 4 batches",
        "load = 16 batches",
        "computing K/V anew costs as on one H100",
        "an update takes 512 responses",
        "without the drain: the first 48 of 64 updates",
    ]
    bigger = found["an update takes 512 responses"]["schedule"]
    assert [(t["prompts"], t.get("steps", 16)) for t in bigger] == [(512, 16)] * 3
    assert found["Q = 128"] | {"cluster": tree["cluster"]} == tree
    smaller = found["load = 4 batches"]["schedule"]
    assert {(t["load_prompts"], t["steps"]) for t in smaller if t["kind"] == "sorted"} == {(4, 4)}
    assert found["a / (b Q) = 8"]["cost"]["base"] == 0.0314


def test_the_table_sets_ours_beside_the_published() -> None:
    figures = {
        "useful_tokens_per_s": 100.0, "discarded_tokens_per_s": 1.0, "reverified_tokens_per_s": 2.0,
        "slot_idle": 0.4, "staleness_mean": 0.0, "staleness_max": 0, "responses": 10, "seconds": 5.0,
    }  # fmt: skip
    done = {
        ("", "old"): figures,
        ("", "new"): figures | {"useful_tokens_per_s": 150.0, "slot_idle": 0.2, "seconds": 4.0},
    }
    lines = published.table(TREE, done)
    assert "| old |  | 1.00x | 1.00x | 50.0% | 40.0% | 100 | 1 | 2 | 0.00 / 0 |" in lines
    assert "| new | 1.40x | 1.50x | 1.25x | 10.0% | 20.0% | 150 | 1 | 2 | 0.00 / 0 |" in lines
    assert "new over old: published 1.2x, ours 1.50x." in lines


def test_more_slots_busy_than_there_are_would_be_seen() -> None:
    figures = dict.fromkeys(
        ("useful_tokens_per_s", "discarded_tokens_per_s", "reverified_tokens_per_s", "staleness_mean"), 1.0
    ) | {"staleness_max": 0, "responses": 1, "seconds": 1.0}
    rounded, wrong = (
        published.table(TREE, {("", name): figures | {"slot_idle": idle} for name in ("old", "new")})
        for idle in (-1e-12, -0.02)
    )
    assert "| 0.0% |" in "".join(rounded)
    assert "-0.0%" not in "".join(rounded)
    assert "| -2.0% |" in "".join(wrong)


def test_a_study_goes_on_where_it_stopped_and_lists_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tomli_w

    (tmp_path / "paper.toml").write_text(tomli_w.dumps(TREE))
    monkeypatch.setattr(published, "SCENARIOS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["published.py", "--runs", str(tmp_path / "runs")])
    assert published.main() == 0
    said = capsys.readouterr().out
    assert "| new | 1.40x | missing: " in said
    store = tmp_path / "runs" / "cells.jsonl"
    (cell,) = [json.loads(line) for line in store.read_text().splitlines()]
    assert (cell["scenario"], cell["schedule"]) == ("paper", "old")
    monkeypatch.setattr(published, "run_candidate", lambda *_: pytest.fail("simulated again"))
    assert published.main() == 0
    assert capsys.readouterr().out == said
    assert (tmp_path / "runs" / "published.md").read_text() in said
    with store.open("a") as file:
        file.write('{"scenario": "paper", "found": {}')  # killed while it wrote
    assert published.main() == 0
    assert len(store.read_text().splitlines()) == 1
    monkeypatch.setattr(published, "code", lambda: "other code")
    monkeypatch.setattr(published, "run_candidate", lambda *_: (cell["found"] | {"updates": []}, None))
    assert published.main() == 0
    assert len(store.read_text().splitlines()) == 2
