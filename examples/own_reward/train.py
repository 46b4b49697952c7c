"""The same as config.toml, from Python: python examples/own_reward/train.py"""

from __future__ import annotations

from pathlib import Path

from reward import brief

import stretto

result = stretto.train(
    model="demo",
    data=Path(__file__).with_name("puzzles.jsonl"),
    reward=brief,
    config={
        "steps": 8,
        "sampling": {"max_new_tokens": 256},
        "schedule": {"prompts": 8, "samples": 8},
        "learner": {"learning_rate": 2e-4},
        "eval": {"enabled": False},
    },
)
print(f"stretto show {result.folder}")
