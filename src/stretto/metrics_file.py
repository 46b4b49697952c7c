"""metrics.jsonl: one JSON object per line and optimiser step, appended and synced."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stretto.atomic import append_synced, write_atomically
from stretto.errors import StrettoError

logger = logging.getLogger(__name__)


def append(path: Path, metrics: Mapping[str, Any]) -> None:
    """Append `metrics` as one line, synced. It must have an integer `step`.

    NaN and infinities, which JSON does not have, become null; numpy scalars become numbers.
    Raises StrettoError if the disk refuses, ValueError without a step.
    """
    if not isinstance(metrics.get("step"), int):
        raise ValueError('metrics need an integer "step"')
    append_synced(path, (json.dumps(plain(metrics), allow_nan=False) + "\n").encode())


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines, oldest first. Raises StrettoError naming file and line if one is damaged."""
    lines, torn = _lines(path)
    if torn:
        logger.warning("%s: the last line is incomplete and left out", path)
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None:
            raise StrettoError(f'{path}, line {number}: not a JSON object with an integer "step"')
        rows.append(row)
    return rows


def repair(path: Path) -> None:
    """Cut off a last line that a killed writer left incomplete, and say so."""
    lines, torn = _lines(path)
    if torn:
        write_atomically(path, b"".join(lines))
        logger.warning("%s: removed an incomplete last line (%d bytes)", path, len(torn))


def check(path: Path, newest: int) -> None:
    """Say which steps before checkpoint `newest` have no line: a run goes on without, since it computes nothing from
    them.
    """
    rows = [_parse(line) for line in _lines(path)[0]]
    missing = set(range(1, newest)) - {row["step"] for row in rows if row is not None}
    if missing:
        logger.warning(
            "%s lacks %d of the %d steps before checkpoint %d, the first is %d: they are not written again",
            path,
            len(missing),
            newest - 1,
            newest,
            min(missing),
        )


def rewind(path: Path, step: int) -> int:
    """Remove the lines later than `step`, and damaged lines after the last kept one; returns how many.

    Raises StrettoError if a line at or before `step` is damaged.
    """
    lines, _ = _lines(path)
    rows = [_parse(line) for line in lines]
    kept = [i for i, row in enumerate(rows) if row is not None and row["step"] <= step]
    last = kept[-1] if kept else -1
    for number, row in enumerate(rows[: last + 1], start=1):
        if row is None:
            raise StrettoError(f"{path}, line {number} is damaged; correct or remove it, then resume again")
    if len(kept) < len(lines):
        write_atomically(path, b"".join(lines[i] for i in kept))
    return len(lines) - len(kept)


def _lines(path: Path) -> tuple[list[bytes], bytes]:
    """The complete lines with their line ends, and what follows the last of them."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:  # a run before its first step
        return [], b""
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}") from error
    *lines, torn = content.split(b"\n")
    return [line + b"\n" for line in lines], torn


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def plain(value: Any) -> Any:
    """The same as JSON has it: numpy scalars as numbers, None for NaN and infinities, which it has not."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
