"""`stretto doctor`: whether this installation can do what it is asked to, and what to do where it cannot."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from stretto.errors import StrettoError

Level = Literal["ok", "warning", "error"]

PACKAGES = ("torch", "transformers", "peft", "numpy", "numba", "pyarrow", "pydantic", "safetensors")
EXTRAS: dict[str, tuple[str, ...]] = {
    "datasets": ("datasets",),
    "gym": ("reasoning_gym",),
    "math": ("math_verify",),
    "ray": ("ray",),
    "trackers": ("tensorboard", "trackio", "wandb", "mlflow"),
    "trl": ("trl",),
    "vllm": ("vllm",),
}
REINSTALL = "install it anew: pip install --force-reinstall --no-deps . in a clone of Stretto"
ENOUGH_DISK = 2 * 2**30  # bytes: a few checkpoints of a small model
ENOUGH_MEMORY = 2 * 2**30  # bytes: torch, transformers and the demo


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. An `error` keeps Stretto from running."""

    name: str
    level: Level
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def examine(runs: Path) -> list[Check]:
    """All checks, `runs` being the folder that run folders will go to. Compiles the kernels: seconds, once."""
    return [
        _python(),
        *(_package(name) for name in PACKAGES),
        _guarded("torch device", _torch),
        _guarded("kernels", _kernels),
        _package_data(),
        *(_extra(extra, modules) for extra, modules in EXTRAS.items()),
        _disk(runs),
        _memory(),
    ]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever is broken there is what was looked for
        return Check(name, "error", f"{type(error).__name__}: {error}", REINSTALL)


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Check("python", "ok", found)


def _package(name: str) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "error", "not installed", f'pip install "{name}"')


def _torch() -> Check:
    import torch

    found = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        found = f"CUDA: {torch.cuda.get_device_name()}; {found}"
    return Check("torch device", "ok", found)


def _kernels() -> Check:
    import torch

    from stretto import sampling
    from stretto.draft import drafter
    from stretto.engine import attention, linear, packing, verify

    sampling.compile_kernels()
    attention.compile_kernels(torch.float32)
    for module in (linear, packing, verify, drafter):
        module.compile_kernels()
    # numba puts its cache beside the source, or into the user's cache folder where that cannot be written.
    caches = {kernel.stats.cache_path for kernel in vars(sampling).values() if hasattr(kernel, "stats")}
    advice = "set NUMBA_CACHE_DIR to a folder that can be written: now they are compiled at every start"
    if None in caches:
        return Check("kernels", "warning", "compiled, but not cached", advice)
    refused = [folder for folder in caches if not os.access(folder, os.W_OK)]
    if refused:
        return Check("kernels", "warning", f"compiled; {refused[0]} cannot be written", advice)
    return Check("kernels", "ok", f"compiled; cached in {', '.join(sorted(caches))}")


def _package_data() -> Check:
    package = Path(str(resources.files("stretto")))
    needed = (
        "presets/demo.toml",
        "demo/model/config.json",
        "demo/model/model.safetensors",
        "demo/model/tokenizer.json",
    )
    absent = [name for name in needed if not (package / name).is_file()]
    if absent:
        return Check("package data", "error", f"{', '.join(absent)} missing in {package}", REINSTALL)
    return Check("package data", "ok", "presets and the demo model are there")


def _extra(extra: str, modules: Iterable[str]) -> Check:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if extra == "vllm" and not absent:
        return _guarded("extra vllm", _vllm)
    if not absent:
        return Check(f"extra {extra}", "ok", "installed")
    advice = f'pip install ".[{extra}]" in a clone of Stretto'
    return Check(f"extra {extra}", "ok", f"without {', '.join(absent)}", advice)


def _vllm() -> Check:
    from stretto.engine.vllm_arguments import require_vllm

    try:
        return Check("extra vllm", "ok", f"vLLM {require_vllm()}")
    except StrettoError as error:
        return Check("extra vllm", "warning", str(error))


def _disk(runs: Path) -> Check:
    folder = next(parent for parent in (runs.resolve(), *runs.resolve().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:.1f} GiB free for {runs}"
    if not os.access(folder, os.W_OK):
        return Check(
            "disk", "error", f"{folder} cannot be written", "set runs to another folder: --runs FOLDER"
        )
    return Check("disk", "ok" if free >= ENOUGH_DISK else "warning", found)


def _memory() -> Check:
    free = _available_memory()
    level: Level = "ok" if free >= ENOUGH_MEMORY else "warning"
    advice = (
        "" if level == "ok" else "use a smaller model, learner.tokens_per_micro_batch or engine.max_num_seqs"
    )
    return Check("memory", level, f"{free / 2**30:.1f} GiB", advice)


def _available_memory() -> int:
    """Bytes that can still be had where the system says so (Linux), else all there are."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def as_table(checks: Iterable[Check]) -> Table:
    """The checks for a person: what was found, and what to do where something is to be done."""
    marks = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "error": "[red]✗[/]"}
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in checks:
        mark = "[dim]·[/]" if check.level == "ok" and check.advice else marks[check.level]
        found = Text.assemble(check.found, (f"  {check.advice}", "dim") if check.advice else "")
        table.add_row(mark, check.name, found)
    return table
