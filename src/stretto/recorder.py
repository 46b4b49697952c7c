"""What a run leaves behind: metrics, logs, checkpoints, evaluations, written at the boundaries between steps.

The recorder is the controller's observer: it is told, it decides nothing. At a boundary it writes, in this
order, the logs of the step, its line of metrics, and the checkpoint that builds on them; a crash in between
is rewound on resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.buffer import Ledger
from stretto.config import Config
from stretto.evaluation import Evaluation
from stretto.fleet import Fleet
from stretto.observe.metrics import Generation, Seconds, step_metrics
from stretto.observe.progress import Reporter
from stretto.observe.timeline import Timeline
from stretto.observe.trackers import Trackers
from stretto.records import Interrupted, Loaded, Rollout, UpdateBatch, Updated
from stretto.run_folder import RunFolder
from stretto.runtime import Runtime
from stretto.schedule import Schedule
from stretto.tasks.prompts import PromptStream
from stretto.tasks.workers import RewardWorkers


@dataclass(slots=True)
class Boundary:
    """Everything that a checkpoint of this moment needs besides the learner's own state."""

    step: int
    in_flight: list[Rollout]
    state: dict[str, Any]


@dataclass(slots=True)
class _Clock:
    """Moments of the step in hand, in seconds of the runtime's clock."""

    began: float = 0.0  # the previous update's end, or the run's begin
    resumed: float = 0.0  # when that boundary's writing was done
    harvested: float = 0.0
    last_finished: float = 0.0
    published: float = 0.0
    sync: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)  # the ledger's, at the previous boundary


