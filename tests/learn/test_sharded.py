"""Two processes over gloo, in float64, against one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stretto.config import Config, load_config
from stretto.errors import StrettoError
from stretto.learn.background import BackgroundLearner
from stretto.learn.learner import Learner
from stretto.learn.rank import Publish
from stretto.learn.sharded import ShardedLearner
from stretto.model import load_model
from stretto.records import UpdateBatch
from stretto.trainer import Trainer
from tests.learn.rollouts import random_batch, rollout
from tests.test_trainer import metrics, small

SETTINGS: dict[str, Any] = {
    "model.dtype": "float64",
    "threads": 2,
    "learner.shards": 2,
    "learner.learning_rate": 1e-3,
    "learner.kl_coef": 0.1,
    "learner.entropy_coef": 0.01,
    "learner.gradient_checkpointing": True,
    "learner.tokens_per_micro_batch": 40,
}


def alone(config: Config) -> Learner:
    """The same learner in this process."""
    return Learner(
        load_model(config.model),
        config.learner,
        sampling=config.sampling,
        total_steps=config.steps,
        post=lambda _: None,
    )


def assert_same_weights(a: Learner | ShardedLearner, b: Learner | ShardedLearner) -> None:
    """Up to the order of summation. (A step changes the weights by 1e-3.)"""
    for (name, one), (_, two) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-11), name


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config("demo", SETTINGS)


@pytest.fixture(scope="module")
def sharded(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedLearner]:
    scratch = tmp_path_factory.mktemp("sharded") / "learner"
    made = ShardedLearner(load_model(config.model), config, scratch=scratch, post=lambda _: None)
    yield made
    made.close()
    assert not scratch.exists()


def test_updates_parts_and_files_are_those_of_one_process(
    config: Config, sharded: ShardedLearner, tmp_path: Path
) -> None:
    one = alone(config)
    whole = random_batch(0, groups=5)
    expected, found = one.update(whole), sharded.update(whole)
    assert found.version == 1
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        # The share of padding is that of the first process's micro-batches.
        if name != "policy/padding_waste":
            assert found.metrics[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name
    assert_same_weights(one, sharded)
    assert sharded.publish().version == 1

    parts = [random_batch(seed, groups=2, version=1) for seed in (1, 2)]
    for made in (one, sharded):
        made.accumulate(UpdateBatch(1, parts[0].rollouts, final=False))
        made.update(parts[1])
    assert_same_weights(one, sharded)

    # One process's files are read by two, and the other way round.
    for name, made in (("one", one), ("two", sharded)):
        (tmp_path / name).mkdir()
        made.save(tmp_path / name)
    fresh = alone(config)
    fresh.load(tmp_path / "two")
    sharded.load(tmp_path / "one")
    for made in (fresh, sharded):
        assert made.version == 2
        made.update(random_batch(3, version=2))
    assert_same_weights(fresh, sharded)


def test_what_is_refused_changes_nothing_and_fewer_micro_batches_than_processes_are_enough(
    config: Config, sharded: ShardedLearner, tmp_path: Path
) -> None:
    one = alone(config)
    (tmp_path / "state").mkdir()
    sharded.save(tmp_path / "state")
    one.load(tmp_path / "state")
    version = one.version
    bad = random_batch(4, version=version)
    bad.rollouts[0].logprobs[0] = np.nan
    with pytest.raises(
        StrettoError, match=r"1 of \d+ tokens have a loss that isn't finite, first at token 0"
    ):
        sharded.update(bad)
    assert_same_weights(one, sharded)
    pair = [
        rollout([1, 2], [3, 4], request=i, reward=float(i), version=version) for i in range(2)
    ]  # one micro-batch
    for made in (one, sharded):
        made.update(UpdateBatch(version, pair))
    assert_same_weights(one, sharded)


def test_groups_that_teach_nothing_are_measured_and_leave_no_old_weights_behind(
    config: Config, tmp_path: Path
) -> None:
    """Without KL and entropy terms they have a forward pass only. The run's name is no URL."""
    plain = {"learner.kl_coef": 0.0, "learner.entropy_coef": 0.0}
    config = load_config("demo", {**SETTINGS, **plain})
    made = ShardedLearner(load_model(config.model), config, scratch=tmp_path / "a#b?c", post=lambda _: None)
    try:
        one = alone(config)
        for version in range(3):
            batch = random_batch(version, groups=4, version=version)
            for each in batch.rollouts:
                if each.group_id < 2:
                    each.reward = 1.0
            for learner in (one, made):
                assert learner.update(batch).metrics["policy/zero_advantage"] > 0
            assert_same_weights(one, made)
        (tmp_path / "state").mkdir()
        made.save(tmp_path / "state")
        fresh = alone(config)
        fresh.load(tmp_path / "state")
        assert_same_weights(one, fresh)

        # A run that is interrupted while a part is being accumulated saves all the same.
        background = BackgroundLearner(made, lambda _: None)
        background.accumulate(UpdateBatch(3, random_batch(9, groups=8, version=3).rollouts, final=False))
        (tmp_path / "again").mkdir()
        made.save(tmp_path / "again")
        names = ["learner.json", "model.safetensors", "optimizer/state.safetensors"]
        assert all((tmp_path / "again" / name).exists() for name in names)
        background.close()
    finally:
        made.close()


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_in_less_than_double_precision(dtype: str, near: float, tmp_path: Path) -> None:
    config = load_config("demo", {**SETTINGS, "model.dtype": dtype})
    one = alone(config)
    made = ShardedLearner(load_model(config.model), config, scratch=tmp_path / "learner", post=lambda _: None)
    try:
        before = [parameter.detach().float().clone() for parameter in one.model.parameters()]
        expected, found = (learner.update(random_batch(0, groups=5)).metrics for learner in (one, made))
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert found[name] == pytest.approx(expected[name], rel=near, abs=near), name
        assert found["policy/grad_norm"] > 0
        step, apart = 0.0, 0.0
        for old, (_, a), (_, b) in zip(
            before, one.model.named_parameters(), made.model.named_parameters(), strict=True
        ):
            step += float((a.detach().float() - old).abs().sum())
            apart += float((a.detach().float() - b.detach().float()).abs().sum())
        # Where a gradient is nearly zero, Adam's first step is a sign that rounding decides.
        assert apart < near * step
    finally:
        made.close()


