"""Which GPUs a worker gets."""

from __future__ import annotations

import pytest

from stretto.config import load_config
from stretto.engines import gpu_share, worker_environment
from stretto.errors import StrettoError


@pytest.mark.parametrize(
    ("devices", "workers", "size", "expected"),
    [
        (["0", "1", "2", "3"], 2, 1, [["1"], ["2"]]),  # the first is the learner's
        (["4", "5", "6", "7"], 2, 2, [["4", "5"], ["6", "7"]]),
        (["0", "1", "2", "3", "4"], 2, 2, [["1", "2"], ["3", "4"]]),
        (["0"], 2, 1, [["0"], ["0"]]),  # shared
        (["0", "1", "2"], 2, 2, [["0", "1"], ["0", "1"]]),
    ],
)
def test_gpus_by_place(devices: list[str], workers: int, size: int, expected: list[list[str]]) -> None:
    assert [gpu_share(devices, place, workers, size) for place in range(workers)] == expected


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(StrettoError, match="tensor_parallel_size = 4: there are 2 GPUs"):
        gpu_share(["0", "1"], 0, 1, 4)


def test_without_gpus_nothing_is_said() -> None:
    config = load_config("demo", {"engine.kind": "vllm", "model.device": "cpu"})
    assert worker_environment(config, 0) == {}
