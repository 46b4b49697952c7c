"""A run on disk: its configuration, metrics, logs of rollouts, and checkpoints.

    runs/NAME/  config.toml                     as resolved when the run began or was resumed
                metrics.jsonl                   one object per optimiser step
                rollouts/step-000012.parquet    what finished since step 11
                consumed/step-000012.parquet    what update 12 was made of
                in_flight/step-000012.parquet   unfinished requests at checkpoint 12
                checkpoints/step-000012/        what the learner wrote, and trainer_state.json
                latest, best                    links to checkpoints
                lock                            held by the process that writes

The order of writes makes every crash harmless: metrics and logs of step N come before checkpoint N. What is
later than the checkpoint that a run resumes from is rewound, and written again by the resumed run.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from stretto import metrics_file
from stretto.atomic import (
    disk_errors,
    link_atomically,
    remove_atomically,
    remove_leftovers,
    write_atomically,
    write_folder_atomically,
    write_synced,
)
from stretto.checkpoints import Checkpoint, Damaged, read_checkpoint, verify, write_checkpoint
from stretto.errors import StrettoError
from stretto.history.log import check_log, write_rollouts
from stretto.lock import Lock
from stretto.records import Rollout
from stretto.run_paths import free_name, is_run, require_run

logger = logging.getLogger(__name__)

LogKind = Literal["rollouts", "consumed", "in_flight"]
LOG_KINDS: tuple[LogKind, ...] = ("rollouts", "consumed", "in_flight")
_CHECKPOINTS = "checkpoints"


class RunFolder:
    """One run's folder, open for reading, or for writing under its lock.

    Every method that writes raises StrettoError if the disk refuses: it names file, reason and what is intact.
    """

    def __init__(self, path: Path, lock: Lock | None) -> None:
        """Use `create` or `open`."""
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: Path, config_toml: str) -> Self:
        """Start a run in a folder that does not exist yet or is empty, open for writing.

        Raises StrettoError if there is something at `path`.
        """
        cls.require_free(path)
        _make_folder(path.parent)
        _say_removed(remove_leftovers(path.parent, of=path.name))

        def fill(folder: Path) -> None:
            for name in (*LOG_KINDS, _CHECKPOINTS):
                os.mkdir(folder / name)
            write_synced(folder / "config.toml", config_toml.encode())

        write_folder_atomically(path, fill)
        return cls(path, Lock(path / "lock"))

    @staticmethod
    def require_free(path: Path) -> None:
        """Raise StrettoError if there is something at `path`: a run is never overwritten."""
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            hint = f"continue it with `stretto resume {path}`, or " if is_run(path) else ""
            raise StrettoError(f"{path} exists already; {hint}choose another name: {free_name(path)}")

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Self:
        """Open an existing run: for reading, which changes nothing, or `writable`, to resume it.

        To write, the lock is taken, and what a killed writer left half-done is removed and said. Raises
        StrettoError if `path` is no run folder, or if another process is writing it.
        """
        require_run(path)
        if not writable:
            return cls(path, None)
        lock = Lock(path / "lock")
        try:
            for folder in (path, *(path / name for name in (*LOG_KINDS, _CHECKPOINTS))):
                _make_folder(folder)  # tools that copy a run may drop its empty folders
                _say_removed(remove_leftovers(folder))
            metrics_file.repair(path / "metrics.jsonl")
        except BaseException:
            lock.release()
            raise
        return cls(path, lock)

    def save_config(self, config_toml: str) -> None:
        """Replace the configuration, where a resumed run changes what it may."""
        self._require_lock()
        path = self.path / "config.toml"
        if path.read_bytes() != config_toml.encode():
            write_atomically(path, config_toml.encode())

    def discard(self) -> None:
        """Remove a run that has not begun."""
        self._require_lock()
        remove_atomically(self.path)

    def close(self) -> None:
        """Release the lock; the folder can be read further, not written."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- metrics and logs ---------------------------------------------------------------------------------

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one JSON line; `metrics["step"]` is its optimiser step. NaN and infinities become null."""
        self._require_lock()
        metrics_file.append(self.path / "metrics.jsonl", metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl, oldest first; a last line that is being written is left out, and said."""
        return metrics_file.read(self.path / "metrics.jsonl")

    def log_file(self, kind: LogKind, step: int) -> Path:
        """Where the log of that kind and step is, or would be."""
        return self.path / kind / f"{_step_name(step)}.parquet"

    def log_steps(self, kind: LogKind) -> list[int]:
        """The steps of which there is a log of that kind, ascending."""
        return _steps(self.path / kind, ".parquet")

    def log_step(self, step: int, rollouts: Iterable[Rollout], consumed: Iterable[Rollout]) -> None:
        """Write what finished since the step before, and what update `step` was made of: both or none.

        Raises StrettoError if they exist.
        """
        self._require_lock()
        contents: dict[LogKind, Iterable[Rollout]] = {"rollouts": rollouts, "consumed": consumed}
        for kind in contents:
            if self.log_file(kind, step).exists():
                raise StrettoError(f"{self.log_file(kind, step)} exists already; rewind the run first")
        try:
            for kind, rows in contents.items():
                write_rollouts(self.log_file(kind, step), rows, step=step)
        except BaseException:
            for kind in contents:
                _remove_if_there(self.log_file(kind, step))
            raise

    # ---- checkpoints --------------------------------------------------------------------------------------

    def checkpoint_folder(self, step: int) -> Path:
        """Where the checkpoint of that step is, or would be."""
        return self.path / _CHECKPOINTS / _step_name(step)

    def checkpoint_steps(self) -> list[int]:
        """The steps of which there is a checkpoint, whole or damaged, ascending."""
        return _steps(self.path / _CHECKPOINTS, "")

    def save_checkpoint(
        self,
        step: int,
        write: Callable[[Path], None],
        in_flight: Sequence[Rollout],
        state: Mapping[str, Any],
    ) -> Path:
        """Create checkpoint `step` whole or not at all, and point `latest` at it; returns its folder.

        `write(folder)` puts the learner's files into the folder that it is given; `state` is plain JSON (str
        keys; tuples come back as lists). Raises StrettoError if the checkpoint exists, or if update `step` has
        no log yet.
        """
        self._require_lock()
        folder = self.checkpoint_folder(step)
        if folder.exists():
            raise StrettoError(f"{folder} exists already; a checkpoint is never replaced")
        log = [self.log_file(kind, step) for kind in ("rollouts", "consumed")] if step > 0 else []
        for path in log:
            if not path.is_file():
                raise StrettoError(f"{path} is missing: the log of a step comes before its checkpoint")
        unfinished = self.log_file("in_flight", step)
        try:
            write_rollouts(unfinished, in_flight, step=step, exact=True)
            write_checkpoint(folder, step, write, state, [*log, unfinished])
        except BaseException:
            if not folder.exists():
                _remove_if_there(unfinished)
            raise
        self._link("latest", step)
        return folder

    def newest_checkpoint(self, step: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole, or the one of `step`; None if the run has none yet.

        A damaged newer one is reported and passed over. Raises StrettoError if there are checkpoints and none
        can be used, or if a log that the checkpoint builds on is missing or damaged: it then names the step
        to resume from.
        """
        steps = self.checkpoint_steps()
        if not steps and _linked_step(self.path / "latest") is not None:
            raise StrettoError(
                f"{self.path / _CHECKPOINTS} is empty, but the run had checkpoints: put them back; "
                "to begin anew, train under another name"
            )
        if step is not None and step not in steps:
            raise StrettoError(f"{self.path} has no checkpoint of step {step}; it has {steps or 'none'}")
        found = self._newest_whole(steps if step is None else [step])
        if found is None:
            return None
        checkpoint, fingerprints = found
        self._check_logs(checkpoint.step, fingerprints)
        metrics_file.check(self.path / "metrics.jsonl", checkpoint.step)
        return checkpoint

    def prune(self, keep: int, best: int | None = None) -> list[int]:
        """Remove all checkpoints but the newest `keep` and `best`, and link `best`; returns the removed steps.

        The logs of what was in flight go with their checkpoints; metrics and the other logs are never pruned.
        Raises StrettoError if there is no checkpoint of step `best`.
        """
        self._require_lock()
        steps = self.checkpoint_steps()
        if best is not None and best not in steps:
            raise StrettoError(
                f"{self.path} has no checkpoint of step {best} to keep as best; it has {steps}"
            )
        if best is not None and best != _linked_step(self.path / "best"):
            self._link("best", best)
        kept = {*steps[-keep:], best}
        removed = [step for step in steps if step not in kept]
        for step in removed:
            remove_atomically(self.checkpoint_folder(step))
        for step in self.log_steps("in_flight"):
            if steps and step < steps[-1] and step not in kept:
                remove_atomically(self.log_file("in_flight", step))
        return removed

    def rewind(self, step: int) -> dict[str, int]:
        """Remove everything later than checkpoint `step`, which a run resumed from there writes again.

        Returns how many metrics lines, logs by kind, and checkpoints were removed; `rewind(-1)` removes all.
        A crash on the way leaves a folder whose newest checkpoint is `step` or a whole later one.
        """
        self._require_lock()
        # Checkpoints first, and the newest of them first: none is ever left without the logs it builds on.
        late = [s for s in reversed(self.checkpoint_steps()) if s > step]
        for link in ("latest", "best"):
            target = _linked_step(self.path / link)
            if target is not None and target > step:
                remove_atomically(self.path / link)
        if step in self.checkpoint_steps():
            self._link("latest", step)
        removed = {_CHECKPOINTS: len(late)}
        for s in late:
            remove_atomically(self.checkpoint_folder(s))
        for kind in LOG_KINDS:
            logs = [s for s in reversed(self.log_steps(kind)) if s > step]
            for s in logs:
                remove_atomically(self.log_file(kind, s))
            removed[kind] = len(logs)
        removed["metrics"] = metrics_file.rewind(self.path / "metrics.jsonl", step)
        if any(removed.values()):
            counts = ", ".join(f"{count} of {name}" for name, count in removed.items() if count)
            where = f"step {step}" if step >= 0 else "its beginning"
            logger.warning("%s: rewound to %s; to be written again: %s", self.path, where, counts)
        return removed

    # ---- inside -------------------------------------------------------------------------------------------

    def _newest_whole(self, steps: Sequence[int]) -> tuple[Checkpoint, dict[str, Any]] | None:
        reasons = []
        for step in reversed(steps):
            try:
                found = self._whole(step)
            except Damaged as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                logger.warning("%s; going back to checkpoint %d", reason, step)
            return found
        if not reasons:
            return None
        others = [s for s in self.checkpoint_steps() if s not in steps]
        hint = f"there are others: {others}" if others else "there is no other: start a new run"
        raise StrettoError(f"no usable checkpoint in {self.path}: {'; '.join(reasons)}; {hint}")

    def _whole(self, step: int) -> tuple[Checkpoint, dict[str, Any]]:
        """Checkpoint `step` and its logs' fingerprints; Damaged if it or what was in flight is not whole."""
        checkpoint, fingerprints = read_checkpoint(self.checkpoint_folder(step))
        if checkpoint.step != step:
            raise Damaged(f"{checkpoint.folder} is damaged: it holds step {checkpoint.step}")
        unfinished = self.log_file("in_flight", step)
        verify(unfinished, fingerprints[str(unfinished.relative_to(self.path))])
        return checkpoint, fingerprints

    def _check_logs(self, newest: int, fingerprints: Mapping[str, Any]) -> None:
        """Raise StrettoError if a log at or before checkpoint `newest` is missing or damaged."""
        for step in range(1, newest + 1):
            for kind in ("rollouts", "consumed"):
                path = self.log_file(kind, step)
                expected = fingerprints.get(str(path.relative_to(self.path)))
                try:
                    check_log(path) if expected is None else verify(path, expected)
                except StrettoError as error:
                    raise StrettoError(
                        f"{error}; checkpoint {newest} builds on it; {self._way_out(step)}"
                    ) from error

    def _way_out(self, damaged: int) -> str:
        for step in reversed([s for s in self.checkpoint_steps() if s < damaged]):
            with suppress(Damaged):  # a damaged one is no way out
                self._whole(step)
                return (
                    f"resume from step {step}, before it, to have it written again "
                    f"(`stretto resume {self.path} --step {step}`), or put the file back"
                )
        return "no checkpoint is older than it: put the file back, or start a new run"

    def _link(self, name: str, step: int) -> None:
        link_atomically(self.path / name, f"{_CHECKPOINTS}/{_step_name(step)}")

    def _require_lock(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.path} is open for reading only")


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        with disk_errors(path):
            os.makedirs(path, exist_ok=True)


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


def _steps(folder: Path, suffix: str) -> list[int]:
    """The steps named by `folder`'s entries; anything else there is somebody else's and left alone."""
    if not folder.is_dir():
        return []
    pattern = re.compile(rf"step-(\d{{6,}}){re.escape(suffix)}")
    return sorted(int(m[1]) for p in folder.iterdir() if (m := pattern.fullmatch(p.name)))


def _linked_step(link: Path) -> int | None:
    """The step of the checkpoint that `latest` or `best` points at; None if there is no link."""
    if link.is_symlink():
        target = os.readlink(link)
    elif link.is_file():
        target = link.read_text().strip()  # where links are impossible
    else:
        return None
    match = re.fullmatch(rf"{_CHECKPOINTS}/step-(\d{{6,}})", target)
    return int(match[1]) if match else None


def _remove_if_there(path: Path) -> None:
    """Remove a file after an error, which is the one to report; one that stays is rewound on resume."""
    with suppress(StrettoError):
        if path.exists():
            remove_atomically(path)


def _say_removed(leftovers: Iterable[Path]) -> None:
    for path in leftovers:
        logger.warning("removed %s, left by a writer that was killed", path)
