"""Figures that can be added up, over time or over workers: ratios keep both of their sides until they are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Figures by name: counts and sizes, of which the sum is meant; numerators and denominators; and maxima."""

    sums: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Take in another one's figures."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, (above, below) in other.ratios.items():
            before = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = (before[0] + above, before[1] + below)
        for name, value in other.largest.items():
            self.largest[name] = max(self.largest.get(name, value), value)

    def named(self, prefix: str) -> Tally:
        """The same figures, their names begun with `prefix`."""
        return Tally(
            {prefix + name: value for name, value in self.sums.items()},
            {prefix + name: value for name, value in self.ratios.items()},
            {prefix + name: value for name, value in self.largest.items()},
        )

    def figures(self) -> dict[str, float]:
        """All of them; a ratio over nothing is NaN."""
        ratios = {name: above / below if below else math.nan for name, (above, below) in self.ratios.items()}
        return self.sums | ratios | self.largest


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of several."""
    found = Tally()
    for tally in tallies:
        found.add(tally)
    return found
