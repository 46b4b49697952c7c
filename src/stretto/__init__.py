"""Stretto: RL post-training of language models that turns its own history into speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stretto.config import Config
    from stretto.errors import StrettoError
    from stretto.run import RunResult
    from stretto.trainer import Trainer, evaluate, train

__all__ = ["Config", "RunResult", "StrettoError", "Trainer", "__version__", "evaluate", "train"]

_WHERE = {
    "Config": "stretto.config",
    "StrettoError": "stretto.errors",
    "RunResult": "stretto.run",
    "Trainer": "stretto.trainer",
    "evaluate": "stretto.trainer",
    "train": "stretto.trainer",
}


def __getattr__(name: str) -> Any:
    """Loaded on first use: `import stretto` itself needs no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
