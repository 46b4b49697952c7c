"""Trackers: opened by name, fed, and never the end of a run. Their packages are stood in for."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stretto.config import Config, load_config
from stretto.errors import StrettoError
from stretto.observe.trackers import MODULES, OPENERS, open_trackers


class Recorded:
    """Every call on a stand-in package, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fail_on: str | None = None

    def __call__(self, name: str, result: Any = None) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if name == self.fail_on:
                raise ConnectionError("gone")
            self.calls.append((name, arguments, keywords))
            return result

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, keywords) for called, arguments, keywords in self.calls if called == name]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorded:
    recorded = Recorded()
    run = SimpleNamespace(log=recorded("log"), finish=recorded("finish"), info=SimpleNamespace(run_id="r1"))
    writer = SimpleNamespace(
        add_scalar=recorded("add_scalar"), add_text=recorded("add_text"), close=recorded("close")
    )
    offered = {
        "tensorboard": {"SummaryWriter": recorded("SummaryWriter", writer)},
        "trackio": {"init": recorded("init", run)},
        "wandb": {"init": recorded("init", run)},
        "mlflow": {
            "set_tracking_uri": recorded("set_tracking_uri"),
            "set_experiment": recorded("set_experiment"),
            "start_run": recorded("start_run", run),
            "log_text": recorded("log_text"),
            "log_metrics": recorded("log_metrics"),
            "end_run": recorded("end_run"),
        },
    }
    for name, attributes in offered.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, MODULES[name], module)
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return recorded


def config_with(*names: str) -> Config:
    return load_config(None, {"track.trackers": list(names)})


def test_every_tracker_of_the_configuration_can_be_opened() -> None:
    allowed = set(load_config(None, {"track.trackers": sorted(OPENERS)}).track.trackers)
    assert allowed == set(OPENERS) == set(MODULES)


def test_none_is_opened_by_default(tmp_path: Path) -> None:
    trackers = open_trackers(load_config(), tmp_path, pytest.fail)
    trackers(1, {"reward/mean": 0.5})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "log", "close"), [
    ("trackio", "log", "finish"), ("wandb", "log", "finish"), ("mlflow", "log_metrics", "end_run"),
])  # fmt: skip
def test_numbers_arrive_under_their_step(
    recorded: Recorded, tmp_path: Path, name: str, log: str, close: str
) -> None:
    trackers = open_trackers(config_with(name), tmp_path, pytest.fail)
    trackers(3, {"step": 3, "reward/mean": 0.5, "policy/kl": math.nan, "note": "text"})
    trackers.close()
    assert recorded.of(log) == [(({"reward/mean": 0.5},), {"step": 3})]
    assert len(recorded.of(close)) == 1


def test_tensorboard_gets_a_scalar_each_and_the_configuration(recorded: Recorded, tmp_path: Path) -> None:
    trackers = open_trackers(config_with("tensorboard"), tmp_path, pytest.fail)
    trackers(3, {"a": 1, "b": 2.0})
    trackers.close()
    assert [arguments for arguments, _ in recorded.of("add_scalar")] == [("a", 1, 3), ("b", 2.0, 3)]
    assert 'task = "knights"' in recorded.of("add_text")[0][0][1]
    assert recorded.of("SummaryWriter")[0][1]["log_dir"] == str(tmp_path / "trackers" / "tensorboard")


def test_wandb_stays_offline_without_a_key(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_trackers(config_with("wandb"), tmp_path, pytest.fail)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    open_trackers(config_with("wandb"), tmp_path, pytest.fail)
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k")
    open_trackers(config_with("wandb"), tmp_path, pytest.fail)
    assert [keywords["mode"] for _, keywords in recorded.of("init")] == ["offline", None, None]


def test_mlflow_goes_on_in_the_same_run_after_a_resume(recorded: Recorded, tmp_path: Path) -> None:
    for _ in range(2):
        open_trackers(config_with("mlflow"), tmp_path / "runs" / "a", pytest.fail).close()
    assert [keywords for _, keywords in recorded.of("start_run")] == [{"run_name": "a"}, {"run_id": "r1"}]


def test_an_absent_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(StrettoError, match=r'wandb is not installed .*pip install "\.\[trackers\]"'):
        open_trackers(config_with("wandb"), tmp_path, pytest.fail)


def test_one_that_cannot_be_opened_is_refused_and_the_others_closed(
    recorded: Recorded, tmp_path: Path
) -> None:
    recorded.fail_on = "set_experiment"
    with pytest.raises(StrettoError, match=r"track\.trackers: mlflow cannot be opened: gone"):
        open_trackers(config_with("wandb", "mlflow"), tmp_path, pytest.fail)
    assert len(recorded.of("finish")) == 1


def test_a_failing_tracker_is_reported_once_and_the_others_go_on(recorded: Recorded, tmp_path: Path) -> None:
    said: list[str] = []
    trackers = open_trackers(config_with("wandb", "mlflow"), tmp_path, said.append)
    recorded.fail_on = "log"
    trackers(1, {"a": 1.0})
    trackers(2, {"a": 2.0})
    trackers.close()
    assert len(said) == 1
    assert "tracker wandb failed" in said[0]
    assert "ConnectionError: gone" in said[0]
    assert [keywords["step"] for _, keywords in recorded.of("log_metrics")] == [1, 2]
    assert recorded.of("finish") == []
