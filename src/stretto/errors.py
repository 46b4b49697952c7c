"""The one error that users are meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StrettoError(ValueError):
    """Bad input or an impossible request: says what, where, and the nearest valid choice. No traceback needed."""


def nearest(name: str, choices: Iterable[str], most: int | None = None) -> str:
    """A clause naming the valid choice nearest to `name`, or all of them: `did you mean "x"?`.

    With `most`, only so many of them: the ones most alike.
    """
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f'did you mean "{close[0]}"?'
    if most is not None and len(known) > most:
        few = difflib.get_close_matches(name, known, n=most, cutoff=0.0)
        return f"the nearest of {len(known)}: {', '.join(few)}"
    return f"choose from: {', '.join(known)}"
