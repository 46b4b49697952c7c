"""`stretto simulate` as a command: charts, names of their files, what ends before its updates are made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stretto.errors import StrettoError
from stretto.simulate import command
from stretto.simulate.scenario import Scenario, parse_scenario


def scenario(*schedules: dict[str, Any], **cluster: Any) -> Scenario:
    tree = {
        "run": {"steps": 2, "warmup": 0},
        "cluster": {"workers": 2, "slots": 2, **cluster},
        "cost": {"preset": "7b-h100"},
        "workload": {"lognormal": [50.0, 1.0], "max_new_tokens": 100, "prompt_tokens": 5, "rows": 8},
        "schedule": [{"prompts": 2, "samples": 2, **schedule} for schedule in schedules],
    }
    return parse_scenario(tree, Path())


def refused(what: Scenario, charts: Path | None = None) -> tuple[str, list[str]]:
    told: list[str] = []
    with pytest.raises(StrettoError) as caught:
        command.simulate(what, told.append, charts)
    return str(caught.value), told


@pytest.mark.parametrize(("where", "why"), [("f", "File exists"), ("f/x", "Not a directory")])
def test_charts_that_cannot_be_written_are_said_before_anything_is_simulated(
    tmp_path: Path, where: str, why: str
) -> None:
    (tmp_path / "f").touch()
    said, told = refused(scenario({}), tmp_path / where)
    assert said.startswith(f"cannot write {tmp_path / where}: {why}")
    assert told == []


def test_every_schedule_has_its_own_trace(tmp_path: Path) -> None:
    names = ["a b", "a_b", "A/B", ".."]
    command.simulate(scenario(*({"name": name} for name in names)), lambda _: None, tmp_path / "new" / "c")
    assert sorted(p.name for p in (tmp_path / "new" / "c").iterdir()) == [
        "A_B-3.trace.json",
        "_.trace.json",
        "a_b-2.trace.json",
        "a_b.trace.json",
        "gantt.html",
    ]


def test_names_of_files_are_short_visible_and_apart() -> None:
    names = ["x" * 300, "x" * 299, ".hidden", "hidden", "a_b-2", "a b", "a/b"]
    found = command.file_names(names)
    assert len({name.casefold() for name in found}) == len(names)
    assert [name for name in found if len(name.encode()) > 60 or name.startswith(".") or "/" in name] == []


@pytest.mark.parametrize("kind", ["synchronous", "elastic"])
def test_a_cluster_without_workers_is_said(kind: str) -> None:
    said, _ = refused(scenario({"kind": kind}, failures=[[0.5, 0], [1.0, 1]]))
    assert re.fullmatch(
        rf'schedule "{kind}": cluster\.failures: no worker is left after [\d.]+ s, with 0 of 2 updates made; add '
        r"cluster\.arrivals",
        said,
    )


def test_the_table_has_no_negative_zero() -> None:
    (found,) = command.simulate(scenario({}), lambda _: None).values()
    console = Console(width=200)
    with console.capture() as shown:
        console.print(command.as_table({"a": {**found, "device_idle": -1e-9, "slot_idle": -0.0}}))
    assert "-0.0%" not in shown.get()
    assert "0.0%" in shown.get()


@pytest.mark.parametrize("kind", ["synchronous", "async", "elastic"])
@pytest.mark.parametrize("trainer", ["separate", "colocated"])
def test_slots_are_never_busier_than_they_are_there(kind: str, trainer: str) -> None:
    """Workers that fail in the trainer's time, in a step, and before they have begun."""
    several = scenario({"kind": kind, "steps": 6}, trainer=trainer, failure_every=6.0, repair_seconds=0.5)
    (found,) = command.simulate(several, lambda _: None).values()
    for figures in (found, *found["updates"]):
        assert 0.0 <= round(figures["slot_idle"], 9) <= 1.0
    # A step in hand ends in the time that the trainer counts as its own.
    assert -0.01 < found["device_idle"] <= 1.0
