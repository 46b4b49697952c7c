from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from stretto.config import LoraConfig
from stretto.errors import StrettoError
from stretto.learn.learner import Learner
from stretto.learn.lora import inject_lora
from stretto.records import Event, UpdateBatch, Updated
from tests.learn.rollouts import exact_model, gradients, learner, plain_logprobs, random_batch, rollout
from tests.models import tiny_model

NAN = float("nan")


def captured(made: Learner) -> dict[str, torch.Tensor]:
    """The gradients with which `made` will step, once it has."""
    found: dict[str, torch.Tensor] = {}
    step = made._optimizer.step

    def capture(update: int) -> tuple[float, float]:
        found.update(gradients(made.model))
        return step(update)

    made._optimizer.step = capture  # type: ignore[method-assign]
    return found


def naive_loss(
    model: PreTrainedModel, reference: PreTrainedModel, batch: UpdateBatch, config: dict[str, Any]
) -> torch.Tensor:
    """The published objective, response by response, on transformers' own forward pass."""
    rewards: dict[int, list[float]] = {}
    for one in batch.rollouts:
        rewards.setdefault(one.group_id, []).append(one.reward)
    n_tokens = sum(int(r.loss_mask.sum()) for r in batch.rollouts)
    total = torch.zeros((), dtype=torch.float64)
    for one in batch.rollouts:
        everything = plain_logprobs(model, one, 0.9)
        picked = torch.arange(len(one.token_ids)), torch.from_numpy(one.token_ids)
        logprobs = everything[picked]
        behaviour = torch.from_numpy(one.logprobs)
        own = np.array(rewards[one.group_id])
        advantage = (one.reward - own.mean()) / own.std()
        old = behaviour if config["old_logprobs"] == "behaviour" else logprobs.detach()
        ratio = torch.exp(logprobs - old)
        bounded = ratio.clamp(1 - config["clip_low"], 1 + config["clip_high"])
        terms = -torch.minimum(ratio * advantage, bounded * advantage)
        if config["old_logprobs"] == "recompute" and config["importance_cap"] is not None:
            terms = terms * torch.exp(old - behaviour).clamp(max=config["importance_cap"])
        if config["kl_coef"]:
            with torch.no_grad():
                towards = plain_logprobs(reference, one, 0.9)[picked]
            terms = terms + config["kl_coef"] * (torch.exp(towards - logprobs) - (towards - logprobs) - 1)
        entropy = -(everything.exp() * everything).sum(-1)
        terms = (terms - config["entropy_coef"] * entropy)[torch.from_numpy(one.loss_mask)]
        sequences = len(batch.rollouts)
        total = (
            total
            + {
                "token": terms.sum() / n_tokens,
                "sequence": terms.mean() / sequences,
                "constant": terms.sum() / (20 * sequences),
            }[config["loss_normalization"]]
        )
    return total


BASE: dict[str, Any] = {
    "old_logprobs": "recompute",
    "importance_cap": None,
    "clip_low": 0.1,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "loss_normalization": "token",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_normalization": "sequence", "kl_coef": 0.3},
    "dr_grpo": {"loss_normalization": "constant", "entropy_coef": 0.05},
    "ppo": {"old_logprobs": "behaviour"},
    "decoupled": {"importance_cap": 1.1, "kl_coef": 0.1, "entropy_coef": -0.1},
}


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2", "qwen3", "gemma"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_the_naive_ones(family: str, variant: str) -> None:
    settings = BASE | VARIANTS[variant]
    batch = random_batch(3)
    # The reference is the model at construction; then the policy moves away from it.
    plain, reference = (exact_model(family, attention="sdpa") for _ in range(2))
    made = learner(exact_model(family), deterministic=False, tokens_per_micro_batch=50, **settings)
    with torch.no_grad():
        for one, other in zip(made.model.parameters(), plain.parameters(), strict=True):
            one.add_(
                0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(5), dtype=one.dtype)
            )
            other.copy_(one)
    found = captured(made)
    loss = naive_loss(plain, reference, batch, settings)
    loss.backward()
    metrics = made.update(batch).metrics
    assert metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-12)
    wanted = gradients(plain)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12, msg=name)
    norm = math.sqrt(sum(float((g**2).sum()) for g in wanted.values()))
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-9)


