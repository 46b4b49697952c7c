from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.run_paths import free_name, require_run


def make(*runs: Path) -> None:
    for age, run in enumerate(runs):
        run.mkdir(parents=True)
        (run / "config.toml").touch()
        os.utime(run / "config.toml", (1e9 - age, 1e9 - age))


def test_a_folder_of_runs_is_answered_with_the_newest_of_them(tmp_path: Path) -> None:
    make(*(tmp_path / "runs" / name for name in ("d", "c", "b", "a")))
    runs = tmp_path / "runs"
    said = f"it holds {runs}/d, {runs}/c, {runs}/b and 1 more: name one of them"
    with pytest.raises(StrettoError, match=re.escape(said)):
        require_run(runs)


def test_a_forgotten_folder_is_put_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StrettoError, match=r'demo is not a run folder: .*; did you mean "runs/demo"\?'):
        require_run(Path("demo"))
    with pytest.raises(StrettoError, match=r'demmo is not a run folder: .*"demo".* in runs'):
        require_run(Path("demmo"))
    with pytest.raises(StrettoError, match=r"there are no runs in elsewhere"):
        require_run(Path("elsewhere/demo"))
    require_run(Path("runs/demo"))


def test_a_free_name_has_the_first_number_that_is_free(tmp_path: Path) -> None:
    make(tmp_path / "demo", tmp_path / "demo-2")
    assert free_name(tmp_path / "demo") == tmp_path / "demo-3"
