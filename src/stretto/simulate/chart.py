"""A simulated run as a picture: who was in which slot, when the trainer worked.

Two forms: a Perfetto/Chrome trace, and one self-contained HTML page that draws it on a canvas (drag to move, wheel to
zoom, pointer to read).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

from stretto.engine.responses import Span

TRAINER = 1_000_000  # pid of the trainer's row in the trace


def trace(spans: Sequence[Span], trainings: Sequence[tuple[float, float]]) -> str:
    """Chrome's JSON array of complete events, one process per worker and one thread per slot; microseconds."""
    return "[\n" + ",\n".join(json.dumps(event) for event in _events(spans, trainings)) + "\n]\n"


def _events(spans: Sequence[Span], trainings: Sequence[tuple[float, float]]) -> Iterator[dict[str, Any]]:
    for worker in sorted({span.worker for span in spans}):
        yield {"ph": "M", "name": "process_name", "pid": worker, "args": {"name": f"worker {worker}"}}
    yield {"ph": "M", "name": "process_name", "pid": TRAINER, "args": {"name": "trainer"}}
    for step, (since, until) in enumerate(trainings):
        yield _event(f"update {step}", TRAINER, 0, since, until, {})
    for span in spans:
        said = {"tokens": span.tokens, "end": span.why}
        yield _event(f"request {span.id}", span.worker, span.slot, span.start, span.end, said)


def _event(name: str, pid: int, tid: int, since: float, until: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": round(1e6 * since, 1),
        "dur": round(1e6 * (until - since), 1),
        "args": args,
    }


def page(title: str, charts: Sequence[tuple[str, Sequence[Span], Sequence[tuple[float, float]], int]]) -> str:
    """An HTML page with a Gantt chart for each (name, spans, trainings, slots per worker), on one time scale."""
    data = [
        {
            "name": name,
            "slots": slots,
            "workers": 1 + max((span.worker for span in spans), default=0),
            "spans": [
                [s.worker, s.slot, round(s.start, 2), round(s.end, 2), s.id, s.tokens, s.why] for s in spans
            ],
            "trainings": [[round(since, 2), round(until, 2)] for since, until in trainings],
        }
        for name, spans, trainings, slots in charts
    ]
    template = (resources.files("stretto.simulate") / "chart.html").read_text("utf-8")
    # "</" would end the script early.
    content = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return template.replace("{{title}}", escape(title)).replace("{{data}}", content)