class Recorder:
    """Observer of one training run.

    `save(folder)` writes the policy and the learner's state, `evaluate()` runs an evaluation of the weights
    as they are.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        runtime: Runtime,
        ledger: Ledger,
        schedule: Schedule,
        fleet: Fleet,
        stream: PromptStream,
        workers: RewardWorkers,
        save: Callable[[Path], None],
        reporter: Reporter,
        trackers: Trackers,
        evaluate: Callable[[], Evaluation] | None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.runtime = runtime
        self.ledger = ledger
        self.schedule = schedule
        self.fleet = fleet
        self.stream = stream
        self.workers = workers
        self._save = save
        self.reporter = reporter
        self.trackers = trackers
        self._evaluate = evaluate
        self.timeline = Timeline(folder.path / "timeline.json")
        self.boundary: Boundary | None = None
        self.best: tuple[float, int] | None = None  # accuracy, step
        self._batch: UpdateBatch | None = None
        self._clock = _Clock()

    # ---- what the controller tells ------------------------------------------------------------------

    def harvested(self, batch: UpdateBatch) -> None:
        self._batch = batch
        self._clock.harvested = self.runtime.now()
        self._clock.last_finished = max(r.finished_at for r in batch.rollouts)

    def published(self) -> None:
        self._clock.published = self.runtime.now()

    def loaded(self, event: Loaded) -> None:
        self._clock.sync += self.runtime.now() - self._clock.published

    def updated(self, event: Updated) -> None:
        """The boundary of step `event.version`: write it all down."""
        assert self._batch is not None
        step, arrived = event.version, self.runtime.now()
        metrics = self._metrics(self._batch, event)
        self.reporter.step(metrics)
        finished = self.ledger.take_finished()
        self.folder.log_step(step, finished, self._batch.rollouts)
        last = step >= self.config.steps
        every = self.config.eval.every
        if self._evaluate and (last or (every and step % every == 0)):
            metrics |= self.evaluation(step)
        self.folder.append_metrics(metrics)
        self.trackers(step, metrics)
        self.boundary = self._boundary(step)
        if (
            last
            or step % self.config.checkpoint.every == 0
            or self.best == (metrics.get("eval/accuracy"), step)
        ):
            self.checkpoint()
        self._batch = None
        self._spans(step, arrived)
        self._clock = _Clock(began=arrived, resumed=self.runtime.now(), counters=self._counters())

    # ---- writing ------------------------------------------------------------------------------------

    def begin(self, metrics: Mapping[str, float]) -> None:
        """A new run: its line for step 0, if an evaluation was made."""
        self.timeline.create()
        if metrics:
            self.folder.append_metrics({"step": 0, "version": 0, **metrics})
            self.trackers(0, metrics)
        self._clock = _Clock(began=self.runtime.now(), resumed=self.runtime.now(), counters=self._counters())

    def resumed(self) -> None:
        """The run goes on from a checkpoint: what was restored counts as the boundary."""
        self.timeline.rewind(self.runtime.now())
        self.boundary = self._boundary(self.ledger.version)
        self._clock = _Clock(began=self.runtime.now(), resumed=self.runtime.now(), counters=self._counters())

    def evaluation(self, step: int) -> dict[str, float]:
        """Evaluate, tell, remember the best; an interrupted one counts for nothing."""
        assert self._evaluate is not None
        began = self.runtime.now()
        evaluation = self._evaluate()
        self.timeline.span("evaluation", f"evaluation {step}", began, self.runtime.now(), step=step)
        if evaluation.interrupted:
            self.runtime.post(Interrupted(0))
            return {}
        metrics = evaluation.metrics()
        self.reporter.evaluation(f"step {step}", metrics)
        if step > 0 and (self.best is None or metrics["eval/accuracy"] > self.best[0]):
            self.best = (metrics["eval/accuracy"], step)
        return metrics

    def checkpoint(self) -> Path | None:
        """Save the last boundary, unless that has been done or there is none yet. Returns the folder."""
        boundary = self.boundary
        if boundary is None:
            return None
        folder = self.folder.checkpoint_folder(boundary.step)
        if not folder.exists():
            self.folder.save_checkpoint(boundary.step, self._save, boundary.in_flight, boundary.state)
            self.folder.prune(self.config.checkpoint.keep, self.best[1] if self.best else None)
        return folder

    def _boundary(self, step: int) -> Boundary:
        state = {
            "ledger": self.ledger.state_dict(),
            "prompts": self.stream.state_dict(),
            "schedule": self.schedule.state_dict(),
            "elapsed": self.runtime.now(),
            "best": self.best,
        }
        return Boundary(step, self.ledger.in_flight(), state)

    def _spans(self, step: int, updated: float) -> None:
        clock = self._clock
        self.timeline.span("rollout", f"rollout {step}", clock.resumed, clock.last_finished, step=step)
        self.timeline.span(
            "rewards", f"waiting for rewards {step}", clock.last_finished, clock.harvested, step=step
        )
        self.timeline.span("learner", f"update {step}", clock.harvested, updated, step=step)
        self.timeline.span(
            "sync", f"weights {step - 1}", clock.published, clock.published + clock.sync, step=step
        )
        self.timeline.span("files", f"boundary {step}", updated, self.runtime.now(), step=step)
        self.timeline.flush()

    # ---- figures ------------------------------------------------------------------------------------

    def _counters(self) -> dict[str, float]:
        return dict(self.ledger.counters)

    def _metrics(self, batch: UpdateBatch, event: Updated) -> dict[str, float]:
        clock, now = self._clock, self.runtime.now()
        engine = self.fleet.metrics()
        counters = {name: value - clock.counters.get(name, 0) for name, value in self._counters().items()}
        waited = max(0.0, clock.harvested - max(clock.last_finished, clock.resumed))
        generating = clock.harvested - clock.resumed
        slots = sum(self.ledger.slots.values())
        return step_metrics(
            batch,
            step=event.version,
            epoch=self.stream.metrics()["epoch"],
            seconds=Seconds(
                rollout=generating - clock.sync - waited,
                reward=waited,
                update=now - clock.harvested,
                sync=clock.sync,
                total=now - clock.began,
            ),
            generation=Generation(
                busy=engine["busy_slot_seconds"],
                # In this process nothing is generated while the learner or the recorder is at work.
                available=slots * generating,
                discarded_tokens=int(counters["discarded_tokens"]),
                reverified_tokens=int(engine.get("reverified_tokens", 0)),
                decoded_tokens=int(engine["decode_tokens"]),
                decoding_steps=int(engine["decode_tokens"]),
                reward_errors=int(counters["reward_errors"]),
                reward_timeouts=int(counters["reward_timeouts"]),
                extra=self.schedule.metrics() | self.workers.metrics(),
            ),
            learner=event.metrics,
        )
