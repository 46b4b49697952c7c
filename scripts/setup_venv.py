"""Fills .venv: torch first, from the right place, then Stretto in editable form with the pinned versions.

Run by scripts/setup.sh. Needs the standard library only. The stamps `.venv/.core` and `.venv/.dev` are
written last, so an interrupted set-up starts over. Ray, TRL and vLLM, whose wishes conflict, get a .venv-NAME each, and
so do the oldest versions that pyproject.toml accepts (`low`).

Where torch comes from: TORCH_INDEX_URL where it is set; else what pip finds by itself, unless that is a CUDA
build (several GB, and of no use to the demo); then PyTorch's CPU index where that can be reached; else the CUDA
build, with a word about its size.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KIND = sys.argv[1]
STACKS = ("ray", "trl", "vllm", "low")
VENV = Path(f".venv-{KIND}" if KIND in STACKS else ".venv")
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = Path("constraints-low.txt" if KIND == "low" else "constraints.txt")
VLLM = Path("constraints-vllm.txt")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = {"core": "", "dev": "[dev]", "ray": "[dev,ray]", "trl": "[dev,trl]", "low": "[dev]"}


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def pip(*args: str, quiet: bool = False) -> bool:
    """Run pip in the environment; whether it succeeded. `quiet` hides what it prints."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, capture_output=quiet, check=False).returncode == 0


def runs(code: str) -> bool:
    """Whether the environment's Python runs `code` to a good end."""
    return subprocess.run([str(PYTHON), "-c", code], capture_output=True, check=False).returncode == 0


def require(done: bool, what: str) -> None:
    if not done:
        raise SystemExit(f"set-up: {what} failed, for the reason above; the same command starts over")


def make_venv() -> None:
    """Make .venv with this interpreter; keep one that works and has the same version."""
    same = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    if not (PYTHON.exists() and runs(same)):
        say(f"making {VENV}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    # Older pips download whole wheels to answer --dry-run.
    current = "import pip, sys; sys.exit(tuple(map(int, pip.__version__.split('.')[:2])) < (23, 2))"
    if not runs(current):
        require(pip("install", "--quiet", "--upgrade", "pip"), "upgrading pip")


def would_install(requirement: str, *options: str) -> list[str] | None:
    """Names of what pip would install; None where it finds no way to. Downloads metadata only."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        args = ("install", "--dry-run", "--ignore-installed", "--report", str(report), *options, requirement)
        if not pip(*args, quiet=True):
            return None
        return [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]


def torch_source(requirement: str) -> tuple[list[str], str, int]:
    """pip's options for the place that torch is to come from, how large it is, and the GB of disk to ask for."""
    index = os.environ.get("TORCH_INDEX_URL")
    if index:
        return ["--index-url", index], f"from {index}: 200 MB as a CPU build, 3 GB with CUDA", 3
    say("asking pip where torch would come from")
    names = would_install(requirement)
    if names is None:
        say(f"pip finds no {requirement} for this machine and Python {sys.version.split()[0]}:")
        require(pip("install", "--dry-run", requirement), f"looking for {requirement}")
    if not any(name.startswith(("nvidia", "cuda")) for name in names or ()):
        return [], "CPU build, 200 MB", 3
    options = ["--index-url", CPU_INDEX]
    if would_install(requirement, "--no-deps", "--retries", "0", "--timeout", "10", *options):
        return options, f"CPU build from {CPU_INDEX}, 200 MB", 3
    return [], f"CUDA build, since {CPU_INDEX} cannot be reached: 3 GB, 7 GB on disk", 9


def install_torch() -> None:
    lines = CONSTRAINTS.read_text().splitlines()
    requirement = next(line for line in lines if line.startswith("torch=="))
    version = requirement.removeprefix("torch==")
    if runs(f"import sys, torch; sys.exit(torch.__version__.split('+')[0] != '{version}')"):
        return
    options, size, disk_gb = torch_source(requirement)
    say(f"{requirement} ({size}), then the rest (250 MB); 1.5 GB on disk with a CPU build")
    free_gb = shutil.disk_usage(".").free / 1e9
    if free_gb < disk_gb:
        raise SystemExit(f"set-up: {free_gb:.1f} GB are free here, about {disk_gb} GB are needed")
    require(pip("install", *options, requirement), f"installing {requirement}")


def install_vllm() -> None:
    """vLLM's CPU build and what it needs, as listed: by itself it would fetch other builds of torch."""
    say(f"installing the versions of {VLLM} (350 MB)")
    require(pip("install", "--quiet", "--no-deps", "--requirement", str(VLLM)), "installing vLLM's CPU build")
    require(pip("install", "--quiet", "--no-deps", "--editable", "."), "installing stretto")


def install_stretto() -> None:
    project = f".{EXTRAS[KIND]}"
    say(f"installing stretto{EXTRAS[KIND]} with the versions of {CONSTRAINTS}")
    installed = pip("install", "--quiet", "--constraint", str(CONSTRAINTS), "--editable", project)
    require(installed, "installing stretto")


def main() -> None:
    if KIND == "vllm" and sys.platform != "linux":
        raise SystemExit("set-up: vLLM's CPU build has wheels for Linux only")
    if KIND == "low" and sys.version_info >= (3, 13):
        raise SystemExit(
            "set-up: the oldest versions have wheels for Python 3.11 and 3.12: make PYTHON=... test-low"
        )
    make_venv()
    install_torch()
    install_vllm() if KIND == "vllm" else install_stretto()
    say("checking the installation and compiling what needs compiling")
    doctor = subprocess.run([str(VENV / "bin" / "stretto"), "doctor"], check=False)
    require(doctor.returncode == 0, "stretto doctor")
    (VENV / ".core").touch()
    if KIND == "dev":
        (VENV / ".dev").touch()
    say("done")


if __name__ == "__main__":
    main()
