"""One of several processes of a TRL run: `torchrun ... trl_processes.py FOLDER BUDGET` writes what it generated."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stretto.integrations.trl import HistoryRollout
from tests.integrations.trl_runs import run


def main(folder: Path, budget: str) -> None:
    """Two processes of 6 completions each, 4 to a prompt: the second prompt's are divided between them."""
    rollout = HistoryRollout({"draft.budget": budget})
    ran = run(folder, rollout, per_device_train_batch_size=6, max_steps=6)
    rank = ran.trainer.accelerator.process_index
    found = {
        "completions": ran.completions(),
        "prompts": [output["prompt_ids"] for _, output in ran.calls],
        "tokens_per_step": ran.logged("stretto/tokens_per_step"),
        "weights": sum(float(p.double().sum()) for p in ran.weights().values()),
    }
    (folder / f"{budget}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
