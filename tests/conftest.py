"""Long test files first, so that none is left for one process at the end; and how Hypothesis runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# By time on empty caches. The first compiles the drafter's kernels, which the fourth and many later ones load.
FIRST = (
    "bench/test_draft.py",
    "engine/test_kernels.py",
    "faults/test_disk.py",
    "test_convergence.py",
    "faults/test_kill_run.py",
    "schedule/test_real.py",
    "simulation/test_simulation.py",
)


# A slow example says something about the machine and what else runs on it, not about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
