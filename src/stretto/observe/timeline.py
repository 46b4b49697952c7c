"""Where a run's time went, as a trace that Perfetto and chrome://tracing show.

The format is Chrome's JSON array of complete events ("ph": "X", times in microseconds). The array may lack its closing
bracket: both viewers accept that, which makes the file appendable and a torn last line harmless.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.atomic import append_synced, write_atomically

TRACKS = {"learner": 0, "rollout": 1, "rewards": 2, "sync": 3, "evaluation": 4, "files": 5}


class Timeline:
    """Spans of one run, appended to `timeline.json` once a step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []

    def create(self) -> None:
        """Begin the file: the tracks' names."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
            for name, tid in TRACKS.items()
        ]
        write_atomically(self.path, ("[\n" + "".join(json.dumps(n) + ",\n" for n in names)).encode())

    def span(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        """Something that went on from `start` to `end`, seconds of the runtime's clock."""
        if end <= start:
            return
        event = {
            "ph": "X",
            "name": name,
            "pid": 0,
            "tid": TRACKS[track],
            "ts": round(1e6 * start, 1),
            "dur": round(1e6 * (end - start), 1),
            "args": args,
        }
        self._lines.append(json.dumps(event) + ",\n")

    def flush(self) -> None:
        """Append what has been gathered. Raises StrettoError if the disk refuses."""
        append_synced(self.path, "".join(self._lines).encode())
        self._lines.clear()

    def rewind(self, elapsed: float) -> None:
        """Drop spans that began at or after `elapsed`: a resumed run records them again."""
        if not self.path.exists():
            self.create()
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]:
            try:
                event = json.loads(line.rstrip().rstrip(","))
            except json.JSONDecodeError:
                continue  # the torn last line of a killed run
            if event.get("ts", -1.0) < 1e6 * elapsed:
                kept.append(line if line.endswith("\n") else line + "\n")
        write_atomically(self.path, ("[\n" + "".join(kept)).encode())
