"""The figures of several workers as those of one."""

from __future__ import annotations

from collections import defaultdict

from stretto.fleet.messages import Figures
from stretto.tally import Tally


class Totals:
    """Sums up what the workers in each place have reported since it was last taken."""

    def __init__(self) -> None:
        self._engine: dict[int, dict[str, float]] = {}
        self._drafter = Tally()

    def add(self, place: int, figures: Figures) -> None:
        engine = self._engine.setdefault(place, defaultdict(float))
        for name, value in figures.engine.items():
            engine[name] += value
        self._drafter.add(figures.drafter)

    def take_engine(self) -> dict[str, float]:
        """Sums over places; but of `step_seconds` the largest, since places compute side by side. Their sum is there
        as `worker_seconds`.
        """
        total: dict[str, float] = defaultdict(float)  # 0.0 for everything where nobody has reported
        longest = max((engine["step_seconds"] for engine in self._engine.values()), default=0.0)
        for engine in self._engine.values():
            for name, value in engine.items():
                total[name] += value
        total["worker_seconds"], total["step_seconds"] = total["step_seconds"], longest
        self._engine.clear()
        return total

    def take_drafter(self) -> Tally:
        """All drafters' counts together."""
        found, self._drafter = self._drafter, Tally()
        return found
