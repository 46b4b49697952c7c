"""Verifiers that come with Stretto: is the completion's answer the row's?"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from stretto.errors import StrettoError
from stretto.tasks import Row

UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+"
NUMBER = re.compile(rf"(?<![\w.])[-+]?\$?(?:{UNSIGNED})(?:\s*/\s*(?:{UNSIGNED}))?")
TOO_BIG = re.compile(r"^.{400}|[eE][-+]?\d{4}")  # no answers, and exact conversion would take forever


def final_part(text: str) -> str:
    """What follows the last `####` (GSM8K's mark of the final answer), or all of `text`."""
    return text.rpartition("####")[2]


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly: signs, thousands commas, decimals, exponents, `a/b`; units are ignored.

    A sign counts only where nothing is subtracted: "10-5" ends in 5. A division by zero is no number.
    """
    found = [match.group() for match in NUMBER.finditer(final_part(text).replace("\u2212", "-"))]
    if not found or TOO_BIG.search(found[-1]):
        return None
    above, _, below = found[-1].replace(",", "").replace("$", "").partition("/")
    denominator = Fraction(below.strip()) if below else Fraction(1)
    return Fraction(above.strip()) / denominator if denominator else None


def exact(completion: str, row: Row, *, answer_column: str = "answer") -> float:
    """1.0 if the completion is the answer, apart from white space around both."""
    return float(completion.strip() == str(row[answer_column]).strip())


def numeric(completion: str, row: Row, *, answer_column: str = "answer") -> float:
    """1.0 if the completion's last number equals the answer's (after `####`, where it is written).

    Raises:
        ValueError: the row's answer has no number in it.
    """
    answer = last_number(str(row[answer_column]))
    if answer is None:
        raise ValueError(f"the column {answer_column!r} holds no number: {str(row[answer_column])[:80]!r}")
    return float(last_number(completion) == answer)


def math(completion: str, row: Row, *, answer_column: str = "answer") -> float:
    """1.0 if math-verify finds the completion's last expression equal to the answer (LaTeX or plain).

    Raises:
        StrettoError: the extra `math` is not installed.
        ValueError: math-verify reads no expression in the row's answer.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise StrettoError(
            'the reward "math" needs math-verify: pip install ".[math]" in a clone of Stretto'
        ) from error
    # Its own time limit uses SIGALRM; ours kills the process, so it is switched off, and so is its warning of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    text = final_part(str(row[answer_column]))
    answer = parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
    if not answer:
        raise ValueError(f"the column {answer_column!r} holds no expression: {text[:80]!r}")
    return float(verify(answer, parse(completion, parsing_timeout=None), timeout_seconds=None))
