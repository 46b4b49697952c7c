"""Short runs of TRL's `GRPOTrainer` with the demo model and its task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from stretto.integrations.trl import HistoryRollout
from stretto.model import location
from stretto.tasks.knights import KnightsAndKnaves

TASK = KnightsAndKnaves(size=8, test_size=4)
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # so that a puzzle's prompt is the same as its text

# Drafts whatever they cost, so that what is tested does not depend on this machine's speed.
DRAFTED = {"draft.budget": "fixed", "draft.nodes": 6}


def right(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """The task's reward, in TRL's form; of texts or of messages."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [TASK.score(text, {"answer": a}) for text, a in zip(texts, answer, strict=True)]


def brief(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Fewer tokens are better."""
    return [-len(ids) / 100 for ids in completion_ids]


def rows(split: str, chat: bool = False) -> Dataset:
    found = TASK.rows(split)
    if chat:
        found = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in found]
    return Dataset.from_list(found)


@dataclass
class Ran:
    """What a run left, or is about to: `trainer.train()` has not been called."""

    trainer: Any
    rollout: HistoryRollout | None
    calls: list[tuple[bool, dict[str, Any]]] = field(default_factory=list)  # in training, what was returned

    def completions(self, training: bool = True) -> list[list[list[int]]]:
        return [output["completion_ids"] for was, output in self.calls if was == training]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}

    def logged(self, name: str) -> list[Any]:
        return [line[name] for line in self.trainer.state.log_history if name in line]


def prepare(
    folder: Path,
    rollout: HistoryRollout | None,
    *,
    rewards: Callable[[Any], Any] = lambda functions: functions,
    chat: bool = False,
    dtype: torch.dtype = torch.float64,
    model: Any = None,
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> Ran:
    """A trainer of 4 prompts x 4 samples a step, two steps a visit of the 8 puzzles."""
    tokenizer = AutoTokenizer.from_pretrained(location("demo"))
    if chat:
        tokenizer.chat_template = CHAT
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(location("demo"), dtype=dtype)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 24,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    ran = Ran(None, rollout)

    def listening(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        assert rollout is not None
        output = rollout(prompts, trainer)
        ran.calls.append((trainer.model.training, output))
        return output

    ran.trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards([right, brief]),
        args=GRPOConfig(**settings | changes),
        train_dataset=rows("train", chat),
        eval_dataset=rows("test", chat),
        processing_class=tokenizer,
        rollout_func=None if rollout is None else listening,
        **trainer or {},
    )
    return ran


def run(folder: Path, rollout: HistoryRollout | None, **settings: Any) -> Ran:
    """Trained to its end."""
    ran = prepare(folder, rollout, **settings)
    ran.trainer.train()
    return ran
