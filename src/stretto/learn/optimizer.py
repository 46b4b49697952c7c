"""AdamW over float32 (or float64) parameters, with warm-up, a schedule and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from stretto.config import LearnerConfig
from stretto.errors import StrettoError
from stretto.learn.shards import divided_like, whole


def learning_rate(config: LearnerConfig, step: int, total_steps: int) -> float:
    """The rate of optimiser step `step`, counted from 0; after `total_steps` steps linear and cosine reach 0.

    Warm-up rises linearly: the first of w warm-up steps has 1/w of the peak, the last has all of it.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    remaining = max(0, total_steps - step) / max(1, total_steps - config.warmup_steps)
    if config.lr_schedule == "linear":
        return config.learning_rate * remaining
    if config.lr_schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 - math.cos(math.pi * remaining))
    return config.learning_rate


class Optimizer:
    """AdamW (1711.05101) for named parameters.

    A bfloat16 parameter has a float32 master copy: micro-batches' gradients are added up in float32, the step is
    made there and rounded once into the parameter, which the forward pass reads. So small steps add up
    instead of being rounded away; it costs 16 bytes per parameter besides the model's 2.
    Weight decay is for matrices only, not for biases and norms.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: LearnerConfig, total_steps: int
    ) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._total_steps = total_steps
        self.steps = 0  # AdamW steps made; an empty update makes none
        # What the step is made on: the parameter, or its master copy.
        self._trained: dict[str, torch.Tensor] = {
            name: p if p.dtype in (torch.float32, torch.float64) else p.detach().float().requires_grad_()
            for name, p in self._parameters.items()
        }
        groups = [
            {
                "params": [p for p in self._trained.values() if p.ndim >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in self._trained.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)

    def accumulate(self) -> None:
        """After each backward pass: add half-precision gradients to the masters'."""
        for name, parameter in self._parameters.items():
            master = self._trained[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def scale_gradients(self, scale: float) -> None:
        """Multiply what has been added up."""
        for tensor in self._trained.values():
            if tensor.grad is not None:
                tensor.grad.mul_(scale)

    def step(self, update: int) -> tuple[float, float]:
        """Make optimiser step `update` (from 0) with the accumulated gradients; returns their norm and the rate.

        Raises `StrettoError`, with the weights unchanged, if a gradient isn't finite.
        """
        gradients = []
        for tensor in self._trained.values():
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            gradients.append(tensor.grad)
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if not torch.isfinite(norm):
            bad = [
                name
                for name, t in self._trained.items()
                if t.grad is not None and not whole(t.grad).isfinite().all()
            ]
            self.discard_gradients()
            raise StrettoError(
                f"optimiser step {update + 1}: the gradient norm is {float(norm)}"
                + (f", first in {bad[0]}" if bad else "")
                + "; the weights were left as they were. A lower learner.learning_rate or model.dtype = "
                '"float32" may help'
            )
        torch.nn.utils.clip_grads_with_norm_(list(self._trained.values()), self._config.max_grad_norm, norm)
        rate = learning_rate(self._config, update, self._total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.steps += 1
        self.write_back()
        self.discard_gradients()
        return float(norm), rate

    def write_back(self) -> None:
        """Round master copies into their parameters."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._trained[name] is not parameter:
                    parameter.copy_(self._trained[name])

    def discard_gradients(self) -> None:
        for tensor in (*self._parameters.values(), *self._trained.values()):
            tensor.grad = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Moments and master copies, by "exp_avg/", "exp_avg_sq/" and "master/" and the parameter's name."""
        state: dict[str, torch.Tensor] = {}
        for name, trained in self._trained.items():
            if self.steps:
                state[f"exp_avg/{name}"] = self._adamw.state[trained]["exp_avg"]
                state[f"exp_avg_sq/{name}"] = self._adamw.state[trained]["exp_avg_sq"]
            if trained is not self._parameters[name]:
                state[f"master/{name}"] = trained.detach()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take over the moments, and the master copies, after `steps` AdamW steps. Parameters are loaded elsewhere."""
        masters = [name for name, trained in self._trained.items() if trained is not self._parameters[name]]
        moments = list(self._trained) if steps else []
        expected = {
            *(f"exp_avg/{name}" for name in moments),
            *(f"exp_avg_sq/{name}" for name in moments),
            *(f"master/{name}" for name in masters),
        }
        if differing := sorted(expected ^ state.keys()):
            raise StrettoError(
                f"optimizer state of another model: {differing[0]} is "
                + ("missing" if differing[0] in expected else "not expected")
            )
        self.steps = steps
        self._adamw.state.clear()
        for name, trained in self._trained.items():
            if steps:
                self._adamw.state[trained] = {
                    "step": torch.tensor(float(steps), dtype=torch.float32, device=trained.device),
                    "exp_avg": divided_like(state[f"exp_avg/{name}"], trained).clone(),
                    "exp_avg_sq": divided_like(state[f"exp_avg_sq/{name}"], trained).clone(),
                }
        with torch.no_grad():
            for name in masters:
                self._trained[name].copy_(divided_like(state[f"master/{name}"], self._trained[name]))