def test_with_adapters_the_reference_is_the_model_without_them() -> None:
    settings = BASE | {"kl_coef": 0.5}
    lora = LoraConfig(rank=3, alpha=6.0)
    made = learner(
        exact_model("qwen2"), lora=lora, deterministic=False, tokens_per_micro_batch=50, **settings
    )
    made.update(random_batch(2))
    plain, reference = (exact_model("qwen2", attention="sdpa") for _ in range(2))
    inject_lora(plain, lora, seed=0)
    plain.load_state_dict(made.model.state_dict())
    batch = random_batch(3, version=1)
    found = captured(made)
    loss = naive_loss(plain, reference, batch, settings)
    loss.backward()
    metrics = made.update(batch).metrics
    assert metrics["policy/kl"] > 1e-3
    assert metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-12)
    wanted = gradients(plain)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_gradients_do_not_depend_on_the_split(normalization: str) -> None:
    batch = random_batch(4, groups=4)
    results = []
    for budget in (1, 40, 100_000):
        made = learner(
            exact_model("qwen2"),
            tokens_per_micro_batch=budget,
            loss_normalization=normalization,
            kl_coef=0.1,
            entropy_coef=0.01,
        )
        found = captured(made)
        results.append((made.update(batch).metrics, found))
    assert [int(m["policy/micro_batches"]) for m, _ in results] == [
        16,
        results[1][0]["policy/micro_batches"],
        1,
    ]
    for metrics, found in results[1:]:
        assert metrics["policy/loss"] == pytest.approx(results[0][0]["policy/loss"], abs=1e-12)
        for name, gradient in results[0][1].items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12, msg=name)


def test_gradient_checkpointing_changes_nothing() -> None:
    found = []
    for checkpointing in (False, True):
        made = learner(exact_model("llama"), gradient_checkpointing=checkpointing)
        found.append(captured(made))
        made.update(random_batch(5))
        assert not made.model.training
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-13, msg=name)


def test_same_batch_same_weights_bit_for_bit() -> None:
    fingerprints = set()
    for _ in range(2):
        made = learner(tiny_model("llama", dtype=torch.float32), tokens_per_micro_batch=60)
        for step in range(3):
            made.update(random_batch(step, version=step))
        fingerprints.add(made.publish().fingerprint)
    assert len(fingerprints) == 1


def test_a_step_raises_the_objective() -> None:
    good, bad = rollout([1, 2], [3, 4, 5], reward=1.0), rollout([1, 2], [6, 7], request=1, reward=0.0)
    made = learner(exact_model("qwen2"), learning_rate=1e-5)
    plain = exact_model("qwen2", attention="sdpa")

    def objective() -> float:
        with torch.no_grad():
            for own, other in zip(plain.parameters(), made.model.parameters(), strict=True):
                own.copy_(other)
            likely, unlikely = (
                plain_logprobs(plain, one, 0.9)[
                    torch.arange(len(one.token_ids)), torch.from_numpy(one.token_ids)
                ]
                for one in (good, bad)
            )
        return float(likely.sum() - unlikely.sum())

    before = objective()
    made.update(UpdateBatch(0, [good, bad]))
    assert objective() > before


def test_begin_posts_the_update() -> None:
    events: list[Event] = []
    made = learner(exact_model("llama"), post=events.append)
    made.begin(random_batch(1))
    (event,) = events
    assert isinstance(event, Updated)
    assert event.version == made.version == 1


# ---- what is left out -------------------------------------------------------------------------------------


def test_excluded_rollouts_change_nothing_but_the_count() -> None:
    batch = random_batch(6)
    excluded = rollout([1, 2, 3], [4, 5], group=0, request=99, reward=NAN)
    excluded.reward_status = "timeout"
    results = []
    for rollouts in (batch.rollouts, [*batch.rollouts, excluded]):
        made = learner(exact_model("llama"))
        metrics = dict(made.update(UpdateBatch(0, rollouts)).metrics)
        results.append((metrics.pop("policy/excluded"), metrics, made.publish().fingerprint))
    assert [r[0] for r in results] == [0, 1]
    # equal but for keys that are NaN without a reference model
    assert {k: v for k, v in results[0][1].items() if v == v} == {
        k: v for k, v in results[1][1].items() if v == v
    }
    assert results[0][2] == results[1][2]


def test_a_batch_without_usable_rollouts_changes_only_the_version() -> None:
    made = learner(exact_model("llama"))
    made.update(random_batch(1))
    before = made.publish().fingerprint
    batch = random_batch(2, version=1)
    for one in batch.rollouts:
        one.reward, one.reward_status = NAN, "error"
    event = made.update(batch)
    assert event.version == 2
    assert event.metrics == {"policy/excluded": 12, "policy/empty_update": 1}
    assert made.publish().fingerprint == before
    assert made.update(random_batch(3, version=2)).metrics["policy/empty_update"] == 0


