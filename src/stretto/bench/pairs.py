"""Timing two things against each other on a machine whose speed drifts: alternated pairs, ratios, intervals."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stretto.errors import StrettoError


@dataclass(frozen=True, slots=True)
class Ratio:
    """How often faster A is than B: the median over pairs, with a 95 % interval of the median."""

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, ratios: list[float]) -> Ratio:
        """The interval is the bootstrap's, 10,000 resamples with a fixed seed."""
        values = np.array(ratios)
        random = np.random.default_rng(0)
        medians = np.median(values[random.integers(0, len(values), (10_000, len(values)))], axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        return cls(float(np.median(values)), float(low), float(high), len(values))

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def alternate(a: Callable[[], float], b: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of each, measured in pairs whose order changes from one to the next; both once before, unmeasured."""
    a(), b()
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[which].append((a, b)[which]())
    return seconds


def count(text: str) -> int:
    """Of an option: a whole number of things to measure."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def require_idle(limit: float = 0.2, seconds: float = 2.0) -> float:
    """The share of the machine that others use now; StrettoError if it is above `limit`.

    One busy process beside a two-thread run slows it several times, so that a figure measured then means nothing.
    """
    before = _busy()
    time.sleep(seconds)
    after = _busy()
    if before is None or after is None:
        return float("nan")  # not told by this system
    share = (after - before) / (seconds * (os.cpu_count() or 1))
    if share > limit:
        raise StrettoError(
            f"other processes use {share:.0%} of this machine: wait until it is idle, or measure anyway with --busy"
        )
    return share


def _busy() -> float | None:
    """Processor seconds used by everybody since the machine started; None where /proc/stat does not exist."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(field) for field in file.readline().split()[1:]]
    except OSError:
        return None
    return (sum(fields[:3]) + sum(fields[5:7])) / os.sysconf("SC_CLK_TCK")
