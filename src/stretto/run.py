"""One training run: its parts, wired, and how it begins, goes on and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.assemble import Inputs, make_drafter, make_engine, sampling_params
from stretto.buffer import Ledger
from stretto.config import Config
from stretto.controller import Controller
from stretto.drafting import restore_drafter, with_step_ms
from stretto.evaluation import Evaluation, evaluate
from stretto.fleet.in_process import InProcessFleet
from stretto.history.log import read_rollouts
from stretto.learn.learner import Learner
from stretto.model import load_model
from stretto.observe.progress import Reporter
from stretto.observe.trackers import Trackers, open_trackers
from stretto.recorder import Recorder
from stretto.records import Rollout
from stretto.run_folder import RunFolder
from stretto.runtime import LiveRuntime
from stretto.schedule import make_schedule
from stretto.tasks.grading import Grader
from stretto.tasks.prompts import PromptStream
from stretto.tasks.workers import RewardWorkers


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `before` and `after` are its evaluations' metrics, None where there was none."""

    folder: Path
    steps: int  # optimiser steps made, over all resumes
    interrupted: bool
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


class Run:
    """The parts of one run, wired."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        earlier: list[Rollout],
        workers: RewardWorkers,
        runtime: LiveRuntime,
        folder: RunFolder,
        reporter: Reporter,
        stack: ExitStack,
    ) -> None:
        self.inputs, self.earlier, self.workers = inputs, earlier, workers
        self.runtime, self.folder, self.reporter = runtime, folder, reporter
        self.model = load_model(config.model)
        self.config = config = with_step_ms(config, self.model, inputs.max_model_len, reporter)
        self.schedule = make_schedule(config.schedule)
        shared = not self.schedule.overlaps and config.fleet.weights != "copy"
        engine_model = self.model if shared else load_model(config.model)
        self.learner = Learner(
            self.model,
            config.learner,
            sampling=config.sampling,
            total_steps=config.steps,
            post=runtime.post,
            lora=config.model.lora,
            weights="shared" if shared else "copy",
            deterministic=config.deterministic,
            seed=config.seed,
        )
        self.ledger = Ledger(
            sampling_params(config, inputs.tokenizer),
            seed=config.seed,
            multi_turn=workers.multi_turn,
            max_model_len=inputs.max_model_len,
            refresh=config.reuse.refresh if config.reuse.kind == "noise" else 1.0,
            now=runtime.now,
        )
        self.drafter = make_drafter(config, runtime.now)
        engine = make_engine(
            config, engine_model, inputs.tokenizer, inputs.max_model_len, runtime.now, self.drafter
        )
        self.fleet = InProcessFleet([engine], runtime.post)
        stack.callback(self.fleet.close)
        self.stream = PromptStream(inputs.train, seed=config.seed, shuffle=config.data.shuffle)
        trackers = open_trackers(config, folder.path, reporter.message)
        stack.callback(trackers.close)
        self.recorder = self._make_recorder(trackers)
        stop = config.reward.on_error == "stop"
        self.grader = Grader(workers, inputs.tokenizer, runtime.post, stop_on_error=stop)
        runtime.local, runtime.expecting = self.fleet, lambda: self.grader.outstanding > 0
        self.unanswered: list[Rollout] = []

    def _make_recorder(self, trackers: Trackers) -> Recorder:
        return Recorder(
            self.config,
            self.folder,
            self.runtime,
            self.ledger,
            self.schedule,
            self.fleet,
            self.stream,
            self.workers,
            self._save,
            self.reporter,
            trackers,
            self._evaluate if self.inputs.test else None,
            self.drafter,
        )

    def begin(self) -> None:
        """Step 0: the evaluation before the first update."""
        if self.drafter is not None:
            self.drafter.remember(self.earlier)
        self.recorder.begin()

    def restore(self, step: int | None, eval_changed: Sequence[str]) -> None:
        """Back to the newest checkpoint; what is later is written again.

        `eval_changed` are keys whose change makes accuracies from before incomparable with those to come.
        """
        checkpoint = self.folder.newest_checkpoint(step)
        if checkpoint is None:
            self.folder.rewind(-1)
            self.reporter.message(f"{self.folder.path} has no checkpoint yet: it starts from the beginning")
            self.begin()
            return
        state = checkpoint.state
        self.learner.load(checkpoint.folder)
        in_flight = read_rollouts(self.folder.log_file("in_flight", checkpoint.step), self.inputs.train)
        self.unanswered = self.ledger.load_state_dict(state["ledger"], in_flight)
        self.stream.load_state_dict(state["prompts"])
        self.schedule.load_state_dict(state["schedule"])
        if self.drafter is not None:
            self.drafter.remember(self.earlier)
            restore_drafter(self.drafter, self.config, self.folder, checkpoint, self.stream.epoch)
        # Only now is anything removed: what is wrong with data or checkpoint has been said above.
        self.folder.rewind(checkpoint.step)
        best = state["best"]
        if best and best[1] in self.folder.checkpoint_steps():  # else a later one replaced it, and is rewound
            self.recorder.best = (None if eval_changed else best[0], best[1])
        self.runtime.continue_from(state["elapsed"])
        self.reporter.message(f"goes on from step {checkpoint.step}")
        self.recorder.resumed(state["owed"])
        self.fleet.load(self.learner.publish(), [0], "continue")
        self.fleet.step()  # takes the weights; the worker then comes up with them

    def go(self) -> RunResult:
        """The loop, to its end."""
        controller = Controller(
            self.runtime,
            self.ledger,
            self.schedule,
            self.fleet,
            _Progress(self.grader, self.ledger, self.reporter),
            self.stream,
            self.learner,
            self.recorder,
        )
        self.grader.submit(self.unanswered)
        controller.run(lambda: self.recorder.interrupted or self.ledger.version >= self.config.steps)
        interrupted = controller.interrupted or self.recorder.interrupted
        if interrupted:
            saved = self.recorder.checkpoint()
            at = f"step {self.ledger.version} is saved" if saved else "no step was finished"
            self.reporter.message(f"interrupted: {at}; go on with `stretto resume {self.folder.path}`")
        lines = self.folder.metrics()
        evaluated = [line for line in lines if "eval/accuracy" in line]
        return RunResult(
            self.folder.path,
            self.ledger.version,
            interrupted,
            before=evaluated[0] if evaluated else None,
            after=evaluated[-1] if evaluated and evaluated[-1]["step"] > 0 else None,
        )

    def _save(self, folder: Path) -> None:
        self.learner.save(folder)
        self.inputs.tokenizer.save_pretrained(folder)

    def _evaluate(self) -> Evaluation:
        return evaluate(
            self.model,
            self.inputs.tokenizer,
            self.inputs.test,
            self.workers,
            self.config,
            max_model_len=self.inputs.max_model_len,
            progress=self.reporter.rollout,
        )


class _Progress:
    """Tells the reporter how far a step's generation is, once per turn of the loop."""

    def __init__(self, grader: Grader, ledger: Ledger, reporter: Reporter) -> None:
        self._grader = grader
        self._ledger = ledger
        self._reporter = reporter
        self._version = -1
        self._before = 0  # tokens generated before this step

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        self._grader.submit(rollouts)
        if self._ledger.version != self._version:
            self._version, self._before = self._ledger.version, self._ledger.generated_tokens
        tokens = self._ledger.generated_tokens - self._before
        self._reporter.rollout(len(self._ledger.scored), self._ledger.alive, tokens)
