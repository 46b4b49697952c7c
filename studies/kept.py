"""What studies share that keep their results line by line: which code made them, and what a killed one left behind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent / "src" / "stretto"


def code(*folders: Path) -> str:
    """A hash of the package, and of the Python files in `folders`."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for folder in (SOURCE, *folders) for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSON lines file, none if it is not there. A torn last line is cut off, so that the next one
    does not get stuck to it.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]
