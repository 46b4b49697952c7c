"""What a run leaves behind: metrics, logs, checkpoints, evaluations, written at the boundaries between steps.

The recorder is the controller's observer: it is told, it decides nothing. At a boundary it writes, in this
order, the logs of the step, its line of metrics, and the checkpoint that builds on them; a crash in between
is rewound on resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.buffer import Ledger
from stretto.config import Config
from stretto.evaluation import Evaluation
from stretto.fleet import Drafting, Fleet
from stretto.history.lengths import LengthHistory
from stretto.history.previous import PreviousVisits
from stretto.observe.metrics import Generation, Seconds, drafting_metrics, reuse_metrics, step_metrics
from stretto.observe.progress import Reporter
from stretto.observe.timeline import Timeline
from stretto.observe.trackers import Trackers
from stretto.records import Rollout, UpdateBatch, Updated
from stretto.run_folder import RunFolder
from stretto.runtime import Runtime
from stretto.schedule import Schedule
from stretto.tasks.prompts import PromptStream
from stretto.tasks.workers import RewardWorkers

SENT_BACK = ("refreshes", "forced_refreshes")
ENGINE_METRICS = (
    "steps", "decode_steps", "prefill_tokens", "busy_squares", "busy_prefill_tokens", "busy_slot_seconds",
    "worker_seconds", "model_seconds", "sampling_seconds",
)  # fmt: skip


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
    slots_began: float = 0.0  # the ledger's slot seconds at these moments
    slots_resumed: float = 0.0
    slots_harvested: float = 0.0
    slots_measured: float = 0.0  # when the engines' figures were taken
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
        drafter: Drafting | None,
        previous: PreviousVisits | None,
        lengths: LengthHistory,
        ends: Sequence[int],
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
        self._beside = schedule.overlaps and config.fleet.kind != "in_process"
        self.drafter, self.previous, self.lengths, self.ends = drafter, previous, lengths, ends
        self.timeline = Timeline(folder.path / "timeline.json")
        self.boundary: Boundary | None = None
        # accuracy, step; without an accuracy where it cannot be compared with those to come
        self.best: tuple[float | None, int] | None = None
        self.interrupted = False  # within an evaluation
        self._batch: UpdateBatch | None = None
        self._clock = _Clock()

    # ---- what the controller tells ------------------------------------------------------------------

    def harvested(self, batch: UpdateBatch) -> None:
        before = self._batch.rollouts if self._batch is not None else []
        rollouts = sorted([*before, *batch.rollouts], key=lambda rollout: rollout.request_id)
        self._batch = UpdateBatch(batch.version, rollouts)
        self._clock.harvested = self.runtime.now()
        self._clock.slots_harvested = self.ledger.slot_seconds()
        self._clock.last_finished = max((r.finished_at for r in rollouts), default=self._clock.harvested)
        if self.drafter is not None:
            self.drafter.remember(batch.rollouts)  # built while the learner is at work
        if self.previous is not None:
            self.previous.remember(batch.rollouts)

    def publishing(self) -> None:
        self._clock.published = self.runtime.now()

    def published(self) -> None:
        self._clock.sync += self.runtime.now() - self._clock.published

    def updated(self, event: Updated) -> None:
        """The boundary of step `event.version`: write it all down."""
        assert self._batch is not None
        step, arrived = event.version, self.runtime.now()
        finished = self.ledger.take_finished()
        self.lengths.observe(finished)
        metrics = self._metrics(self._batch, event)
        self.reporter.step(metrics)
        self.folder.log_step(step, finished, self._batch.rollouts)
        last = step >= self.config.steps
        every = self.config.eval.every
        owed = None
        if self._evaluate and (last or (every and step % every == 0)):
            found = self.evaluation(step)
            owed = metrics if found is None else None
            metrics |= found or {}
        if owed is None:
            self._append(metrics)
        self.boundary = self._boundary(step, owed)
        if (
            last
            or owed is not None
            or step % self.config.checkpoint.every == 0
            or self.best == (metrics.get("eval/accuracy"), step)
        ):
            self.checkpoint()
        self._batch = None
        self._spans(step, arrived)
        self._clock = self._new_clock(arrived, self._clock.slots_measured)

    def _new_clock(self, began: float, slots_began: float) -> _Clock:
        """A step begins now, after the boundary that began at `began`."""
        return _Clock(
            began=began,
            resumed=self.runtime.now(),
            slots_began=slots_began,
            slots_resumed=self.ledger.slot_seconds(),
            counters=self._counters(),
        )

    # ---- writing ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new run: the evaluation before its first step."""
        self.timeline.create()
        metrics = self.evaluation(0) if self._evaluate else None
        if metrics:
            self._append({"step": 0, "version": 0, **metrics})
        self._clock = self._new_clock(self.runtime.now(), self.ledger.slot_seconds())

    def resumed(self, owed: dict[str, Any] | None) -> None:
        """The run goes on from a checkpoint: what was restored counts as the boundary.

        `owed` is the boundary's line of metrics, if its evaluation was interrupted: it is made up for now.
        """
        step = self.ledger.version
        self.timeline.rewind(self.runtime.now())
        found = self.evaluation(step) if owed is not None and self._evaluate else None
        if owed is not None and found is not None:
            self._append(owed | found)
            owed = None
        self.boundary = self._boundary(step, owed)
        self.folder.prune(self.config.checkpoint.keep, self.best[1] if self.best else None)
        self._clock = self._new_clock(self.runtime.now(), self.ledger.slot_seconds())

    def evaluation(self, step: int) -> dict[str, float] | None:
        """Evaluate, tell, remember the best. None, and `interrupted`, if a signal broke it off."""
        assert self._evaluate is not None
        began = self.runtime.now()
        evaluation = self._evaluate()
        self.timeline.span("evaluation", f"evaluation {step}", began, self.runtime.now(), step=step)
        if evaluation.interrupted:
            self.interrupted = True
            return None
        metrics = evaluation.metrics()
        self.reporter.evaluation(f"step {step}", metrics)
        best = self.best[0] if self.best else None
        if step > 0 and (best is None or metrics["eval/accuracy"] > best):
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

    def _append(self, metrics: Mapping[str, Any]) -> None:
        self.folder.append_metrics(metrics)
        self.trackers(int(metrics["step"]), metrics)

    def _boundary(self, step: int, owed: dict[str, Any] | None) -> Boundary:
        state = {
            "owed": owed,  # the step's line of metrics, where its evaluation is still to be made
            "ledger": self.ledger.state_dict(),
            "prompts": self.stream.state_dict(),
            "ends": list(self.ends),
            "schedule": self.schedule.state_dict(),
            "draft": self._draft_state(),
            "elapsed": self.runtime.now(),
            "best": self.best,
        }
        return Boundary(step, self.ledger.in_flight(), state)

    def _draft_state(self) -> dict[str, Any] | None:
        if self.drafter is None:
            return None
        return {"budget_kind": self.config.draft.budget, **self.drafter.state_dict()}

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
        generating = clock.harvested - clock.resumed
        clock.slots_measured = self.ledger.slot_seconds()
        beside = clock.slots_measured - clock.slots_began
        workers = self.workers.metrics()
        return step_metrics(
            batch,
            step=event.version,
            epoch=self.stream.metrics()["epoch"],
            seconds=Seconds(
                rollout=engine["step_seconds"],
                # In this process nothing else is done between two boundaries: the rest is waiting.
                reward=max(0.0, generating - clock.sync - engine["step_seconds"]),
                update=now - clock.harvested,
                sync=clock.sync,
                boundary=clock.resumed - clock.began,
                total=now - clock.began,
            ),
            generation=Generation(
                busy=engine["busy_slot_seconds"],
                # In this process, and in turns, nothing is generated while learner or recorder are at work.
                available=beside if self._beside else clock.slots_harvested - clock.slots_resumed,
                discarded_tokens=int(counters["discarded_tokens"]),
                reverified_tokens=int(engine["reverified_tokens"] + counters["reverified_tokens"]),
                decoded_tokens=int(engine["decode_tokens"]),
                decoding_steps=int(engine["decode_steps"]),
                drafted=int(engine["drafted_tokens"]),
                accepted=int(engine["accepted_tokens"]),
                reward_errors=int(counters["reward_errors"]),
                reward_timeouts=int(counters["reward_timeouts"]),
                extra={f"engine/{name}": engine[name] for name in ENGINE_METRICS}
                | {f"rollout/{name}": value for name, value in counters.items() if name in SENT_BACK}
                | {f"rollout/{name}": value for name, value in counters.items() if "discarded/" in name}
                | self.schedule.metrics()
                | self.lengths.metrics()
                | (
                    drafting_metrics(self.drafter.metrics(), engine["worker_seconds"])
                    if self.drafter is not None
                    else {}
                )
                | (reuse_metrics(engine) if self.previous is not None else {})
                | {f"reward/{name}": workers[f"reward/{name}"] for name in ("retried", "restarted")},
            ),
            learner=event.metrics,
        )
