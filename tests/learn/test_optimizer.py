from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stretto.config import LearnerConfig
from stretto.errors import StrettoError
from stretto.learn.optimizer import Optimizer, learning_rate


def config(**settings: Any) -> LearnerConfig:
    return LearnerConfig.model_validate({"learning_rate": 0.1} | settings)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, 0.8535533905932737, 0.5, 0.14644660940672627, 0]),
    ],
)
def test_schedules(schedule: str, rates: list[float]) -> None:
    settings = config(learning_rate=1.0, lr_schedule=schedule, warmup_steps=2)
    assert [learning_rate(settings, step, 6) for step in range(7)] == pytest.approx(rates, abs=1e-15)


def test_steps_equal_the_published_adamw() -> None:
    """Algorithm 2 of 1711.05101, written out; decay on the matrix only."""
    settings = config(weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=1e9, lr_schedule="linear")
    parameters = {
        "matrix": nn.Parameter(torch.ones(2, 2, dtype=torch.float64)),
        "bias": nn.Parameter(torch.ones(2, dtype=torch.float64)),
    }
    optimizer = Optimizer(parameters, settings, total_steps=4)
    wanted = {name: p.detach().clone() for name, p in parameters.items()}
    m = {name: torch.zeros_like(p) for name, p in wanted.items()}
    v = {name: torch.zeros_like(p) for name, p in wanted.items()}
    for step in range(3):
        rate = 0.1 * (4 - step) / 4
        for name, p in parameters.items():
            p.grad = torch.full_like(p, 0.3 - 0.2 * step)
            g = p.grad.clone()
            m[name], v[name] = 0.8 * m[name] + 0.2 * g, 0.9 * v[name] + 0.1 * g * g
            scale = (m[name] / (1 - 0.8 ** (step + 1))) / ((v[name] / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8)
            wanted[name] = wanted[name] * (1 - rate * (0.1 if name == "matrix" else 0.0)) - rate * scale
        optimizer.step(step)
    for name, p in parameters.items():
        torch.testing.assert_close(p.detach(), wanted[name], rtol=0, atol=1e-12)


def test_gradients_are_scaled_down_to_the_norm() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(1, dtype=torch.float64))}
    optimizer = Optimizer(parameters, config(max_grad_norm=0.5), total_steps=4)
    parameters["a"].grad = torch.tensor([3.0], dtype=torch.float64)
    norm, rate = optimizer.step(0)
    assert (norm, rate) == (3.0, 0.1)
    assert optimizer.state_dict()["exp_avg/a"].item() == pytest.approx(0.1 * 0.5, rel=1e-5)


def test_bfloat16_steps_add_up_in_float32() -> None:
    # 1e-4 is far below half a bfloat16 ulp at 1, which is 2^-9 downwards: single steps would be rounded away.
    parameter = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    optimizer = Optimizer({"a": parameter}, config(learning_rate=1e-4), total_steps=100)
    for step in range(100):
        for _ in range(2):
            parameter.grad = torch.ones(1, 1, dtype=torch.bfloat16)
            optimizer.accumulate()
        optimizer.step(step)
    assert optimizer.state_dict()["master/a"].item() == pytest.approx(0.99, abs=1e-5)
    assert parameter.dtype == torch.bfloat16
    assert parameter.item() == optimizer.state_dict()["master/a"].bfloat16().item()


def test_micro_batches_add_up_in_float32() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer({"a": parameter}, config(), total_steps=1)
    for value in (256.0, 1.0, 1.0):  # in bfloat16 this stays 256
        parameter.grad = torch.full((1,), value, dtype=torch.bfloat16)
        optimizer.accumulate()
    assert optimizer.step(0)[0] == 258.0


def test_state_of_another_model_is_refused() -> None:
    parameters = {"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.ones(1))}
    saved = Optimizer(parameters, config(), total_steps=1)
    saved.step(0)
    state = dict(saved.state_dict())
    del state["exp_avg/b"]
    with pytest.raises(StrettoError, match="exp_avg/b is missing"):
        Optimizer(parameters, config(), total_steps=1).load_state_dict(state, 1)
