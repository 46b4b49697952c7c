"""One training run: its parts, wired, and how it begins, goes on and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.assemble import Inputs, drafts, make_drafter, make_engine, measure_steps, sampling_params
from stretto.buffer import Ledger
from stretto.config import Config, dump_toml
from stretto.controller import Controller
from stretto.draft.drafter import HistoryDrafter
from stretto.errors import StrettoError
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
        workers: RewardWorkers,
        runtime: LiveRuntime,
        folder: RunFolder,
        reporter: Reporter,
        stack: ExitStack,
    ) -> None:
        self.inputs, self.workers = inputs, workers
        self.runtime, self.folder, self.reporter = runtime, folder, reporter
        self.model = load_model(config.model)
        self.config = config = self._with_step_ms(config)
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
        self.eval_drafter = make_drafter(config, runtime.now) if inputs.test else None
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

    def _with_step_ms(self, config: Config) -> Config:
        """With `draft.step_ms` measured, where drafting needs it and it isn't set."""
        if not drafts(config) or config.draft.step_ms is not None:
            return config
        self.reporter.message("measuring the engine's steps, which decides how much is drafted")
        measured = measure_steps(self.model, self.inputs.max_model_len, self.runtime.now)
        config = config.model_copy(update={"draft": config.draft.model_copy(update={"step_ms": measured})})
        self.folder.save_config(dump_toml(config))  # kept, so that a resumed run decides alike
        return config

    def begin(self) -> None:
        """Step 0: the evaluation before the first update."""
        if self.drafter is not None and self.config.history.warm_from is not None:
            self._warm(self.drafter, Path(self.config.history.warm_from))
        self.recorder.begin()

    def _warm(self, drafter: HistoryDrafter, path: Path) -> None:
        """Take another run's responses to the same prompts as history."""
        other = RunFolder.open(path)
        rollouts = [
            r for step in other.log_steps("consumed") for r in read_rollouts(other.log_file("consumed", step))
        ]
        ours = {prompt.uid for prompt in self.inputs.train}
        known = [rollout for rollout in rollouts if rollout.prompt.uid in ours]
        if not known:
            raise StrettoError(
                f"history.warm_from: none of the {len(rollouts)} responses in {path} answers one of these prompts "
                "(other data, another tokenizer, or another chat template)"
            )
        for rollout in known:
            rollout.visit -= 1 << 20  # older than any visit of this run
        drafter.remember(known)

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
        self._restore_drafter(checkpoint.step, state["draft"])
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

    def _restore_drafter(self, step: int, state: Mapping[str, Any] | None) -> None:
        """The drafter as it was at checkpoint `step`: its histories from the log, the newest visits only."""
        if self.drafter is None:
            return
        if state is not None and state["budget_kind"] == self.config.draft.budget:
            self.drafter.load_state_dict(state)
        oldest = self.stream.epoch - self.config.history.window
        logs: list[list[Rollout]] = []
        for at in range(step, 0, -1):
            rollouts = read_rollouts(self.folder.log_file("consumed", at))
            logs.append([rollout for rollout in rollouts if rollout.visit >= oldest])
            if not logs[-1]:
                break
        for rollouts in reversed(logs):
            self.drafter.remember(rollouts)

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
        found = evaluate(
            self.model,
            self.inputs.tokenizer,
            self.inputs.test,
            self.workers,
            self.config,
            max_model_len=self.inputs.max_model_len,
            progress=self.reporter.rollout,
            drafter=self.eval_drafter,
        )
        if self.eval_drafter is not None:
            self.eval_drafter.remember(replace(r, visit=self.ledger.version) for r in found.rollouts)
        return found


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
