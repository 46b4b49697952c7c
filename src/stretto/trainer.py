"""Training runs, put together from a configuration: the library's front door."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stretto.assemble import (
    Inputs,
    available_cores,
    make_engine,
    read_inputs,
    sampling_params,
    settle_process,
)
from stretto.buffer import Ledger
from stretto.config import Config, check_resumable, dump_toml, load_config, require_source, warnings
from stretto.controller import Controller
from stretto.errors import StrettoError
from stretto.evaluation import Evaluation
from stretto.evaluation import evaluate as evaluate_model
from stretto.fleet.in_process import InProcessFleet
from stretto.history.log import read_rollouts
from stretto.learn.learner import Learner
from stretto.model import load_model
from stretto.observe.progress import Reporter, SilentReporter
from stretto.observe.trackers import open_trackers
from stretto.recorder import Recorder
from stretto.records import Rollout
from stretto.run_folder import RunFolder
from stretto.runtime import LiveRuntime
from stretto.schedule import make_schedule
from stretto.tasks.grading import Grader
from stretto.tasks.prompts import PromptStream
from stretto.tasks.sources import reward_spec
from stretto.tasks.workers import RewardWorkers

Rewards = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `before` and `after` are its evaluations' metrics, None where there was none."""

    folder: Path
    steps: int  # optimiser steps made, over all resumes
    interrupted: bool
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


def train(
    model: str | Path | None = None,
    data: Any = None,
    reward: Rewards | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    reporter: Reporter | None = None,
) -> RunResult:
    """Train a model by RL; without arguments, the demo.

    Args:
        model: a folder or hub name; stands in for `config.model.path`.
        data: a file's path, a list of dicts, a Hugging Face data set, or a task; stands in for `config.data`.
        reward: one function or several, in TRL's or verl's form or Stretto's own, or names of built-in ones.
        config: the rest, as a `Config`, a nested or dotted mapping, a TOML file or a preset's name.
        reporter: is told of the progress; the default says nothing.

    Raises:
        StrettoError: for bad input, before anything is loaded or overwritten.
    """
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model.path"] = str(model)
    if isinstance(data, (str, Path)):
        changes["data.path"], data = str(data), None
    if isinstance(config, Config):
        config = config.model_dump()
    elif config is None and (changes or data is not None):
        config = {}  # not the demo: something of the caller's own is to be trained
    resolved = load_config(config, changes)
    return Trainer(resolved, data=data, reward=reward, reporter=reporter).run()


class Trainer:
    """One run: new, or `Trainer.resume(folder)`. `data` and `reward` as in `train`."""

    def __init__(
        self,
        config: Config,
        *,
        data: Any = None,
        reward: Rewards | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        # Pinned, so that a resumed run has as many on another machine too: sums depend on it.
        self.config = config.model_copy(update={"threads": config.threads or available_cores()})
        self.data = data
        self.reward_functions = _as_list(reward)
        self.reporter = reporter or SilentReporter()
        self.path = Path(config.runs) / (config.name or time.strftime("%Y%m%d-%H%M%S"))
        self._resume_step: int | None = None
        self._resuming = False

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        changes: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        data: Any = None,
        reward: Rewards | None = None,
        reporter: Reporter | None = None,
    ) -> Self:
        """Go on from the run's newest checkpoint, or that of `step`, or, where it has none yet, from its
        beginning.

        What was given as Python objects must be given again. Raises StrettoError if `changes` would make it
        another run.
        """
        folder = Path(folder)
        with RunFolder.open(folder) as run:
            saved = load_config(run.path / "config.toml")
        wanted = load_config(run.path / "config.toml", changes or {})
        check_resumable(saved, wanted)
        trainer = cls(wanted, data=data, reward=reward, reporter=reporter)
        trainer.path, trainer._resuming, trainer._resume_step = folder, True, step
        return trainer

    def run(self) -> RunResult:
        """Train to `config.steps`, or until SIGINT or SIGTERM; either way the folder can be resumed."""
        with ExitStack() as stack:
            stack.callback(self.reporter.close)
            settle_process(self.config)
            if self.data is None:
                require_source(self.config)
            if not self._resuming:
                RunFolder.require_free(self.path)  # said before anything is loaded
            inputs = read_inputs(self.config, self.data)
            spec = reward_spec(self.config.reward, inputs.data, self.reward_functions)
            runtime = LiveRuntime()
            workers = stack.enter_context(
                RewardWorkers(spec, self.config.reward, runtime.post, _encoder(inputs))
            )
            folder = stack.enter_context(
                RunFolder.open(self.path, writable=True)
                if self._resuming
                else RunFolder.create(self.path, dump_toml(self.config))
            )
            self.reporter.start(self.config, self.config.steps, str(self.path))
            for warning in [*warnings(self.config), *inputs.warnings]:
                self.reporter.message(warning)
            if workers.multi_turn and self.config.deterministic:
                self.reporter.message(
                    "deterministic: a multi-turn task's environment answers in its own time, which decides what "
                    "runs beside what; the tokens are the same in float64 only"
                )
            try:
                run = _Run(self.config, inputs, workers, runtime, folder, self.reporter, stack)
            except BaseException:
                if not self._resuming:
                    folder.discard()  # nothing has begun: the name stays free for a second try
                raise
            with runtime.signals():
                run.restore(self._resume_step) if self._resuming else run.begin()
                return run.go()


