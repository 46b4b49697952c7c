from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto.simulate.cost import PRESETS, preset


def test_a_preset_is_its_stated_arithmetic() -> None:
    """7.62 B parameters in bfloat16 over 70 % of 3.35 TB/s, and so on."""
    costs = preset("7b-h100", tp=1, trainer_gpus=8)
    assert costs.step.base == pytest.approx(2 * 7.62e9 / (0.7 * 3.35e12) + 1e-3)
    assert costs.step.per_token == costs.step.per_prefill == pytest.approx(2 * 7.62e9 / (0.5 * 989e12))
    assert costs.step.per_context == pytest.approx(57_344 / (0.7 * 3.35e12))  # bytes of K/V a token
    assert costs.train_per_token == pytest.approx(10 * 7.62e9 / (8 * 0.35 * 989e12))
    assert costs.kv_tokens == pytest.approx((0.9 * 80e9 - 4e9 - 2 * 7.62e9) / 57_344, abs=1)


def test_more_gpus_are_faster_and_hold_more_but_pay_for_talking() -> None:
    one, four = preset("14b-h200", 1, 8), preset("14b-h200", 4, 8)
    assert four.step.per_token == pytest.approx(one.step.per_token / 4)
    assert one.step.base / 4 < four.step.base < one.step.base
    assert four.kv_tokens is not None
    assert one.kv_tokens is not None
    assert four.kv_tokens > 4 * one.kv_tokens


def test_every_preset_builds_with_enough_gpus() -> None:
    for name in PRESETS:
        assert preset(name, 8, 8).step.base > 0


def test_unknown_names_and_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StrettoError, match='did you mean "7b-h100"'):
        preset("7b-h10", 1, 1)
    with pytest.raises(StrettoError, match="145 GB of weights do not fit"):
        preset("72b-h100", 1, 1)
