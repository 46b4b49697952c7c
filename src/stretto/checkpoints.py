"""One checkpoint on disk: a folder whose every file is fingerprinted, so that damage is found before use."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stretto.atomic import write_folder_atomically, write_synced
from stretto.errors import StrettoError

STATE_FILE = "trainer_state.json"
FORMAT = 1


class Damaged(StrettoError):
    """A file of a checkpoint is missing, cut off or changed."""


class Checkpoint(NamedTuple):
    """A checkpoint that has been verified."""

    step: int
    folder: Path
    state: dict[str, Any]  # what `save_checkpoint` was given, as JSON gives it back


def write_checkpoint(
    folder: Path, step: int, write: Callable[[Path], None], state: Mapping[str, Any], log: list[Path]
) -> None:
    """Create `folder` with what `write(folder)` puts there and `trainer_state.json`, all at once.

    The state file names and fingerprints every file of the checkpoint, and the files of `log`, which lie two
    levels above it (`../../rollouts/step-000012.parquet`). Raises StrettoError if the state is not plain JSON,
    or if the disk refuses; then there is no `folder`.
    """
    root = folder.parent.parent

    def fill(temporary: Path) -> None:
        write(temporary)
        body = {
            "format": FORMAT,
            "step": step,
            "state": state,
            "files": {str(p.relative_to(temporary)): fingerprint(p) for p in _files(temporary)},
            "log": {str(p.relative_to(root)): fingerprint(p) for p in log},
        }
        try:
            text = json.dumps(body)
        except (TypeError, ValueError) as error:
            raise StrettoError(f"the trainer's state at step {step} is not plain JSON: {error}") from error
        content = json.dumps(body | {"blake2b": _hash(text.encode())})
        write_synced(temporary / STATE_FILE, content.encode())

    write_folder_atomically(folder, fill)


def read_checkpoint(folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint in `folder`, verified, and the fingerprints of its log files by name.

    The log files themselves are not looked at. Raises Damaged naming the first file that is missing, cut off
    or changed, StrettoError for one that cannot be read or comes from a newer version.
    """
    path = folder / STATE_FILE
    try:
        body = json.loads(path.read_bytes())
        own = body.pop("blake2b")
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{path} is damaged: {error}") from error
    if own != _hash(json.dumps(body).encode()):
        raise Damaged(f"{path} is damaged: its content is not what was written")
    if body["format"] > FORMAT:
        raise StrettoError(
            f"{path} has format {body['format']}; this Stretto reads up to {FORMAT}: "
            "resume with the newer one that wrote it"
        )
    for name, expected in body["files"].items():
        verify(folder / name, expected)
    return Checkpoint(body["step"], folder, body["state"]), body["log"]


def run_of(folder: Path) -> Path | None:
    """The folder of the run that `folder`, or what it links to (`latest`, `best`), is a checkpoint of; else None."""
    found = folder.resolve()
    run = found.parent.parent
    named = found.parent.name == "checkpoints" and re.fullmatch(r"step-\d+", found.name)
    return run if named and (run / "config.toml").is_file() else None


def fingerprint(path: Path) -> dict[str, Any]:
    """Size in bytes and blake2b (16 bytes, hex) of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()}


def verify(path: Path, expected: Mapping[str, Any]) -> None:
    """Raise Damaged unless the file `path` has the `expected` fingerprint."""
    try:
        found = fingerprint(path)
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}") from error
    if found["bytes"] != expected["bytes"]:
        raise Damaged(f"{path} is damaged: it has {found['bytes']:,} of {expected['bytes']:,} bytes")
    if found != expected:
        raise Damaged(f"{path} is damaged: its content is not what was written")


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
