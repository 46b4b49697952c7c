from __future__ import annotations

import json
from pathlib import Path

from stretto.observe.timeline import TRACKS, Timeline


def events(path: Path) -> list[dict[str, object]]:
    """As a viewer reads it: the closing bracket is optional."""
    loaded: list[dict[str, object]] = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    return loaded


def test_spans_are_complete_events_in_microseconds(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.create()
    timeline.span("rollout", "rollout", 1.0, 1.5, step=3)
    timeline.span("sync", "nothing", 2.0, 2.0)
    timeline.flush()
    *names, span = events(timeline.path)
    assert [n["args"] for n in names] == [{"name": name} for name in TRACKS]
    assert (span["ph"], span["ts"], span["dur"], span["args"]) == ("X", 1e6, 5e5, {"step": 3})


def test_a_resumed_run_drops_what_it_records_again_and_a_torn_line(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.create()
    for second in range(4):
        timeline.span("learner", f"update {second}", second, second + 0.5)
    timeline.flush()
    with timeline.path.open("a") as file:
        file.write('{"ph": "X", "name": "to')
    again = Timeline(timeline.path)
    again.rewind(elapsed=2.0)
    again.span("learner", "update 2", 2.1, 2.6)
    again.flush()
    assert [e["name"] for e in events(timeline.path)[len(TRACKS) :]] == ["update 0", "update 1", "update 2"]
