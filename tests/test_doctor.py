"""`stretto doctor`: what it looks at, and what it says when something is missing."""

from __future__ import annotations

import io
import json
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from stretto import doctor
from stretto.cli import run
from stretto.doctor import Check


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling them takes seconds and is tested with them."""
    monkeypatch.setattr(doctor, "_kernels", lambda: Check("kernels", "ok", "compiled"))


def found(name: str) -> Check:
    return next(check for check in doctor.examine(Path("runs")) if check.name == name)


def test_this_installation_works() -> None:
    checks = {check.name: check for check in doctor.examine(Path("runs"))}
    assert {"python", "torch", "torch device", "kernels", "package data", "disk", "memory"} <= set(checks)
    assert checks["torch"].found == metadata.version("torch")
    assert [check for check in checks.values() if check.level == "error"] == []


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert (found("torch").level, found("torch").advice) == ("error", 'pip install "torch"')
    assert run(["doctor"]) == 2


def test_a_missing_extra_is_no_error_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"trackers": ("json", "no_such_module")})
    check = found("extra trackers")
    assert (check.level, check.found) == ("ok", "without no_such_module")
    assert check.advice == 'pip install ".[trackers]" in a clone of Stretto'


def test_what_breaks_while_it_is_looked_at_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise OSError("libgomp.so.1: cannot open")

    monkeypatch.setattr(doctor, "_kernels", broken)
    assert (found("kernels").level, found("kernels").found) == ("error", "OSError: libgomp.so.1: cannot open")


def test_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    assert (found("disk").level, found("disk").found) == ("warning", "0.5 GiB free for runs")


def test_the_program_reads_json_and_the_person_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["doctor", "--json"])
    checks: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["checks"]
    assert status == (2 if any(check["level"] == "error" for check in checks) else 0)
    assert {"name", "level", "found", "advice"} == set(checks[0])
    out = io.StringIO()
    table = doctor.as_table([Check("disk", "warning", "[full]", "make room"), Check("x", "error", "broken")])
    Console(file=out, width=80).print(table)
    assert out.getvalue().splitlines()[0].split() == ["!", "disk", "[full]", "make", "room"]
