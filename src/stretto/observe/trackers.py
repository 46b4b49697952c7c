"""Metrics on their way to TensorBoard, trackio, Weights & Biases and MLflow, behind one function.

Nothing needs a network or an account: without a key, wandb writes offline runs into the run folder; MLflow
keeps files there, trackio its own local database. Who has logged in to wandb, or sets WANDB_MODE, WANDB_API_KEY or
MLFLOW_TRACKING_URI, gets what these say.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.config import Config, dump_toml
from stretto.errors import StrettoError
from stretto.metrics_file import plain

Log = Callable[[Mapping[str, float], int], object]
Close = Callable[[], object]


@dataclass(slots=True)
class Tracker:
    """One open tracker."""

    name: str
    log: Log
    close: Close


class Trackers:
    """The open trackers. One that fails is reported once and left alone: it must not end a run."""

    def __init__(self, trackers: list[Tracker], say: Callable[[str], None]) -> None:
        self._trackers = trackers
        self._say = say

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the figures of an optimiser step; what is no finite number is left out (metrics.jsonl has null)."""
        numbers = {
            name: v for name, v in plain(metrics).items() if name != "step" and isinstance(v, int | float)
        }
        for tracker in list(self._trackers):
            self._attempt(tracker, partial(tracker.log, numbers, step))

    def close(self) -> None:
        """Write out what is buffered."""
        for tracker in list(self._trackers):
            self._attempt(tracker, tracker.close)
        self._trackers.clear()

    def _attempt(self, tracker: Tracker, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a third party's failure, of any kind, must not end the run
            self._trackers.remove(tracker)
            self._say(
                f"tracker {tracker.name} failed and is off for the rest of the run: "
                f"{type(error).__name__}: {error} (metrics.jsonl has everything)"
            )


def open_trackers(config: Config, run_dir: Path, say: Callable[[str], None]) -> Trackers:
    """Open the trackers that `config.track.trackers` names, for the run in `run_dir`, new or resumed.

    Args:
        config: resolved; it is given to the trackers.
        run_dir: its name is the run's name; local files go to its folder `trackers`.
        say: is told when a tracker fails during the run.

    Raises:
        StrettoError: a tracker's package is absent, or it cannot be opened.
    """
    modules = require_trackers(config)
    trackers: list[Tracker] = []
    for name, module in modules.items():
        try:
            trackers.append(OPENERS[name](module, config, run_dir))
        except Exception as error:
            for tracker in trackers:
                tracker.close()
            raise StrettoError(f"track.trackers: {name} cannot be opened: {error}") from error
    return Trackers(trackers, say)


MODULES = {
    "tensorboard": "torch.utils.tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


def require_trackers(config: Config) -> dict[str, ModuleType]:
    """The packages of `config.track.trackers`, by tracker. Raises StrettoError if one is absent."""
    return {name: _module(name) for name in config.track.trackers}


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise StrettoError(
            f'track.trackers: {name} is not installed ({error}); pip install ".[trackers]" in a clone of Stretto'
        ) from error


def _folder(run_dir: Path, name: str) -> Path:
    folder = run_dir / "trackers" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tensorboard(module: ModuleType, config: Config, run_dir: Path) -> Tracker:
    writer = module.SummaryWriter(log_dir=str(_folder(run_dir, "tensorboard")))
    writer.add_text("config", f"```toml\n{dump_toml(config)}\n```")

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Tracker("tensorboard", log, writer.close)


def _trackio(module: ModuleType, config: Config, run_dir: Path) -> Tracker:
    run = module.init(
        project=config.track.project, name=run_dir.name, config=config.model_dump(mode="json"), resume="allow"
    )
    return Tracker("trackio", lambda metrics, step: run.log(dict(metrics), step=step), run.finish)


def _wandb(module: ModuleType, config: Config, run_dir: Path) -> Tracker:
    run = module.init(
        project=config.track.project,
        name=run_dir.name,
        id=run_dir.name,
        resume="allow",
        dir=str(_folder(run_dir, "wandb")),
        config=config.model_dump(mode="json"),
        mode=None if _wandb_knows_where_to() else "offline",  # online without a key, it would ask and wait
    )
    return Tracker("wandb", lambda metrics, step: run.log(dict(metrics), step=step), run.finish)


def _wandb_knows_where_to() -> bool:
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    logged_in = netrc.is_file() and "wandb" in netrc.read_text("utf-8", errors="replace")
    return logged_in or "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ


def _mlflow(module: ModuleType, config: Config, run_dir: Path) -> Tracker:
    folder = _folder(run_dir, "mlflow")
    if "MLFLOW_TRACKING_URI" not in os.environ:
        # Its database store needs more than the small package; its file store must be asked for since 3.x.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        module.set_tracking_uri(folder.resolve().as_uri())
    module.set_experiment(config.track.project)
    note = folder / "run_id"  # a resumed run goes on in the same MLflow run
    known = {"run_id": note.read_text("utf-8")} if note.exists() else {"run_name": run_dir.name}
    run = module.start_run(**known)
    note.write_text(run.info.run_id, "utf-8")
    module.log_text(dump_toml(config), "config.toml")
    return Tracker(
        "mlflow", lambda metrics, step: module.log_metrics(dict(metrics), step=step), module.end_run
    )


OPENERS: dict[str, Callable[[ModuleType, Config, Path], Tracker]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
