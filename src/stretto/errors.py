"""The one error that users are meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StrettoError(ValueError):
    """Bad input or an impossible request: says what, where, and the nearest valid choice. No traceback needed."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A clause naming the valid choice nearest to `name`, or all of them: `did you mean "x"?`."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else f"choose from: {', '.join(known)}"
