"""A second reward beside the right number: that the answer is stated as the system prompt asks for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LAST_SENTENCE = re.compile(r"[Tt]he answer is:? \$?-?\d[\d,.]*[^.]*\.?\s*$")


def states_answer(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the response ends in "The answer is N.", whatever the number."""
    return float(LAST_SENTENCE.search(completion) is not None)
