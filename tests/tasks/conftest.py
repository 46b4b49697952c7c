from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stretto.tasks.rewards import RewardSpec
from tests.tasks.reward_pool import Pool


@pytest.fixture
def pool() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(*given: Any, **options: Any) -> Pool:
        made.append(Pool(RewardSpec(functions=given, columns=("prompt", "answer")), **options))
        return made[-1]

    yield make
    for each in made:
        each.workers.close()
        assert each.inbox.empty()  # exactly one event for each job
