"""Which values are paths, and what relative ones are relative to."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def resolve_paths(tree: dict[str, Any], folder: Path) -> None:
    """Makes the relative paths in a nested configuration absolute, in place.

    `data.path`, `eval.path` and `history.warm_from` are always paths. `model.path` and `model.tokenizer` may be hub
    names: they are paths if they start with "." or "~" or are there. `data.task` and `reward.functions` may name a
    `file.py:name`. Values of other types are left for validation to refuse.
    """
    for section, key, resolve in (
        ("data", "path", _file),
        ("eval", "path", _file),
        ("history", "warm_from", _file),
        ("model", "path", _folder_or_hub_name),
        ("model", "tokenizer", _folder_or_hub_name),
        ("data", "task", _object),
        ("reward", "functions", _object),
    ):
        values = tree.get(section)
        if not isinstance(values, dict):
            continue
        value = values.get(key)
        if isinstance(value, str) and value != "none":
            values[key] = resolve(value, folder)
        elif isinstance(value, list):
            values[key] = [resolve(item, folder) if isinstance(item, str) else item for item in value]


def name_in_file(value: object) -> str | None:
    """The name in `file.py:name`; None for a value of another form."""
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return name if file.endswith(".py") else None


def _file(value: str, folder: Path) -> str:
    return str(folder / Path(value).expanduser()) if value else value


def _folder_or_hub_name(value: str, folder: Path) -> str:
    if value in ("", "demo"):
        return value
    path = folder / Path(value).expanduser()
    return str(path) if value.startswith((".", "~")) or path.exists() else value


def _object(value: str, folder: Path) -> str:
    file, colon, name = value.rpartition(":")
    return f"{_file(file, folder)}:{name}" if colon and file.endswith(".py") else value
