"""A second reward beside the right number: that it is written where GSM8K writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LAST_LINE = re.compile(r"####\s*-?\$?[\d,]+(\.\d+)?\s*$")


def ends_in_answer(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the last line is `#### number`, whatever the number."""
    return float(LAST_LINE.search(completion) is not None)
