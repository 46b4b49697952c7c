"""One training run: its parts, wired, and how it begins, goes on and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stretto.assemble import (
    Inputs,
    learner_places,
    make_drafter,
    make_worker_fleet,
    sampling_params,
    with_fleet_threads,
)
from stretto.buffer import Ledger
from stretto.checkpoints import Checkpoint
from stretto.config import COMPARED, Config
from stretto.controller import Controller
from stretto.drafting import (
    Earlier,
    make_previous,
    restore_drafter,
    restore_histories,
    restore_lengths,
    with_step_ms,
)
from stretto.engine import Engine
from stretto.engine.vllm import VllmEngine
from stretto.engines import make_engine, make_separate_engine
from stretto.evaluation import Evaluation, evaluate
from stretto.fleet import Drafting, Fleet
from stretto.fleet.in_process import InProcessFleet
from stretto.fleet.workers import WorkerFleet
from stretto.history.lengths import LengthHistory
from stretto.history.log import read_rollouts
from stretto.learn.background import BackgroundLearner
from stretto.learn.learner import Learner
from stretto.learn.sharded import ShardedLearner
from stretto.model import load_model
from stretto.observe.progress import Reporter
from stretto.observe.trackers import Trackers, open_trackers
from stretto.recorder import Recorder
from stretto.records import Rollout
from stretto.resume import check_ends, check_prompts, check_tokenizer
from stretto.run_folder import RunFolder
from stretto.runtime import LiveRuntime
from stretto.schedule import ledger_options, make_schedule
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
        earlier: Earlier | None,
        workers: RewardWorkers,
        runtime: LiveRuntime,
        folder: RunFolder,
        reporter: Reporter,
        stack: ExitStack,
    ) -> None:
        self.inputs, self.earlier, self.workers = inputs, earlier, workers
        self.runtime, self.folder, self.reporter = runtime, folder, reporter
        self.model = load_model(config.model)
        config = with_fleet_threads(config)
        self.config = config = with_step_ms(config, self.model, inputs.max_model_len, reporter)
        self.lengths = LengthHistory()
        self.schedule = make_schedule(config.schedule, self.lengths)
        in_process = config.fleet.kind == "in_process"
        embedded = config.engine.kind == "embedded"
        shared = embedded and in_process and not self.schedule.overlaps and config.fleet.weights != "copy"
        self.learner = self._make_learner("shared" if shared else "copy", stack)
        self.previous = make_previous(config)
        self.ledger = self._make_ledger()
        self.grader = Grader(
            workers, inputs.tokenizer, runtime.post, stop_on_error=config.reward.on_error == "stop"
        )
        self.background: BackgroundLearner | None = None
        self.fleet: Fleet
        self.drafter: Drafting | None
        if in_process:
            self.fleet, self.drafter = self._engine_here(shared, stack)
        else:
            self.background = BackgroundLearner(self.learner, runtime.post, runtime.now)
            stack.callback(self.background.close)
            self.fleet, self.drafter = self._engines_in_processes(self.background)
        stack.callback(self.fleet.close)
        self.stream = PromptStream(inputs.train, seed=config.seed, shuffle=config.data.shuffle)
        trackers = open_trackers(config, folder.path, reporter.message)
        stack.callback(trackers.close)
        self.recorder = self._make_recorder(trackers)
        self.unanswered: list[Rollout] = []

    def _make_learner(self, weights: Literal["shared", "copy"], stack: ExitStack) -> Learner | ShardedLearner:
        config, post = self.config, self.runtime.post
        on_cluster = config.learner.place == "cluster"
        if config.learner.shards > 1 or on_cluster:
            self.reporter.message(f"{config.learner.shards} processes of the learner load the model")
            scratch = self.folder.path / "learner"
            places = learner_places(config) if on_cluster else None
            sharded = ShardedLearner(
                self.model, config, scratch=scratch, post=post, weights=weights, places=places
            )
            stack.callback(sharded.close)
            return sharded
        return Learner(
            self.model,
            config.learner,
            sampling=config.sampling,
            total_steps=config.steps,
            post=post,
            lora=config.model.lora,
            weights=weights,
            deterministic=config.deterministic,
            seed=config.seed,
        )

    def _make_ledger(self) -> Ledger:
        config = self.config
        return Ledger(
            sampling_params(config, self.inputs.ends),
            seed=config.seed,
            multi_turn=self.workers.multi_turn,
            max_model_len=self.inputs.max_model_len,
            refresh=config.reuse.refresh if config.reuse.kind == "noise" else 1.0,
            reuse=self.previous.reuse if self.previous is not None else None,
            now=self.runtime.now,
            **ledger_options(config.schedule),
        )

    def _engine_here(self, shared: bool, stack: ExitStack) -> tuple[Fleet, Drafting | None]:
        config, runtime, inputs = self.config, self.runtime, self.inputs
        drafter = make_drafter(config, runtime.now)
        rest = (inputs.tokenizer, inputs.max_model_len, runtime.now, drafter)
        engine: Engine = (
            make_engine(config, self.model, *rest) if shared else make_separate_engine(config, *rest)
        )
        if isinstance(engine, VllmEngine):
            # Left to the garbage collector, it would tear down vLLM's groups of whoever has them by then.
            stack.callback(engine.close)
        fleet = runtime.local = InProcessFleet([engine], runtime.post)
        runtime.expecting = lambda: self.grader.outstanding > 0
        return fleet, drafter

    def _engines_in_processes(self, learner: BackgroundLearner) -> tuple[Fleet, Drafting | None]:
        fleet, drafter = make_worker_fleet(
            self.config, self.inputs.max_model_len, self.runtime.post, self.folder.path / "weights"
        )

        def expecting() -> bool:
            # Both are asked every time, since they then say what has gone wrong.
            owes = [learner.expecting(), fleet.expecting()]
            return any(owes) or self.grader.outstanding > 0

        self.runtime.expecting = expecting
        return fleet, drafter

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
            self.previous,
            self.lengths,
            self.inputs.ends,
        )

    def begin(self) -> None:
        """Step 0: the evaluation before the first update."""
        self._remember_earlier()
        self._await_workers()
        self.recorder.begin()

    def _remember_earlier(self) -> None:
        if self.drafter is not None and self.earlier is not None:
            for rollouts in self.earlier:
                self.drafter.remember(rollouts)
        self.earlier = None  # the drafter has what it needs

    def _await_workers(self) -> None:
        """Their start belongs to no step, and neither does indexing what earlier ones said."""
        if self.drafter is not None:
            self.drafter.settle()
        if isinstance(self.fleet, WorkerFleet):
            self.reporter.message(f"{self.config.fleet.workers} workers load the model")
            self.fleet.wait_until_ready()

    def restore(self, step: int | None, changed: Sequence[str]) -> None:
        """Back to the newest checkpoint; what is later is written again. `changed` are keys with new values.

        Raises StrettoError, with nothing removed, if prompts, tokenizer or stop tokens are not those of the checkpoint.
        """
        checkpoint = self.folder.newest_checkpoint(step)
        if checkpoint is None:
            self.folder.rewind(-1)
            self.reporter.message(f"{self.folder.path} has no checkpoint yet: it starts from the beginning")
            self.begin()
            return
        state = checkpoint.state
        if {"model.path", "model.tokenizer"} & set(changed):
            check_tokenizer(checkpoint.folder, self.inputs)
        check_prompts(checkpoint, self.stream.fingerprint(), self.inputs, self.folder)
        unknown = check_ends(checkpoint, self.inputs, self.config.model.path)
        self.learner.load(checkpoint.folder)
        in_flight = read_rollouts(self.folder.log_file("in_flight", checkpoint.step), self.inputs.train)
        self.unanswered = self.ledger.load_state_dict(state["ledger"], in_flight)
        self.stream.load_state_dict(state["prompts"])
        self.schedule.load_state_dict(state["schedule"])
        self.runtime.continue_from(state["elapsed"])  # before anything is timed
        self._restore_history(checkpoint)
        # Only now is anything removed: what is wrong with data or checkpoint has been said above.
        self.folder.rewind(checkpoint.step)
        best = state["best"]
        if best and best[1] in self.folder.checkpoint_steps():  # else a later one replaced it, and is rewound
            comparable = not any(key in COMPARED for key in changed)
            self.recorder.best = (best[0] if comparable else None, best[1])
        self.reporter.message(f"goes on from step {checkpoint.step}")
        if unknown:
            self.reporter.message(unknown)
        self._await_workers()
        self.recorder.resumed(state["owed"])

    def _restore_history(self, checkpoint: Checkpoint) -> None:
        """What drafts, prefix reuse and predictions of lengths come from, as it was at the checkpoint."""
        restore_lengths(self.lengths, self.folder, checkpoint.step)
        if self.drafter is None and self.previous is None:
            return
        self._remember_earlier()
        if self.drafter is not None:
            restore_drafter(self.drafter, self.config, checkpoint)
        restore_histories(self.config, self.folder, checkpoint.step, self.drafter, self.previous)

    def go(self) -> RunResult:
        """The loop, to its end."""
        controller = Controller(
            self.runtime,
            self.ledger,
            self.schedule,
            self.fleet,
            _Progress(self.grader, self.ledger, self.reporter),
            self.stream,
            self.background or self.learner,
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
            ends=self.inputs.ends,
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
