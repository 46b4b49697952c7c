"""Which GPUs a worker gets."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.config import load_config
from stretto.engines import gpu_share, shares_gpus, worker_environment
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


def test_a_learner_of_several_processes_has_the_first_ones() -> None:
    assert [gpu_share(["0", "1", "2", "3"], place, 2, 1, 2) for place in range(2)] == [["2"], ["3"]]


@pytest.mark.parametrize(
    ("changes", "gpus", "shared"),
    [
        ({}, 4, True),
        ({"fleet.kind": "processes", "fleet.workers": 2}, 3, False),
        ({"fleet.kind": "processes", "fleet.workers": 2}, 2, True),
        ({"fleet.kind": "processes", "engine.vllm.tensor_parallel_size": 2}, 2, True),
        ({"fleet.kind": "processes", "learner.shards": 2}, 2, True),
        ({"fleet.kind": "ray", "fleet.address": "auto", "fleet.workers": 8}, 1, False),
        ({"fleet.kind": "ray", "fleet.address": "auto", "fleet.gpus": 0.5}, 8, True),
        # A Ray of the run's own has the GPUs that the learner leaves, or all where these are too few.
        ({"fleet.kind": "ray", "fleet.gpus": 1.0, "fleet.workers": 1}, 1, True),
        ({"fleet.kind": "ray", "fleet.gpus": 1.0, "fleet.workers": 1}, 2, False),
        ({"fleet.kind": "ray", "fleet.gpus": 0.7, "fleet.workers": 3}, 3, True),
        ({"fleet.kind": "ray", "fleet.gpus": 0.0, "fleet.workers": 3}, 1, False),
        ({"fleet.kind": "ray", "fleet.workers": 2}, 2, True),
        ({"fleet.kind": "ray", "fleet.gpus": 1.0, "fleet.workers": 1, "learner.place": "cluster"}, 2, False),
        ({"fleet.kind": "ray", "fleet.workers": 2, "learner.place": "cluster"}, 3, False),
    ],
)
def test_engines_that_share_a_gpu(changes: dict[str, Any], gpus: int, shared: bool) -> None:
    assert bool(shares_gpus(load_config("demo", {"engine.kind": "vllm", **changes}), gpus)) == shared


@pytest.mark.parametrize(
    ("place", "gpus", "who"),
    [("here", 2, "workers and the learner"), ("cluster", 2, "workers"), ("cluster", 4, "")],
)
def test_who_shares_in_a_ray_of_the_runs_own(place: str, gpus: int, who: str) -> None:
    """The learner's processes reserve GPUs of their own where they are placed in the cluster."""
    changes = {"fleet.kind": "ray", "fleet.workers": 2, "learner.place": place}
    assert shares_gpus(load_config("demo", {"engine.kind": "vllm", **changes}), gpus) == who


def test_without_gpus_nothing_is_said() -> None:
    config = load_config("demo", {"engine.kind": "vllm", "model.device": "cpu"})
    assert worker_environment(config, 0) == {}
