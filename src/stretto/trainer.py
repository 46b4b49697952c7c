"""Training runs, put together from a configuration: the library's front door."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from stretto.assemble import (
    Inputs,
    available_cores,
    read_inputs,
    settle_process,
    with_fleet_changes,
    with_threads,
)
from stretto.config import (
    Config,
    check_resumable,
    difference,
    dump_toml,
    load_config,
    require_source,
    resume_warnings,
    warnings,
)
from stretto.drafting import find_earlier
from stretto.engines import check_engine
from stretto.errors import StrettoError
from stretto.evaluation import evaluate as evaluate_model
from stretto.fleet.ray_cluster import ray_for
from stretto.model import load_model
from stretto.observe.progress import Reporter, SilentReporter
from stretto.observe.trackers import require_trackers
from stretto.run import Run, RunResult
from stretto.run_folder import RunFolder
from stretto.runtime import LiveRuntime
from stretto.tasks.sources import reward_spec
from stretto.tasks.workers import RewardWorkers

Rewards = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]


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
        self.config = with_threads(config)  # as many on every machine where it is resumed
        self.data = data
        self.reward_functions = _as_list(reward)
        self.reporter = reporter or SilentReporter()
        self.path = Path(config.runs) / (config.name or time.strftime("%Y%m%d-%H%M%S"))
        self._resume_step: int | None = None
        self._resuming = False
        self._changed: list[str] = []  # keys that a resumed run has set anew
        self._finished = False  # before it goes on

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
        another run, or end it before where it goes on.
        """
        folder = Path(folder)
        with RunFolder.open(folder) as run:
            saved = load_config(run.path / "config.toml", saved=True)
            made = run.checkpoint_steps()
        wanted = load_config(run.path / "config.toml", with_fleet_changes(changes or {}), saved=True)
        check_resumable(saved, wanted)
        _require_steps_left(wanted.steps, made, step)
        trainer = cls(wanted, data=data, reward=reward, reporter=reporter)
        trainer.path, trainer._resuming, trainer._resume_step = folder, True, step
        trainer._changed = difference(saved, wanted)
        trainer._finished = step in (None, wanted.steps) and wanted.steps == max(made, default=0)
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
            check_engine(self.config)
            require_trackers(self.config)
            stack.enter_context(ray_for(self.config, available_cores()))
            inputs = read_inputs(self.config, self.data)
            spec = reward_spec(self.config.reward, inputs.data, self.reward_functions)
            earlier = find_earlier(self.config, inputs, resuming=self._resuming)
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
            changes = [*resume_warnings(self.config, self._changed), *self._nothing_to_do(inputs)]
            for warning in [*warnings(self.config), *changes, *inputs.warnings]:
                self.reporter.message(warning)
            if workers.multi_turn and self.config.deterministic:
                self.reporter.message(
                    "deterministic: a multi-turn task's environment answers in its own time, which decides what "
                    "runs beside what; the tokens are the same in float64 only"
                )
            try:
                run = Run(self.config, inputs, earlier, workers, runtime, folder, self.reporter, stack)
            except BaseException:
                if not self._resuming:
                    folder.discard()  # nothing has begun: the name stays free for a second try
                raise
            with runtime.signals():
                # What was changed or measured decides in a resumed run, too; a resume that fails changes nothing.
                if self._resuming:
                    run.restore(self._resume_step, self._changed)
                    folder.save_config(dump_toml(run.config))
                else:
                    folder.save_config(dump_toml(run.config))
                    run.begin()
                return run.go()

    def _nothing_to_do(self, inputs: Inputs) -> list[str]:
        """What the run will not do, to be said before it begins."""
        said = []
        if self._finished:
            longer = f"stretto resume {self.path} --steps {2 * self.config.steps}"
            said.append(f"the run has made all its {self.config.steps} steps; to train longer: {longer}")
        if self.config.eval.enabled and not inputs.test:
            said.append(
                "eval: there are no held-out rows, so nothing is evaluated; eval.path names a file of them"
            )
        return said


def _require_steps_left(steps: int, made: Sequence[int], step: int | None) -> None:
    """A run that goes on from a checkpoint, `step` or the newest of `made`, does not end before it."""
    begins = max(made, default=0) if step is None else step
    if steps >= begins or begins not in made:
        return
    earlier = max((s for s in made if s <= steps), default=None)
    back = f", or --step {earlier} to go back" if earlier is not None else ""
    had = f"the run has made {begins}" if step is None else f"it would go on from {begins}"
    raise StrettoError(f"steps = {steps}: {had}; use at least {begins}{back}")


def _as_list(reward: Rewards | None) -> list[Callable[..., Any] | str] | None:
    if reward is None:
        return None
    functions: Any = [reward] if isinstance(reward, str) or callable(reward) else reward
    if not isinstance(functions, Sequence) or not all(isinstance(f, str) or callable(f) for f in functions):
        raise StrettoError(f"reward is {reward!r}: expected a function, the name of one, or a list of those")
    return list(functions)


def _encoder(inputs: Inputs) -> Callable[[str], list[int]]:
    return lambda text: list(inputs.tokenizer(text, add_special_tokens=False)["input_ids"])


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
                ends=inputs.ends,
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
