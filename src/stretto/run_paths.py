"""Which folders are runs, and which one somebody may have meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.errors import StrettoError, nearest

SHOWN = 3


def is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def require_run(path: Path) -> None:
    """Raise StrettoError, with the likeliest runs, if `path` is no run folder."""
    if not is_run(path):
        raise StrettoError(f"{path} is not a run folder: it has no config.toml; {_meant(path)}")


def free_name(path: Path) -> Path:
    """`path` with the first number behind it that nothing has yet."""
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")


def _meant(path: Path) -> str:
    inside = _runs_in(path)
    if inside:
        more = f" and {len(inside) - SHOWN} more" if len(inside) > SHOWN else ""
        return f"it holds {', '.join(str(run) for run in inside[:SHOWN])}{more}: name one of them"
    forgotten = Path("runs") / path
    if not path.is_absolute() and is_run(forgotten):
        return f'did you mean "{forgotten}"?'
    places = [path.parent] if path.is_absolute() or len(path.parts) > 1 else [path.parent, Path("runs")]
    for place in places:
        if beside := _runs_in(place):
            return nearest(path.name, [run.name for run in beside], most=SHOWN) + (
                f" in {place}" if place != path.parent else ""
            )
    return f"there are no runs in {' or '.join(map(str, places))}"


def _runs_in(folder: Path) -> Sequence[Path]:
    """The newest first."""
    runs = [path for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    return sorted(runs, key=lambda run: (run / "config.toml").stat().st_mtime, reverse=True)
