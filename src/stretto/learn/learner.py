"""The learner: one optimiser step per update batch, by GRPO and its relatives."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from stretto.config import LearnerConfig, LoraConfig, SamplingConfig
from stretto.config.idle import recomputed
from stretto.errors import StrettoError
from stretto.learn.advantages import PromptMeans, batch_advantages, group_advantages
from stretto.learn.attention import PackedCausalAttention
from stretto.learn.files import FORMAT, load_weights, read_state, read_tensors
from stretto.learn.logprobs import Scorer
from stretto.learn.lora import adapters_disabled, inject_lora, load_adapter, merged_weights, save_adapter
from stretto.learn.losses import importance_weights, kl_to_reference, policy_loss, token_weights
from stretto.learn.measurements import Measurements
from stretto.learn.optimizer import Optimizer
from stretto.learn.packing import MicroBatch, TrainedTokens, pack, trained_tokens
from stretto.learn.shards import Shards
from stretto.records import Event, FloatArray, Rollout, UpdateBatch, Updated
from stretto.weights import WeightsRef

STATE_FILE = "learner.json"
OPTIMIZER_FILE = (
    "optimizer/state.safetensors"  # in a folder: vLLM takes every safetensors file beside the model's
)
ADAPTER_FOLDER = "adapter"


@dataclass(slots=True)
class _Part:
    """What is known of a batch whose gradients have been added up."""

    excluded: int  # rollouts without a usable reward or a trained token
    columns: Measurements | None = None  # None: there is no other
    advantages: FloatArray = field(default_factory=lambda: np.zeros(0))  # of the others
    size: int = 0  # what its gradients are still to be divided by, together with the other parts'
    micro_batches: int = 0
    packed_tokens: int = 0
    padding: float = 0.0


class Learner:
    """Owns the policy's module and makes its optimiser steps; `version` counts the updates made.

    The learner's policy is softmax(logits / temperature), the sampler's own without truncation. An update makes
    one step, so the log-probs before it are those of its own forward pass: with `old_logprobs = "recompute"` the
    ratio starts from them (and is 1: there is nothing to clip), and tokens sampled by other weights are weighted by
    truncated importance weights, the decoupled objective (2505.24298). With "behaviour" it starts from
    the engine's.

    With `deterministic`, tokens that the current version sampled have importance weight 1, by definition rather than
    up to the engine's rounding, so that on-policy no engine float enters the loss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        *,
        sampling: SamplingConfig,
        total_steps: int,
        post: Callable[[Event], None],
        lora: LoraConfig | None = None,
        weights: Literal["shared", "copy"] = "shared",
        deterministic: bool = True,
        seed: int = 0,
        shards: Shards | None = None,
    ) -> None:
        """`model` must have its initial weights, also when `load` follows: they are the KL's reference.

        Adapters, if any, are put into `model` in place. With `shards` this is one of the ranks, all of which must make
        the same calls, and `model` is divided among them. Raises `StrettoError` for settings that cannot be trained
        with.
        """
        if sampling.temperature == 0:
            raise StrettoError(
                "sampling.temperature = 0: greedy responses have no probabilities to learn from; use 1.0"
            )
        self.recompute = recomputed(deterministic, config.old_logprobs)
        if deterministic and not self.recompute:
            raise StrettoError(
                'learner.old_logprobs = "behaviour" takes the engine\'s log-probs, whose last bits depend on what '
                'else was in its step; use "recompute", or deterministic = false'
            )
        self.model = model
        self.config = config
        self.version = 0
        self._sampling = sampling
        self._post = post
        self._lora = lora
        self._weights = weights
        self._deterministic = deterministic
        self._shards = shards
        self._reference: Scorer | None = None
        if config.kl_coef > 0 and lora is None:
            self._reference = self._scorer(copy.deepcopy(model))
        if lora is not None:
            inject_lora(model, lora, seed)
        else:
            model.requires_grad_(True)
        if config.gradient_checkpointing:
            _enable_checkpointing(model)
        self._policy = self._scorer(model)
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = Optimizer(self._trained, config, total_steps)
        self._parts: list[_Part] = []  # of the next update
        self._means = PromptMeans()

    def _scorer(self, model: PreTrainedModel) -> Scorer:
        scorer = Scorer(model)
        if self._shards is not None:
            self._shards.shard(scorer, tuple(model._no_split_modules or ()))
        return scorer

    # ---- updates ------------------------------------------------------------------------------------------

    def begin(self, batch: UpdateBatch) -> None:
        """Make the optimiser step for `batch` and post `Updated`. In this process it computes before returning."""
        self._post(self.update(batch))

    def accumulate(self, batch: UpdateBatch) -> None:
        """Take in a part of the next update, whole groups: their gradients are added up, no optimiser step is made.

        The step of the update that follows then equals the one on all parts at once, up to the order of summation (a
        relative 1e-12 in float64). Raises as `update` does, with all parts given up.
        """
        if self.config.baseline != "group":
            raise ValueError(
                f"learner.baseline = {self.config.baseline} is not known before the whole batch is"
            )
        self._parts.append(self._part(batch, whole=False))

    def update(self, batch: UpdateBatch) -> Updated:
        """One optimiser step on `batch` and the parts before it. Without a usable rollout it changes nothing but the
        version, and says so in `policy/empty_update`.

        Raises `StrettoError`, with the weights unchanged, where a log-prob, the loss or a gradient isn't finite.
        """
        parts = [*self._parts, self._part(batch, whole=not self._parts)]
        self._parts = []
        measured = [part.columns for part in parts if part.columns is not None]
        metrics: dict[str, float] = {
            "policy/excluded": sum(part.excluded for part in parts),
            "policy/empty_update": float(not measured),
        }
        if measured:
            columns = measured[0]
            if len(parts) > 1:
                scale = 1.0 / sum(part.size for part in parts)
                self._optimizer.scale_gradients(scale)
                columns = Measurements.joined(measured, scale)
            with self._training():
                grad_norm, rate = self._optimizer.step(self.version)
            metrics |= {
                **columns.metrics(self.version),
                "policy/grad_norm": grad_norm,
                "policy/learning_rate": rate,
                "policy/zero_advantage": float(np.mean(np.concatenate([p.advantages for p in parts]) == 0)),
                "policy/micro_batches": sum(part.micro_batches for part in parts),
                "policy/packed_tokens": sum(part.packed_tokens for part in parts),
                "policy/padding_waste": max(part.padding for part in parts),
            }
        self.version += 1
        return Updated(self.version, metrics)

    def _part(self, batch: UpdateBatch, *, whole: bool) -> _Part:
        """Add up the gradients of `batch`. If it is not the `whole` update, their scale is left open: it is 1 / the sum
        of the parts' sizes.
        """
        if batch.version != self.version:
            raise ValueError(
                f"the batch was closed at version {batch.version}, the learner is at {self.version}"
            )
        rollouts = [r for r in batch.rollouts if r.reward_status == "ok" and r.loss_mask.any()]
        excluded = len(batch.rollouts) - len(rollouts)
        if not rollouts:
            return _Part(excluded)
        advantages = self._advantages(rollouts)
        tokens = trained_tokens(rollouts)
        size = len(tokens) if self.config.loss_normalization == "token" else len(rollouts)
        weights = token_weights(tokens.rollout, self.config.loss_normalization, self._sampling.max_new_tokens)
        columns = Measurements(tokens, advantages[tokens.rollout], weights if whole else weights * size)
        # Without KL and entropy terms a rollout of advantage 0 has gradient 0: it is measured, not trained on.
        everyone = self.config.kl_coef > 0 or self.config.entropy_coef != 0
        learning = [i for i in range(len(rollouts)) if everyone or advantages[i] != 0]
        measured = sorted(set(range(len(rollouts))) - set(learning))
        budget = self.config.tokens_per_micro_batch
        with self._training():
            packed = [(m, True) for m in pack(rollouts, learning, tokens, budget)]
            packed += [(m, False) for m in pack(rollouts, measured, tokens, budget)]
            padding = self._micro_batches(packed, columns)
            self._check_finite(columns, rollouts)
        packed_tokens = sum(len(m.token_ids) for m, _ in packed)
        return _Part(excluded, columns, advantages, size, len(packed), packed_tokens, padding)

    def _advantages(self, rollouts: list[Rollout]) -> FloatArray:
        rewards, normalize = np.array([r.reward for r in rollouts]), self.config.advantage_normalization
        if self.config.baseline == "group":
            return group_advantages(rewards, np.array([r.group_id for r in rollouts]), normalize=normalize)
        baseline = np.full(len(rollouts), np.nan)
        if self.config.baseline == "history":
            baseline = np.array([self._means.before(r.prompt, r.visit) for r in rollouts])
            for rollout in rollouts:
                self._means.observe(rollout.prompt, rollout.visit, rollout.reward)
        return batch_advantages(rewards, baseline, normalize=normalize)

    def _micro_batches(self, packed: list[tuple[MicroBatch, bool]], columns: Measurements) -> float:
        """Compute them, those marked True backward too; the largest share of padding in attention."""
        if self._shards is None:
            return max(self._micro_batch(m, columns, train=train) for m, train in packed)
        padding = 0.0
        apart = Measurements(columns.tokens, columns.advantages, columns.weights)  # what doesn't count
        none = Measurements(columns.tokens, columns.advantages, np.zeros(len(columns.tokens)))
        for train in (True, False):
            for m, counts in self._shards.share([m for m, trained in packed if trained == train]):
                padding = max(padding, self._micro_batch(m, apart if counts else none, train=train))
        columns.take(apart, self._shards.sum)
        return padding

    def _micro_batch(self, micro_batch: MicroBatch, columns: Measurements, *, train: bool) -> float:
        """Forward, and backward if `train`; returns the share of padding in attention."""
        device = self.model.device
        attend = PackedCausalAttention(micro_batch.sequences, len(micro_batch.token_ids), device)
        chosen = micro_batch.tokens
        with torch.set_grad_enabled(train):
            logprobs, entropy = self._logprobs(self._policy, micro_batch, columns.tokens, attend)

            def column(values: FloatArray) -> torch.Tensor:
                return torch.from_numpy(values[chosen]).to(device, logprobs.dtype)

            behaviour = column(columns.tokens.logprobs)
            old = logprobs.detach() if self.recompute else behaviour
            loss, clipped = policy_loss(
                logprobs,
                old,
                column(columns.advantages),
                clip_low=self.config.clip_low,
                clip_high=self.config.clip_high,
            )
            if self.recompute and self.config.importance_cap is not None:
                weights, capped = importance_weights(old, behaviour, self.config.importance_cap)
                if self._deterministic:
                    current = torch.from_numpy(columns.tokens.versions[chosen] == self.version).to(device)
                    weights, capped = weights.masked_fill(current, 1.0), capped & ~current
                loss = loss * weights
                columns.capped[chosen] = capped.cpu().numpy()
            if self.config.kl_coef > 0:
                kl = kl_to_reference(logprobs, self._reference_logprobs(micro_batch, columns.tokens, attend))
                loss = loss + self.config.kl_coef * kl
                columns.kl[chosen] = _to_numpy(kl)
            if self.config.entropy_coef != 0:
                loss = loss - self.config.entropy_coef * entropy
            loss = loss * column(columns.weights)
        columns.loss[chosen] = _to_numpy(loss)
        columns.logprobs[chosen] = _to_numpy(logprobs)
        columns.entropy[chosen] = _to_numpy(entropy)
        columns.clipped[chosen] = clipped.cpu().numpy()
        if train:
            loss.sum().backward()
            self._optimizer.accumulate()
        return attend.padding

    def _logprobs(
        self, scorer: Scorer, micro_batch: MicroBatch, tokens: TrainedTokens, attend: PackedCausalAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies (n,) of the micro-batch's trained tokens."""
        targets = tokens.targets[micro_batch.tokens]
        columns = (micro_batch.token_ids, micro_batch.positions, micro_batch.rows, targets)
        token_ids, positions, rows, chosen = (torch.from_numpy(c).to(self.model.device) for c in columns)
        temperature, entropy_grad = self._sampling.temperature, self.config.entropy_coef != 0
        scored = scorer(token_ids, positions, attend, rows, chosen, temperature, entropy_grad)
        return scored[0], scored[1]

    def _reference_logprobs(
        self, micro_batch: MicroBatch, tokens: TrainedTokens, attend: PackedCausalAttention
    ) -> torch.Tensor:
        without_adapters = adapters_disabled(self.model) if self._reference is None else nullcontext()
        with torch.no_grad(), without_adapters:
            return self._logprobs(self._reference or self._policy, micro_batch, tokens, attend)[0]

    def _check_finite(self, columns: Measurements, rollouts: list[Rollout]) -> None:
        bad = columns.not_finite()
        if not bad:
            return
        self._optimizer.discard_gradients()
        self._parts = []
        first = bad[0]
        rollout = rollouts[int(columns.tokens.rollout[first])]
        raise StrettoError(
            f"optimiser step {self.version + 1}: {len(bad)} of {len(columns.tokens)} tokens have a loss that isn't "
            f"finite, first at token {columns.tokens.position[first]} of request {rollout.request_id} "
            f"(log-prob {columns.logprobs[first]}, the engine's {columns.tokens.logprobs[first]}, loss "
            f"{columns.loss[first]}); the weights were left as they were"
        )

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Gradient checkpointing works in training mode only (dropout is off in both)."""
        on_cuda = self._deterministic and self.model.device.type == "cuda"
        before = torch.are_deterministic_algorithms_enabled()
        if on_cuda:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.model.train(self.config.gradient_checkpointing)
        try:
            yield
        finally:
            self.model.eval()
            if on_cuda:
                torch.use_deterministic_algorithms(before)

    # ---- weights ------------------------------------------------------------------------------------------

    def publish(self) -> WeightsRef:
        """The newest weights for the engines."""
        if self._weights == "shared":
            trained = {name: p.detach() for name, p in self._trained.items()}
            return WeightsRef(self.version, "shared", trained)
        if self._shards is not None:
            return WeightsRef(self.version, "copy", self._shards.gather(merged_weights(self.model)))
        # Cloned: the learner may make its next step before a worker has taken these.
        tensors = {name: tensor.clone() for name, tensor in merged_weights(self.model).items()}
        return WeightsRef(self.version, "copy", tensors)

    def save(self, folder: Path) -> None:
        """Write the policy into `folder`, which exists, in Hugging Face format (adapters merged, and by themselves in
        `adapter/` as peft reads them), and what `load` needs to go on as if nothing had happened.
        """
        weights, moments = merged_weights(self.model), self._optimizer.state_dict()
        if self._shards is not None:
            weights, moments = self._shards.gather(weights), self._shards.gather(moments)
            if self._shards.rank > 0:
                return
        self.model.save_pretrained(folder, state_dict=weights)
        if self._lora is not None:
            (folder / ADAPTER_FOLDER).mkdir()
            save_adapter(self.model, folder / ADAPTER_FOLDER)
        (folder / OPTIMIZER_FILE).parent.mkdir()
        save_file({name: t.contiguous() for name, t in moments.items()}, folder / OPTIMIZER_FILE)
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "optimizer_steps": self._optimizer.steps,
        }
        if self.config.baseline == "history":
            body["prompt_means"] = self._means.state_dict()
        (folder / STATE_FILE).write_text(json.dumps(body) + "\n")

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises `StrettoError` if the folder is another model's or incomplete."""
        body = read_state(folder / STATE_FILE)
        moments = read_tensors(folder / OPTIMIZER_FILE)
        if self._lora is not None:
            load_adapter(self.model, folder / ADAPTER_FOLDER)
        else:
            load_weights(self.model, folder)
        self._optimizer.load_state_dict(moments, body["optimizer_steps"])
        self.version = body["version"]
        self._means.load_state_dict(body.get("prompt_means", {}))


def _enable_checkpointing(model: PreTrainedModel) -> None:
    # Renamed within transformers 5.
    enable: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.disable_input_require_grads()  # only the reentrant kind needs them


def _to_numpy(values: torch.Tensor) -> FloatArray:
    array: FloatArray = values.detach().double().cpu().numpy()
    return array
