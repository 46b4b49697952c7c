"""Whole runs with engines on a real Ray, which is started here once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ray = pytest.importorskip("ray", reason="make test-ray")

from stretto.config import load_config  # noqa: E402
from stretto.errors import StrettoError  # noqa: E402
from stretto.fleet.messages import Build  # noqa: E402
from stretto.fleet.ray import RayFleet, WeightObjects  # noqa: E402
from stretto.fleet.ray_cluster import ray_for  # noqa: E402
from stretto.learn.sharded import ShardedLearner  # noqa: E402
from stretto.records import UpdateBatch, Updated  # noqa: E402
from stretto.trainer import Trainer  # noqa: E402
from tests.rewards import vowels  # noqa: E402
from tests.schedule.test_real import (  # noqa: E402
    ALL,
    AT_0,
    ROWS,
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
    with ray_for(load_config("demo", {"fleet.kind": "ray", "fleet.workers": 6, "fleet.threads": 1}), 6):
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


def test_a_learner_on_the_cluster_in_two_processes_makes_the_same_updates(
    trained: Train, model: Path, tmp_path: Path
) -> None:
    here = trained("synchronous", 0)
    changes = {"fleet.kind": "ray", "fleet.threads": 1, "learner.place": "cluster", "learner.shards": 2}
    there = train(config_of(model, tmp_path, "synchronous", max_staleness=0, **changes))
    said = [{name(r): r.token_ids.tolist() for r in update} for update in consumed(here)]
    assert [{name(r): r.token_ids.tolist() for r in update} for update in consumed(there)] == said
    ours, theirs = (load_file(folder / "latest" / "model.safetensors") for folder in (here, there))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=0.0, atol=1e-10) for key in ours)


def test_a_learner_that_dies_on_the_cluster_ends_the_run_which_can_be_resumed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = ShardedLearner.update

    def killed(learner: ShardedLearner, batch: UpdateBatch) -> Updated:
        if learner.version == 2:
            pid = learner._ranks[0].pid
            os.kill(pid, signal.SIGKILL)
        return update(learner, batch)

    changes = {"fleet.kind": "ray", "fleet.threads": 1, "learner.place": "cluster"}
    config = config_of(model, tmp_path, "synchronous", max_staleness=0, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(ShardedLearner, "update", killed)
        with pytest.raises(
            StrettoError, match=r"the learner's process 0 was lost; Ray says: .*stretto resume"
        ):
            train(config)
    folder = tmp_path / "synchronous"
    assert len(consumed(folder)) == 2
    assert Trainer.resume(folder, data=ROWS, reward=vowels).run().steps == config.steps
