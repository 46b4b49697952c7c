"""The order of the tests: long files first, so that none is left for one process at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
