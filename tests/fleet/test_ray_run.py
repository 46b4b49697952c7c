"""Whole runs with engines on a real Ray, which is started here once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="make test-ray")

from stretto.config import load_config  # noqa: E402
from stretto.fleet.messages import Build  # noqa: E402
from stretto.fleet.ray import RayFleet, WeightObjects  # noqa: E402
from stretto.fleet.ray_cluster import ray_for  # noqa: E402
from tests.schedule.test_real import (  # noqa: E402
    ALL,
    AT_0,
    Train,
    check_on_policy,
    check_records,
    config_of,
    consumed,
    lending,
    model,
    name,
    train,
)

__all__ = ["model"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_for(load_config("demo", {"fleet.kind": "ray", "fleet.workers": 3, "fleet.threads": 1}), 3):
        yield


@pytest.fixture(scope="module")
def trained(cluster: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    def make(build: Build) -> RayFleet:
        return RayFleet(build, lambda event: None, workers=2, cpus=1.0, restarts=0)

    yield from lending("ray", make, WeightObjects, model, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("kind", "staleness"), ALL)
def test_every_schedule_trains(kind: str, staleness: int | None, trained: Train, model: Path) -> None:
    folder = trained(kind, staleness)
    check_records(kind, folder)
    if (kind, staleness) in AT_0:
        check_on_policy(folder, model)


def test_synchronous_says_what_it_says_in_one_process(trained: Train, model: Path, tmp_path: Path) -> None:
    there = consumed(trained("synchronous", 0))
    here = consumed(train(config_of(model, tmp_path, "synchronous", max_staleness=0)))
    said = [{name(r): r.token_ids.tolist() for r in update} for update in here]
    assert [{name(r): r.token_ids.tolist() for r in update} for update in there] == said
    assert said[0] != said[-1]
