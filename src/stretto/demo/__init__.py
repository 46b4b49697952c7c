"""The demo: a tiny model that half knows Knights and Knaves, shipped with the package."""

from __future__ import annotations

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"
