"""Rows from JSONL and Parquet files, with errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, nearest

RowDict = dict[str, Any]


def read_rows(path: Path, key: str) -> tuple[list[RowDict], Callable[[int], str]]:
    """The rows of a `.jsonl` or `.parquet` file, and a function naming the place of row i ("line 7 of x.jsonl").

    `key` is the configuration key for messages.

    Raises:
        StrettoError: no such file, unknown suffix, unreadable or without rows.
    """
    if path.suffix not in READERS:
        raise StrettoError(f"{key}: {path} ends in {path.suffix!r}; known: {', '.join(READERS)}")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        beside = (
            [p.name for p in path.parent.iterdir() if p.suffix in READERS] if path.parent.is_dir() else []
        )
        hint = nearest(path.name, beside) if beside else f"there is no JSONL or Parquet file in {path.parent}"
        raise StrettoError(f"{key}: {path} {what}; {hint}")
    rows, place = READERS[path.suffix](path, key)
    if not rows:
        raise StrettoError(f"{key}: {path} has no rows")
    return rows, place


def read_jsonl(path: Path, key: str) -> tuple[list[RowDict], Callable[[int], str]]:
    """One JSON object per line; empty lines are allowed and counted as lines."""
    rows: list[RowDict] = []
    lines: list[int] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{key}: {path}, line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise StrettoError(f"{where}: not UTF-8 (byte {error.start + 1} of the line)") from error
            if text:
                rows.append(parse_line(text, where))
                lines.append(number)
    return rows, lambda index: f"line {lines[index]} of {path}"


def parse_line(text: str, where: str) -> RowDict:
    def unique(pairs: list[tuple[str, Any]]) -> RowDict:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [name for name, _ in pairs]
            twice = next(name for name in keys if keys.count(name) > 1)
            raise StrettoError(f"{where}: the key {twice!r} is there twice")
        return found

    try:
        row = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise StrettoError(f"{where}: malformed JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise StrettoError(f"{where}: JSON nested too deeply") from error
    if not isinstance(row, dict):
        raise StrettoError(
            f"{where}: a {type(row).__name__}, where a JSON object with the row's columns belongs"
        )
    return row


def read_parquet(path: Path, key: str) -> tuple[list[RowDict], Callable[[int], str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise StrettoError(f"{key}: {path} is not a readable Parquet file: {error}") from error
    names = table.column_names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise StrettoError(f"{key}: {path}: the column {twice!r} is there twice")
    return table.to_pylist(), lambda index: f"row {index} of {path} (from 0)"


Reader = Callable[[Path, str], tuple[list[RowDict], Callable[[int], str]]]
READERS: Mapping[str, Reader] = {".jsonl": read_jsonl, ".ndjson": read_jsonl, ".parquet": read_parquet}
