"""An update that comes in parts makes the step that it would make at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.errors import StrettoError
from stretto.records import UpdateBatch
from tests.learn.rollouts import exact_model, gradients, learner, random_batch, rollout

TOLERANCE = 1e-12
NAMES = ("policy/loss", "policy/grad_norm", "policy/zero_advantage", "policy/micro_batches")


def parts_of(batch: UpdateBatch, sizes: list[int], samples: int) -> list[UpdateBatch]:
    """Whole groups: `sizes` of them in each part."""
    parts, first = [], 0
    for size in sizes:
        parts.append(UpdateBatch(batch.version, batch.rollouts[first : first + size * samples], final=False))
        first += size * samples
    return parts


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    "terms", [{}, {"kl_coef": 0.1, "entropy_coef": 0.01}], ids=["plain", "kl and entropy"]
)
def test_parts_make_the_step_of_the_whole(normalization: str, terms: dict[str, Any]) -> None:
    batch = random_batch(3, groups=6, samples=3)
    batch.rollouts[4].reward_status = "error"
    settings = {"loss_normalization": normalization, "max_grad_norm": 1e-3, **terms}
    found, metrics = [], []
    for sizes in ([6], [2, 1, 3], [1, 0, 5]):
        made = learner(exact_model("llama"), **settings)
        *before, last = parts_of(batch, sizes, samples=3)
        for part in before:
            made.accumulate(part)
        captured: list[np.ndarray[Any, Any]] = []
        step = made._optimizer.step

        def capture(update: int, made: Any = made, captured: Any = captured, step: Any = step) -> Any:
            captured.extend(g.numpy().copy() for g in gradients(made.model).values())
            return step(update)

        made._optimizer.step = capture  # type: ignore[method-assign]
        metrics.append(made.update(last).metrics)
        assert made.version == 1
        found.append(np.concatenate([g.ravel() for g in captured]))
    whole = found[0]
    for other in found[1:]:
        assert np.abs(other - whole).max() <= TOLERANCE * np.abs(whole).max()
    for streamed in metrics[1:]:
        for name in metrics[0].keys() - {
            "policy/micro_batches",
            "policy/packed_tokens",
            "policy/padding_waste",
        }:
            assert streamed[name] == pytest.approx(metrics[0][name], rel=1e-9, nan_ok=True), name


def test_a_part_changes_nothing_before_the_last() -> None:
    made = learner(exact_model("llama"))
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.accumulate(random_batch(1))
    assert made.version == 0
    assert all((before[name] == p).all() for name, p in made.model.named_parameters())


def test_parts_of_nothing_usable_make_an_empty_update() -> None:
    made = learner(exact_model("llama"))
    unusable = UpdateBatch(0, [rollout([1], [2], reward_status="error")], final=False)
    made.accumulate(unusable)
    metrics = made.update(UpdateBatch(0, [])).metrics
    assert (metrics["policy/empty_update"], metrics["policy/excluded"]) == (1.0, 1)


def test_a_part_that_is_not_finite_gives_all_of_them_up() -> None:
    made = learner(exact_model("llama"))
    made.accumulate(random_batch(1))
    bad = random_batch(2)
    bad.rollouts[1].logprobs[:] = np.nan
    with pytest.raises(StrettoError, match="isn't finite"):
        made.accumulate(bad)
    assert all((g == 0).all() for g in gradients(made.model).values())
    one = learner(exact_model("llama"))
    fresh = random_batch(5)
    found, expected = made.update(fresh).metrics, one.update(fresh).metrics
    assert [found[name] for name in NAMES] == [expected[name] for name in NAMES]


def test_parts_are_of_the_learners_version_and_have_group_baselines() -> None:
    with pytest.raises(ValueError, match="closed at version 3"):
        learner(exact_model("llama")).accumulate(random_batch(1, version=3))
    with pytest.raises(ValueError, match="not known before"):
        learner(exact_model("llama"), baseline="batch").accumulate(random_batch(1))


def test_the_history_baseline_is_kept_in_a_checkpoint(tmp_path: Path) -> None:
    def visit(number: int, seed: int) -> UpdateBatch:
        batch = random_batch(seed, groups=2, samples=2)
        for one in batch.rollouts:
            one.visit = number
        return batch

    made = learner(exact_model("llama"), baseline="history", learning_rate=0.0)
    made.update(visit(0, 1))
    made.save(tmp_path)
    copy = learner(exact_model("llama"), baseline="history", learning_rate=0.0)
    copy.load(tmp_path)
    second = visit(1, 2)
    second.version = 1
    rewards = [r.reward for r in second.rollouts]
    expected = np.array(rewards) - np.mean(
        rewards
    )  # both prompts had the same rewards, and so this mean, before
    made_advantages = made._advantages(second.rollouts)
    assert made_advantages == pytest.approx(expected / expected.std())
    assert (copy._advantages(second.rollouts) == made_advantages).all()
