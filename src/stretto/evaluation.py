"""Evaluation: the same loop, ledger and engine as training, over held-out rows, once.

Keys carry the purpose "eval" and visit 0, so every evaluation of a run draws the same noise: two
evaluations of the same weights agree token for token, and a difference between two checkpoints is less
noisy than two fresh draws. It is the embedded engine's affair, whatever `engine.kind` is: it has the learner's own
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stretto.assemble import sampling_params
from stretto.buffer import Ledger
from stretto.config import Config
from stretto.controller import Controller
from stretto.engines import make_engine
from stretto.fleet.in_process import InProcessFleet
from stretto.observe.metrics import evaluation_metrics
from stretto.records import Prompt, Purpose, Rollout, UpdateBatch, Updated
from stretto.runtime import LiveRuntime
from stretto.schedule.one_pass import OnePass
from stretto.tasks.grading import Grader
from stretto.tasks.workers import RewardWorkers
from stretto.weights import WeightsRef


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found; `rollouts` in order of the rows, sample after sample."""

    rollouts: list[Rollout]
    seconds: float
    interrupted: bool  # by SIGINT or SIGTERM: not all rows were answered

    def metrics(self) -> dict[str, float]:
        """`observe.metrics.evaluation_metrics` under the prefix `eval/`, for metrics.jsonl."""
        found = evaluation_metrics(self.rollouts)
        return {f"eval/{name}": value for name, value in found.items()} | {"eval/seconds": self.seconds}


class _Rows:
    """The held-out rows, once."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def next(self, count: int) -> list[tuple[Prompt, int]]:
        return [(prompt, 0) for prompt in self._prompts[:count]]


class _NoLearner:
    """Evaluation neither learns nor records steps."""

    def begin(self, batch: UpdateBatch) -> None:
        raise AssertionError("an evaluation has no update batches")

    def accumulate(self, batch: UpdateBatch) -> None:
        raise AssertionError("an evaluation has no update batches")

    def publish(self) -> WeightsRef:
        raise AssertionError("an evaluation publishes no weights")

    def harvested(self, batch: UpdateBatch) -> None: ...

    def updated(self, event: Updated) -> None: ...

    def publishing(self) -> None: ...

    def published(self) -> None: ...


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    rewards: RewardWorkers,
    config: Config,
    *,
    ends: Sequence[int],
    max_model_len: int,
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> Evaluation:
    """Answer every prompt `config.eval.samples` times with the model as it is, and score the answers.

    `ends` and `max_model_len` are those of `Inputs`. `progress(done, total, tokens)` is called as responses finish.
    """
    runtime = LiveRuntime()
    sampling = sampling_params(config, ends, temperature=config.eval.temperature)
    ledger = Ledger(
        sampling,
        seed=config.seed,
        purpose=Purpose.EVAL,
        multi_turn=rewards.multi_turn,
        max_model_len=max_model_len,
        now=runtime.now,
    )
    without = config.history.model_copy(update={"alternatives": 0})  # nobody drafts from these answers
    config = config.model_copy(update={"history": without})
    engine = make_engine(config, model, tokenizer, max_model_len, runtime.now)
    fleet = InProcessFleet([engine], runtime.post)
    grader = Grader(rewards, tokenizer, runtime.post)
    runtime.local, runtime.expecting = fleet, lambda: grader.outstanding > 0
    total = len(prompts) * config.eval.samples
    nothing = _NoLearner()
    controller = Controller(
        runtime,
        ledger,
        OnePass(len(prompts), config.eval.samples),
        fleet,
        grader,
        _Rows(prompts),
        nothing,
        nothing,
    )

    def done() -> bool:
        progress(len(ledger.scored), total, int(ledger.columns.length[: ledger.columns.size].sum()))
        return len(ledger.scored) == total

    with runtime.signals():
        controller.run(done)
    return Evaluation(ledger.take_finished(), runtime.now(), controller.interrupted)
