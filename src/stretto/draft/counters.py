"""What a drafter did, counted between two calls for its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stretto.draft import SOURCES, Drafts, Verified
from stretto.records import BoolArray, IntArray
from stretto.sampling import kernel
from stretto.tally import Tally

DEPTHS = 8  # depths that are counted one by one; the last with all below


@dataclass(slots=True)
class Counters:
    """What happened since the counts were last taken."""

    begin_seconds: float = 0.0
    propose_seconds: float = 0.0
    observe_seconds: float = 0.0
    end_seconds: float = 0.0
    longest_wait: float = 0.0  # seconds that one step waited for the index
    proposed: int = 0
    drafted: IntArray = field(default_factory=lambda: np.zeros(len(SOURCES), np.int64))
    accepted: IntArray = field(default_factory=lambda: np.zeros(len(SOURCES), np.int64))
    tested: IntArray = field(default_factory=lambda: np.zeros(DEPTHS + 1, np.int64))  # by depth, from 0
    passed: IntArray = field(default_factory=lambda: np.zeros(DEPTHS + 1, np.int64))

    def add(self, drafts: Drafts, verified: Verified) -> None:
        of_source, of_depth = (self.drafted, self.accepted), (self.tested, self.passed)
        _count(drafts.sources, drafts.depth, verified.reached, verified.accepted, of_source, of_depth)

    def waited(self, seconds: float) -> None:
        """A step has waited so long for the index."""
        self.longest_wait = max(self.longest_wait, seconds)

    def counts(self) -> Tally:
        names = (
            "begin_seconds",
            "propose_seconds",
            "observe_seconds",
            "end_seconds",
            "proposed",
        )
        found = Tally({f"spec/{name}": float(getattr(self, name)) for name in names})
        found.largest["spec/longest_wait"] = self.longest_wait
        for index, source in enumerate(SOURCES):
            found.sums[f"spec/drafted/{source}"] = float(self.drafted[index])
            found.sums[f"spec/accepted/{source}"] = float(self.accepted[index])
        for depth in range(1, DEPTHS + 1):
            found.ratios[f"spec/acceptance/{depth}"] = (float(self.passed[depth]), float(self.tested[depth]))
        return found


@kernel()
def _count(
    sources: npt.NDArray[np.int8],
    depth: IntArray,
    reached: BoolArray,
    accepted: BoolArray,
    of_source: tuple[IntArray, IntArray],
    of_depth: tuple[IntArray, IntArray],
) -> None:
    """Add nodes (N,) to those drafted and accepted by source, and to those tested and passed by depth."""
    for node in range(depth.size):
        place = min(depth[node], DEPTHS)
        of_source[0][sources[node]] += 1
        of_source[1][sources[node]] += accepted[node]
        of_depth[0][place] += reached[node]
        of_depth[1][place] += accepted[node]