def test_a_batch_systems_sigterm_is_the_trainers_business(sharded: ShardedLearner, tmp_path: Path) -> None:
    """It goes to every process, and the trainer saves then."""
    for rank in sharded._ranks:
        os.kill(rank.pid, signal.SIGTERM)
    (tmp_path / "state").mkdir()
    sharded.save(tmp_path / "state")
    assert (tmp_path / "state" / "model.safetensors").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_who_cannot_join_says_why(config: Config, tmp_path: Path) -> None:
    elsewhere = config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})
    with pytest.raises(StrettoError, match='model.device is "cuda", but torch finds no CUDA device'):
        ShardedLearner(load_model(config.model), elsewhere, scratch=tmp_path / "it", post=lambda _: None)


def test_weights_come_in_a_file_of_a_new_name_each_time(
    sharded: ShardedLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one name a shared file system may show those of the version before."""
    read: list[Path] = []

    def load(path: Path) -> dict[str, torch.Tensor]:
        read.append(path)
        return load_file(path)

    monkeypatch.setattr("stretto.learn.sharded.load_file", load)
    for _ in range(2):
        sharded.update(random_batch(5, version=sharded.version))
    assert len(set(read)) == 2
    assert not any(path.exists() for path in read)


def test_weights_that_cannot_be_written_are_said_with_the_file(
    sharded: ShardedLearner, tmp_path: Path
) -> None:
    with pytest.raises(StrettoError, match=r"weights of version \d+: cannot write .*no-folder"):
        sharded._all(Publish(tmp_path / "no-folder" / "weights.safetensors"))


def test_a_killed_process_ends_it_with_the_way_on(config: Config, tmp_path: Path) -> None:
    made = ShardedLearner(load_model(config.model), config, scratch=tmp_path / "it", post=lambda _: None)
    try:
        os.kill(made._ranks[1].pid, signal.SIGKILL)
        with pytest.raises(StrettoError, match="process 1 was killed by signal 9.*`stretto resume`"):
            made.update(random_batch(0))
    finally:
        made.close()


def test_a_run_learns_alike_and_goes_on_in_one_process(tmp_path: Path) -> None:
    exact = {"model.dtype": "float64", "steps": 2}
    plain = Trainer(small(tmp_path, "plain", **exact)).run().folder
    folder = Trainer(small(tmp_path, "sharded", **{**exact, "learner.shards": 2, "steps": 1})).run().folder
    Trainer.resume(folder, {"steps": 2, "learner.shards": 1}).run()
    for one, two in zip(metrics(plain), metrics(folder), strict=True):
        for name in ("reward/mean", "policy/loss", "policy/grad_norm", "rollout/tokens"):
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=1e-9), name


def test_adapters_are_refused() -> None:
    with pytest.raises(StrettoError, match="learner.shards = 2 with model.lora"):
        load_config("demo", {"learner.shards": 2, "model.lora.rank": 2})
