"""Compiled kernels don't check the places that they write to; the same code as Python does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import numpy as np
from stretto.alternatives import Alternatives
from stretto.draft import Verified
from stretto.draft.budget import Fixed
from stretto.draft.drafter import HistoryDrafter
from stretto.history.index import HistoryIndex
from tests.draft.engine import request, rollout

width, nodes, vocabulary = map(int, sys.argv[1:])
draw = np.random.default_rng(0)
index = HistoryIndex(window=2, weight="probability", alternatives=True)
drafter = HistoryDrafter(index, Fixed(nodes), slots=1, max_nodes=nodes)
texts = []
for _ in range(6):
    text = rollout(draw.integers(0, vocabulary, 25).tolist(), probability=0.02)
    ids = np.stack([draw.choice(max(width, vocabulary), width, replace=False) for _ in range(25)])
    text.top = Alternatives(ids.astype(np.int32), np.full(ids.shape, np.log(0.9 / width), np.float32))
    texts.append(text)
drafter.remember(texts)
drafter.begin(0, request(0))
drafted = 0
for step, token in enumerate(texts[0].token_ids[:12]):
    drafts = drafter.propose(np.array([0]), np.array([step]), np.array([20]), 1, 64)
    drafted += drafts.token_ids.size
    none = np.zeros(drafts.token_ids.size, np.bool_)
    drafter.observe(np.array([0]), drafts, Verified(none, none, np.array([1])), np.array([token]))
print(drafted)
"""


@pytest.mark.parametrize(("width", "nodes", "vocabulary"), [(32, 1, 6), (32, 5, 400), (16, 5, 6), (1, 1, 3)])
def test_many_alternatives_and_children_fit(width: int, nodes: int, vocabulary: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(width), str(nodes), str(vocabulary)],
        cwd=ROOT,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
