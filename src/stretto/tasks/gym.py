"""Tasks of the reasoning-gym library, by name (extra `gym`)."""

from __future__ import annotations

from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.tasks import Row

TEST_SEED = 1_000_000_000  # item i of a data set is drawn from seed + i, so the test items start far beyond


class GymTask:
    """A reasoning-gym data set as a task. `config` goes to its own configuration (difficulty).

    Rows have `prompt`, `answer`, `question` and `metadata`. The score is the data set's own, of what the completion
    has in `<answer>` tags or, where it has none, of the whole completion.

    Raises:
        StrettoError: reasoning-gym is not installed, has no data set of that name, or refuses the configuration.
    """

    def __init__(
        self, name: str, *, size: int = 500, test_size: int = 100, seed: int = 0, **config: Any
    ) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise StrettoError(
                f'data.task: gym:{name} needs reasoning-gym: pip install ".[gym]" in a clone of Stretto'
            ) from error
        if name not in DATASETS:
            raise StrettoError(
                f"data.task: reasoning-gym has no data set {name!r}; {nearest(name, DATASETS)}"
            )
        self.name = name
        self.config = config
        self.ranges = {"train": (size, seed), "test": (test_size, seed + TEST_SEED)}
        self.dataset("train")

    def dataset(self, split: str) -> Any:
        import reasoning_gym

        size, seed = self.ranges[split]
        try:
            return reasoning_gym.create_dataset(self.name, size=size, seed=seed, **self.config)
        except (TypeError, ValueError, AssertionError) as error:
            raise StrettoError(f"data.args: gym:{self.name} refuses {self.config}: {error}") from error

    def rows(self, split: str) -> list[Row]:
        """The rows of "train" or "test", drawn from different seeds."""
        if split not in self.ranges:
            raise StrettoError(f"split {split!r} of gym:{self.name}: {nearest(split, self.ranges)}")
        return [{"prompt": item["question"], **item} for item in self.dataset(split)]

    def score(self, completion: str, row: Row) -> float:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(completion)
        if not hasattr(self, "scorer"):
            self.scorer = self.dataset("train")
        return float(
            self.scorer.score_answer(answer=completion.strip() if answer is None else answer, entry=row)
        )