def _as_list(reward: Rewards | None) -> list[Callable[..., Any] | str] | None:
    if reward is None:
        return None
    return [reward] if isinstance(reward, str) or callable(reward) else list(reward)


def _encoder(inputs: Inputs) -> Callable[[str], list[int]]:
    return lambda text: list(inputs.tokenizer(text, add_special_tokens=False)["input_ids"])


class _Run:
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
        self.config, self.inputs, self.workers = config, inputs, workers
        self.runtime, self.folder, self.reporter = runtime, folder, reporter
        self.schedule = make_schedule(config.schedule)
        shared = not self.schedule.overlaps and config.fleet.weights != "copy"
        self.model = load_model(config.model)
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
            now=runtime.now,
        )
        engine = make_engine(config, engine_model, inputs.tokenizer, inputs.max_model_len, runtime.now)
        self.fleet = InProcessFleet([engine], runtime.post)
        stack.callback(self.fleet.close)
        self.stream = PromptStream(inputs.train, seed=config.seed, shuffle=config.data.shuffle)
        trackers = open_trackers(config, folder.path, reporter.message)
        stack.callback(trackers.close)
        self.recorder = Recorder(
            config,
            folder,
            runtime,
            self.ledger,
            self.schedule,
            self.fleet,
            self.stream,
            workers,
            self._save,
            reporter,
            trackers,
            self._evaluate if inputs.test else None,
        )
        stop = config.reward.on_error == "stop"
        self.grader = Grader(workers, inputs.tokenizer, runtime.post, stop_on_error=stop)
        runtime.local, runtime.expecting = self.fleet, lambda: self.grader.outstanding > 0
        self.unanswered: list[Rollout] = []

    def begin(self) -> None:
        """Step 0: the evaluation before the first update."""
        self.recorder.begin()

    def restore(self, step: int | None) -> None:
        """Back to the newest checkpoint; what is later is written again."""
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
        # Only now is anything removed: what is wrong with data or checkpoint has been said above.
        self.folder.rewind(checkpoint.step)
        best = state["best"]
        if best and best[1] in self.folder.checkpoint_steps():  # else a later one replaced it, and is rewound
            self.recorder.best = (best[0], best[1])
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
        return evaluate_model(
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


def evaluate(
    config: Config,
    *,
    run: Path | None = None,
    checkpoint: str = "latest",
    reporter: Reporter | None = None,
    data: Any = None,
    reward: Rewards | None = None,
) -> dict[str, Any]:
    """Evaluate `config.model`, or a checkpoint of the run folder `run`: initial, latest, best or step-N.

    Returns the metrics of `observe.metrics.evaluation_metrics` under `eval/`, as the run itself logs them.
    """
    reporter = reporter or SilentReporter()
    settle_process(config)
    inputs = read_inputs(config, data)
    if not inputs.test:
        raise StrettoError(
            "eval: there are no held-out rows; name a file with --eval.path, or enable evaluation and a test split"
        )
    spec = reward_spec(config.reward, inputs.data, _as_list(reward))
    model_config = config.model
    if run is not None and checkpoint != "initial":
        folder = _checkpoint_folder(run, checkpoint)
        model_config = config.model.model_copy(update={"path": str(folder), "tokenizer": None})
    with RewardWorkers(spec, config.reward, lambda event: None, _encoder(inputs)) as workers:
        model = load_model(model_config)
        try:
            found = evaluate_model(
                model,
                inputs.tokenizer,
                inputs.test,
                workers,
                config,
                max_model_len=inputs.max_model_len,
                progress=reporter.rollout,
            )
        finally:
            reporter.close()
    if found.interrupted:
        raise KeyboardInterrupt
    return found.metrics()


def _checkpoint_folder(run: Path, name: str) -> Path:
    folder = RunFolder.open(run)
    steps = folder.checkpoint_steps()
    if name in ("latest", "best"):
        link = folder.path / name
        if not link.exists():
            raise StrettoError(f"{run} has no {name} checkpoint yet; it has steps {steps or 'none'}")
        return link.resolve()
    step = int(name.removeprefix("step-"))
    if step not in steps:
        raise StrettoError(f"{run} has no checkpoint of step {step}; it has {steps or 'none'}")
    return folder.checkpoint_folder(step)
