"""The figures of `studies/simulator.py`: sums, not means of ratios; intervals over repeats."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from stretto.config import Config, load_config
from studies import simulator


def of(kind: str, fleet: str) -> Config:
    return load_config(
        {"schedule": {"kind": kind}, "fleet": {"kind": fleet, "workers": 2 if fleet == "processes" else 1}}
    )


def line(total: float, idle: float) -> dict[str, Any]:
    """Of an update whose learner and recorder take 2 s of `total`."""
    return {
        "time/total": total,
        "time/update": 1.5,
        "time/boundary": 0.5,
        "rollout/bubble_ratio": idle,
        "engine/steps": 10,
        "engine/decode_steps": 80,
    }


@pytest.mark.parametrize(
    ("kind", "fleet", "idle"),
    [
        ("synchronous", "in_process", 4 / 10),
        ("synchronous", "processes", 4 / 10),
        ("async", "processes", 5 / 14),
    ],
)
def test_idle_is_idle_seconds_over_available_ones(kind: str, fleet: str, idle: float) -> None:
    """1 s and 9 s are available, or 3 s and 11 s where it generates beside the learner: not the same weight."""
    lines = [line(3.0, 0.0), line(11.0, 4 / 9 if idle == 4 / 10 else 5 / 11)]
    config = of(kind, fleet)
    found = simulator.measured(lines, config)
    assert found["idle"] == pytest.approx(idle)
    assert found["steps"] == 20
    assert found["idle by counts"] == pytest.approx(1 - 160 / (config.engine.max_num_seqs * 20))


def test_the_interval_is_students() -> None:
    values = [1.0, 2.0, 4.0]
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert simulator.interval(values, ".3f") == f"+{sum(values) / 3:.3f} ({low:+.3f} to {high:+.3f})"
    assert simulator.interval([0.013], ".1%") == "+1.3%"


def test_the_table_has_differences_and_scales_seconds() -> None:
    real = {"steps": 100.0, "idle by counts": 0.5, "idle": 0.4, "median s": 2.0}
    ours = {"steps": 102.0, "idle by counts": 0.51, "idle": 0.38, "median s": 1.0}
    both = {"real": real, "simulated": ours}
    row = simulator.table({"sorted": [both, both]}, factor=2.1)[-1]
    assert row.startswith("| sorted | 2 | 100 | +2.0% (+2.0% to +2.0%) | 50.0% | +1.0 (+1.0 to +1.0) |")
    assert row.endswith("| 40.0% | -2.0 (-2.0 to -2.0) | 2.00 | +5.0% (+5.0% to +5.0%) |")
