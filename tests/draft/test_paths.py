"""What became of paths, against trees judged one token at a time."""

from __future__ import annotations

import numpy as np

from stretto.draft.paths import judge


def test_paths_are_judged_by_what_was_said() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        requests = int(random.integers(1, 6))
        counts, emitted = random.integers(0, 5, (2, requests))
        said = random.integers(0, 2, 60).astype(np.int32)
        begins = random.integers(0, 50, requests)
        drafted = random.integers(0, 2, counts.sum())
        reached, accepted, tokens = judge(counts, drafted, begins, emitted, said)
        expected = [said[b : b + n].tolist() for b, n in zip(begins, emitted, strict=True)]
        assert tokens.tolist() == [token for some in expected for token in some]
        node = 0
        for path, some in zip(np.split(drafted, np.cumsum(counts)[:-1]), expected, strict=True):
            going = True
            for depth, token in enumerate(path.tolist()):
                going = going and depth < len(some)
                assert reached[node] == going
                going = going and some[depth] == token
                assert accepted[node] == going
                node += 1
