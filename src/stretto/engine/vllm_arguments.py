"""Which vLLM there is, and what it is built with: `[engine.vllm]` in vLLM's own names, and what Stretto decides."""

from __future__ import annotations

import dataclasses
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from stretto.errors import StrettoError, nearest

OLDEST, TOO_NEW = (0, 32), (0, 33)
"""Versions of vLLM from the one to before the other: those that are tested."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is stepped here
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one whose sampler Stretto replaces
}
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
CPU_KV_CACHE = 1 << 30  # bytes; vLLM's own default is nearly all memory


def require_vllm() -> str:
    """The version of vLLM that is installed. Imports it: seconds.

    Raises StrettoError if there is none, it cannot be imported, or it is one that Stretto does not know.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise StrettoError(f'engine.kind = "vllm": vLLM cannot be imported: {error}') from error
        raise StrettoError(
            "engine.kind = \"vllm\" needs vLLM: pip install '.[vllm]' in a clone of Stretto (where there is no GPU it "
            'has a build for CPUs: docs/vllm.md), or use engine.kind = "embedded"'
        ) from error
    except Exception as error:  # whatever is broken in it
        raise StrettoError(f'engine.kind = "vllm": vLLM cannot be imported: {error}') from error
    version = str(vllm.__version__)
    check_version(version)
    return version


def check_version(version: str) -> None:
    """Raises StrettoError unless the version is among those that are tested."""
    digits = version.split("+")[0].split(".")[:2]
    found = tuple(int(part) for part in digits if part.isdigit())
    if not OLDEST <= found < TOO_NEW:
        wanted = f">={_dotted(OLDEST)},<{_dotted(TOO_NEW)}"
        raise StrettoError(
            f'engine.kind = "vllm": vLLM {version} is installed, but its model runner is known from {_dotted(OLDEST)} '
            f'to before {_dotted(TOO_NEW)}: pip install "vllm{wanted}"'
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_names(given: Iterable[str]) -> None:
    """Raises StrettoError for the name of an argument that vLLM's engine has not."""
    from vllm import EngineArgs

    names = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in given:
        if name not in names:
            raise StrettoError(
                f"engine.vllm.{name}: vLLM has no engine argument of this name; {nearest(name, names, most=5)}"
            )


def engine_arguments(given: Mapping[str, Any], owned: Mapping[str, Any]) -> Any:
    """vLLM's `EngineArgs`: what Stretto decides, and `given`, the user's by vLLM's names.

    Raises StrettoError for a name that vLLM has not.
    """
    import torch
    from vllm import EngineArgs

    check_names(given)
    arguments = {**given, **owned}
    if not torch.cuda.is_available():
        arguments.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE)
        arguments.setdefault("enforce_eager", True)
    return EngineArgs(**arguments)


def build(arguments: Any) -> Any:
    """vLLM's `LLMEngine`, stepped in this process. Raises StrettoError for what vLLM says is wrong."""
    from vllm import LLMEngine

    with _undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return LLMEngine.from_engine_args(arguments)
        except Exception as error:  # of any kind: vLLM checks in many places
            raise StrettoError(
                f'engine.kind = "vllm": vLLM does not start with these arguments of engine.vllm: {reason(error)}'
            ) from error


def reason(error: BaseException) -> str:
    """Of what vLLM raised, what a user can act on: pydantic's messages are lists with addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith("For further information")]
    return "; ".join(kept[:6]) or type(error).__name__


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What vLLM changes for everybody in the process while it starts is put back: the environment, which it has read
    then, the generators, which it seeds, and on CPUs torch's threads, which it forbids to set.
    """
    import torch

    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    set_threads = torch.set_num_threads
    python, legacy, of_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    os.environ.update(ENVIRONMENT)
    answer_for_llvmlite()
    try:
        with one_thread():
            yield
    finally:
        torch.set_num_threads = set_threads
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(of_cpu)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def answer_for_llvmlite() -> None:
    """Have llvmlite's library say that it has no attributes of its own when asked for `__dict__`.

    As it starts, vLLM's build for CPUs looks at every object of every module, and takes what that library answers to
    any name for a dictionary: where numba has been imported before, no worker could start.
    """
    from llvmlite.binding import ffi

    known = getattr(ffi.lib, "_fntab", None)  # functions by name, which is asked first
    if isinstance(known, dict):
        known["__dict__"] = {}


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's threads but one put away on a CPU: beside the caller's, vLLM's in the same process are five times slower
    with more.
    """
    import torch

    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    if torch.cuda.is_available() or threads == 1:
        yield
        return
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)
