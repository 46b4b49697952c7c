"""The body of `stretto simulate`: runs a scenario's schedules one after another and shows how they compare."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.engine.responses import Span
from stretto.errors import StrettoError
from stretto.simulate.build import world_of
from stretto.simulate.figures import figures
from stretto.simulate.scenario import Candidate, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from stretto.simulate.world import SimulatedWorld


def simulate(scenario: Scenario, told: Callable[[str], None], charts: Path | None = None) -> dict[str, Any]:
    """Every candidate's figures, by name; `told` hears whose turn it is.

    `charts` is a folder for `NAME.trace.json` of each and one `gantt.html` of all.

    Raises StrettoError if the charts cannot be written there, before anything is simulated; and for what a candidate
    cannot do.
    """
    if charts is not None:
        _make_folder(charts)
    results: dict[str, Any] = {}
    drawn = []
    for candidate in scenario.candidates:
        told(candidate.name)
        spans: list[Span] | None = [] if charts is not None else None
        found, world = run_candidate(scenario, candidate, spans)
        results[candidate.name] = found
        if spans is not None:
            drawn.append((candidate.name, spans, world.trainings, candidate.cluster.slots))
    if charts is not None:
        _write(charts, drawn)
    return results


def run_candidate(
    scenario: Scenario, candidate: Candidate, spans: list[Span] | None = None
) -> tuple[dict[str, Any], SimulatedWorld]:
    """One candidate's figures, and the world that gave them.

    Raises StrettoError if its workers fail and none comes back.
    """
    world = world_of(scenario, candidate, spans)
    began = time.process_time()
    with _without_collector():
        try:
            world.run(candidate.steps)
        except RuntimeError as error:  # nothing can happen any more
            if any(engine.alive for engine in world.fleet.engines):
                raise
            raise StrettoError(
                f'schedule "{candidate.name}": cluster.failures: no worker is left after {world.runtime.time:g} s, '
                f"with {len(world.updates)} of {candidate.steps} updates made; add cluster.arrivals"
            ) from error
    spent = time.process_time() - began
    found = figures(
        world,
        warmup=scenario.run.warmup,
        gpus_per_worker=candidate.cluster.tp,
        trainer_gpus=candidate.cluster.training_gpus,
        gpus=candidate.cluster.gpus,
    )
    return {
        "kind": candidate.config.kind,
        "simulation_us_per_response": 1e6 * spent / world.ended,
        **found,
    }, world


@contextmanager
def _without_collector() -> Iterator[None]:
    """The collector would look through a growing ledger again and again; nothing here is cyclic."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _make_folder(folder: Path) -> None:
    from stretto.atomic import disk_errors

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def file_names(names: Sequence[str]) -> list[str]:
    """A name for the files of each: odd characters replaced, and numbered where two would be the same.

    Capitals make no difference: on some file systems they are none.
    """
    found: list[str] = []
    for name in names:
        plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in name.lstrip("."))[:50] or "_"
        taken = {other.casefold() for other in found}
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        found.append(next(n for n in itertools.chain([plain], numbered) if n.casefold() not in taken))
    return found


def _write(
    folder: Path, drawn: Sequence[tuple[str, Sequence[Span], Sequence[tuple[float, float]], int]]
) -> None:
    from stretto.atomic import write_atomically
    from stretto.simulate.chart import page, trace

    files = file_names([name for name, *_ in drawn])
    for file, (_, spans, trainings, _) in zip(files, drawn, strict=True):
        write_atomically(folder / f"{file}.trace.json", trace(spans, trainings).encode())
    write_atomically(folder / "gantt.html", page("stretto simulate", drawn).encode())


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:.1%}"  # but for rounding below 0: not "-0.0%"


def as_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """The figures side by side; speed-up over the first schedule in useful tokens per second."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for heading in (
        "step\ns", "useful\ntok/s", "speed-\nup", "lost\ntok/s", "verified\nagain", "slots\nidle", "devices\nidle",
        "staleness\nmean / max",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    first = next(iter(results.values()))["useful_tokens_per_s"]
    for name, found in results.items():
        table.add_row(
            name,
            f"{found['step_seconds']:.1f}",
            f"{found['useful_tokens_per_s']:,.0f}",
            f"{found['useful_tokens_per_s'] / first:.2f}x",
            f"{found['discarded_tokens_per_s']:,.0f}",
            f"{found['reverified_tokens_per_s']:,.0f}",
            _percent(found["slot_idle"]),
            _percent(found["device_idle"]),
            f"{found['staleness_mean']:.2f} / {found['staleness_max']}",
        )
    costs = [found["simulation_us_per_response"] for found in results.values()]
    table.caption = f"simulated at {min(costs):.0f}-{max(costs):.0f} us of CPU time per response"
    table.caption_justify = "left"
    return table
