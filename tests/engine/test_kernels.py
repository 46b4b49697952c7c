"""The compiled attention: the same bits from every process, and torch's threads left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import hashlib
import numpy as np, torch
from stretto.engine.attention import key_values
from stretto.engine.packing import Packing

torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
cache = key_values(1, 2, 160, 2, 32, torch.float32, torch.device("cpu"))
digest = hashlib.sha256()
for position in range(150):
    one = np.zeros(1, np.int64)
    seen = (one + position + 1, np.zeros(2, np.int64), one[:0])
    cache.pack(Packing(one, one + 1, one, one + position, *seen, [], one))
    query, key, value = (torch.randn(1, 2, 1, 32, generator=draw) for _ in range(3))
    digest.update(cache(0, query, key, value, 0.2).numpy().tobytes())
print(digest.hexdigest(), torch.get_num_threads())
"""


def attend(cache: Path) -> list[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_every_process_computes_the_same_bits_and_keeps_torchs_threads(tmp_path: Path) -> None:
    compiled, loaded = attend(tmp_path), attend(tmp_path)
    assert any(tmp_path.rglob("*.nbc"))  # the second process had a cache to load from
    assert compiled == loaded
    assert loaded[1] == "1"
