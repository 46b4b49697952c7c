"""What sampling could have drawn instead: the most probable tokens of every place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
LogprobArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class Alternatives:
    """The K most probable tokens at each of T places, falling.

    Where fewer are known, ids are -1 and log-probs -inf. K may be 0.
    """

    token_ids: TokenArray  # (T, K)
    logprobs: LogprobArray  # (T, K), under the processed distribution

    @classmethod
    def none(cls, places: int, width: int = 0) -> Alternatives:
        """Nothing known at so many places."""
        return cls(np.full((places, width), -1, np.int32), np.full((places, width), -np.inf, np.float32))

    def __getitem__(self, places: slice | npt.NDArray[np.int64]) -> Alternatives:
        return Alternatives(self.token_ids[places], self.logprobs[places])

    @property
    def width(self) -> int:
        """K."""
        return int(self.token_ids.shape[1])