def test_advantage_zero_is_measured_but_has_no_gradient() -> None:
    batch = random_batch(7)
    for one in batch.rollouts:
        one.reward = 1.0 if one.group_id == 0 else one.reward
    made = learner(exact_model("llama"), kl_coef=0.0)
    found = captured(made)
    metrics = made.update(batch).metrics
    assert metrics["policy/zero_advantage"] == pytest.approx(1 / 3)
    plain = exact_model("llama", attention="sdpa")
    lengths = [int(r.loss_mask.sum()) for r in batch.rollouts]
    entropies = []
    for one in batch.rollouts:
        with torch.no_grad():
            everything = plain_logprobs(plain, one, 0.9)[torch.from_numpy(one.loss_mask)]
        entropies.append(float(-(everything.exp() * everything).sum()))
    assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / sum(lengths), abs=1e-12)
    trained = UpdateBatch(0, [r for r in batch.rollouts if r.group_id != 0])
    other = learner(exact_model("llama"), loss_normalization="constant")
    wanted = captured(other)
    other.update(trained)
    scale = 20 * len(trained.rollouts) / sum(lengths)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name] * scale, rtol=0, atol=1e-12, msg=name)


# ---- off-policy ---------------------------------------------------------------------------------------------


def test_engine_floats_reach_the_loss_of_stale_tokens_only() -> None:
    def trained(noise: float, *, stale: bool) -> str:
        batch = random_batch(8)
        for one in batch.rollouts:
            one.logprobs = one.logprobs + noise
            one.versions[:] = 0
        made = learner(exact_model("llama"), importance_cap=50.0)
        made.version = 1 if stale else 0
        batch.version = made.version
        made.update(batch)
        return made.publish().fingerprint

    assert trained(0.0, stale=False) == trained(0.3, stale=False)
    assert trained(0.0, stale=True) != trained(0.3, stale=True)


def test_mismatch_is_over_tokens_of_the_current_version() -> None:
    plain = exact_model("llama", attention="sdpa")
    batch = random_batch(9, version=3)
    for one in batch.rollouts:
        picked = torch.arange(len(one.token_ids)), torch.from_numpy(one.token_ids)
        with torch.no_grad():
            exact = plain_logprobs(plain, one, 0.9)[picked].numpy()
        one.raw_logprobs = np.where(one.loss_mask, exact - 0.01, 0.0)
        one.logprobs = np.where(one.loss_mask, exact - math.log(2), 0.0)
    batch.rollouts[0].versions[:] = 2
    batch.rollouts[0].raw_logprobs -= 1.0
    made = learner(exact_model("llama"), importance_cap=1.5)
    made.version = 3
    metrics = made.update(batch).metrics
    assert metrics["off_policy/logprob_mismatch"] == pytest.approx(0.01, abs=1e-9)
    assert metrics["off_policy/logprob_mismatch_max"] == pytest.approx(0.01, abs=1e-9)
    assert metrics["off_policy/ratio_mean"] == pytest.approx(2.0, abs=1e-9)
    tokens = [int(r.loss_mask.sum()) for r in batch.rollouts]
    assert metrics["off_policy/cap_fraction"] == pytest.approx(tokens[0] / sum(tokens))
    assert math.isnan(metrics["policy/kl"])


# ---- refusals -------------------------------------------------------------------------------------------------


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"sampling\.temperature = 0"):
        learner(exact_model("llama"), sampling={"temperature": 0.0})


def test_behaviour_logprobs_in_a_deterministic_run_are_refused() -> None:
    with pytest.raises(StrettoError, match=r"learner\.old_logprobs"):
        learner(exact_model("llama"), old_logprobs="behaviour")


def test_a_batch_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 4"):
        learner(exact_model("llama")).update(random_batch(1, version=4))


def test_a_loss_that_is_not_finite_names_token_and_request_and_leaves_the_weights() -> None:
    batch = random_batch(10, environment=False)
    batch.rollouts[1].logprobs[0] = -np.inf
    made = learner(exact_model("llama"), deterministic=False, old_logprobs="behaviour")
    before = made.publish().fingerprint
    with pytest.raises(StrettoError, match=r"optimiser step 1: 1 of \d+ tokens .* token 0 of request 1 "):
        made.update(batch)
    assert made.publish().fingerprint == before
    assert made.version == 0
    made.update(random_batch(10))


def test_a_gradient_that_is_not_finite_names_the_parameter() -> None:
    made = learner(exact_model("llama"))
    before = made.publish().fingerprint
    weight = made.model.get_parameter("model.layers.1.mlp.up_proj.weight")
    handle = weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(
        StrettoError, match=r"optimiser step 1: the gradient norm .* model.layers.1.mlp.up_proj"
    ):
        made.update(random_batch(1))
    handle.remove()
    assert made.publish().fingerprint == before
    made.update(random_batch(1))
