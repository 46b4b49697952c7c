"""Drafting's kernels, compiled before they are needed."""

from __future__ import annotations

from functools import cache

import numpy as np

from stretto.draft import Drafts, Verified, no_drafts
from stretto.draft.budget import Batch, Goodput
from stretto.draft.calibration import Calibration
from stretto.draft.cost import CostModel
from stretto.draft.counters import Counters
from stretto.draft.dropped import path_estimates
from stretto.draft.follow import Said, follow, follow_history, grow_at, nowhere
from stretto.draft.paths import judge
from stretto.draft.tree import Rules, room_for
from stretto.history.automaton import LivePool, find_text, match_live
from stretto.history.frozen import Arena, freeze
from stretto.history.mixtures import join_rows, rows_of


@cache
def compile_kernels() -> None:
    """Compile, or load from numba's cache, everything that drafting calls: at set-up, so that no step has to."""
    one, text = np.zeros(1, np.int64), np.array([3, 0, 1, 0, 2], np.int64)
    size = np.array([text.size])
    pool = LivePool()
    group, last = np.array([pool.open()]), np.zeros(1, np.int64)
    last[0] = pool.root(int(group[0]))
    pool.extend(group, last, size, text)
    find_text(pool.arrays, int(group[0]), text)
    match_live(pool.arrays, int(last[0]))
    arena, tokens = Arena(weighted=True, mixed=True), text.astype(np.int32)
    rows = join_rows([rows_of(tokens, np.ones(text.size, np.float32), None)])
    arena.add(freeze(tokens, np.array([0, text.size]), np.ones(text.size), rows))
    at, calibration, grown = nowhere(1), Calibration(), room_for(1, 2)
    said = Said(one, one * 0, text[:0])
    follow(arena.arrays, pool.arrays, at, said)
    follow_history(arena.arrays, at, said)
    path_estimates(calibration.table, 1)
    rules, key = Rules(2, True, True, True), np.zeros(1, np.uint64)
    table = calibration.table
    rooms = one + 2
    counts, _ = grow_at(arena.arrays, pool.arrays, at, said, key, one, one, rooms, table, rules, 0.0, grown)
    none = grown.rows != 0
    sources = grown.sources.astype(np.int8)
    drafts = Drafts(counts, grown.token_ids, grown.parents, grown.depth, grown.estimates, sources)
    Counters().add(drafts.select(none), Verified(none[:0], none[:0], counts))
    judge(counts, grown.token_ids, one, one, tokens)
    calibration.learn(grown.raw, grown.rows, grown.depth, none, none)
    cost = CostModel()
    cost.fit([(1, 1.0), (2, 1.0)])
    Goodput(cost).choose(no_drafts(1), Batch(one, one, 1))
    pool.close(int(group[0]))
