"""How the workers, the learner and this process share a machine's GPUs under Ray; none is needed, nor a running Ray."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray")

from stretto.config import load_config
from stretto.errors import StrettoError
from stretto.fleet.ray import part_of_gpu
from stretto.fleet.ray_cluster import check_gpus, gpus_for_ray


@pytest.mark.parametrize(
    ("workers", "gpus", "expected"), [(2, 2, 1.0), (2, 8, 1.0), (2, 1, 0.5), (3, 1, 0.3333), (3, 2, 0.5)]
)
def test_workers_share_what_gpus_there_are(workers: int, gpus: int, expected: float) -> None:
    assert part_of_gpu(workers, gpus) == expected


@pytest.mark.parametrize(
    ("devices", "changes", "expected"),
    [
        ("3,5,6", {}, ["5", "6"]),
        ("3,5", {}, None),  # shared with the learner
        ("3,5,6,7", {"learner.shards": 2}, ["6", "7"]),
        ("3,5", {"fleet.gpus": 0.5}, ["5"]),
        ("3,5,6", {"learner.place": "cluster"}, None),
        ("3,5,6", {"model.device": "cpu"}, None),
    ],
)
def test_a_ray_of_ones_own_leaves_the_learner_its_gpus(
    devices: str, changes: dict[str, Any], expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    config = load_config("demo", {"fleet.kind": "ray", "fleet.workers": 2, "model.device": "auto", **changes})
    assert gpus_for_ray(config) == expected


@pytest.mark.parametrize(
    ("gpus", "changes", "said"),
    [
        (1, {}, "leaves 0 of this machine's 1 GPUs to the workers, of which one needs 1: "),
        (2, {"learner.shards": 2}, r'use learner\.place = "here", .* or fleet\.gpus = 0'),
        (1, {"fleet.gpus": 0.5}, "of which one needs 0.5"),
        (2, {}, ""),
        (1, {"fleet.gpus": 0.0}, ""),
        (1, {"learner.place": "here"}, ""),
        (1, {"model.device": "cpu"}, ""),
        (0, {}, ""),
    ],
)
def test_a_learner_that_leaves_no_gpu_is_refused(gpus: int, changes: dict[str, Any], said: str) -> None:
    settings = {"fleet.kind": "ray", "learner.place": "cluster", "model.device": "auto", **changes}
    with pytest.raises(StrettoError, match=said) if said else nullcontext():
        check_gpus(load_config("demo", settings), gpus)
