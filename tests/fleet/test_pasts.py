"""What is kept for workers to come."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from stretto.alternatives import Alternatives
from stretto.fleet import pasts
from stretto.fleet.messages import Past
from stretto.fleet.pasts import Pasts, messages
from stretto.history.index import HistoryIndex, Response
from stretto.records import Prompt, Rollout


def past(uid: str, visit: int, tokens: int = 10) -> Past:
    return Past(uid, visit, np.full(tokens, visit, np.int32), np.zeros(tokens, np.float32), 0.0, None)


def names(kept: Pasts) -> list[tuple[str, int]]:
    return [(each.uid, each.visit) for each in kept.all()]


def test_visits_count_by_prompt() -> None:
    kept = Pasts(2, 1 << 20)
    kept.add([past("a", -5), past("b", -5), past("a", -4)])
    kept.add([past("a", 0), past("a", 0), past("a", -6)])
    assert names(kept) == [("b", -5), ("a", -4), ("a", 0), ("a", 0)]
    assert kept.nbytes == 4 * 80


def test_bytes_are_bounded_and_the_longest_unvisited_prompt_loses_its_oldest_visit() -> None:
    kept = Pasts(3, 5 * 80)
    kept.add([past("a", 0), past("b", 0), past("a", 1), past("b", 1), past("c", 1)])
    kept.add([past("c", 2)])
    assert names(kept) == [("a", 1), ("b", 0), ("b", 1), ("c", 1), ("c", 2)]
    kept.add([past("d", 2, tokens=40)])
    assert names(kept) == [("c", 2), ("d", 2)]
    kept.add([past("e", 3, tokens=51)])
    assert names(kept) == []
    assert kept.nbytes == 0


def test_messages_are_small_and_tell_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pasts, "MESSAGE", 200)
    told = [past("a", visit) for visit in range(7)]
    parts = [pickle.loads(message).pasts for message in messages(told)]  # noqa: S301 -- our own
    assert [len(part) for part in parts] == [3, 3, 1]
    assert [each.visit for part in parts for each in part] == list(range(7))
    assert list(messages([])) == []


def test_a_drafters_index_makes_the_same_of_it() -> None:
    """Rounded as in the log, and without what a user's rows and rewards may have put there."""
    ids, rng = np.array([3, 1, 3, 1, 2]), np.random.default_rng(0)
    logprobs = -rng.exponential(size=5)
    top = Alternatives(np.array([[i, 7] for i in ids], np.int32), np.log(np.full((5, 2), 0.4, np.float32)))
    rollout = Rollout(
        1, 1, Prompt(0, "a", 0, ids, {"f": print}), 0, 2, 0, ids, logprobs, logprobs, ids, ids > 0, top=top
    )
    rollout.reward, rollout.reward_parts = 0.5, {"f": 0.5}
    sent: Past = pickle.loads(pickle.dumps(Past.of(rollout)))  # noqa: S301 -- our own
    back = sent.rollout()
    assert (back.prompt.uid, back.visit, back.reward) == ("a", 2, 0.5)
    assert sent.nbytes == 5 * (4 + 4 + 2 * 8)

    def index(of: Rollout) -> HistoryIndex:
        made = HistoryIndex(weight="probability", alternatives=True)
        made.add("a", 2, [Response(of.token_ids, of.logprobs, of.reward, of.top)])
        made.wait(["a"])
        made.open("a")
        return made

    one, other = index(rollout).arrays(), index(back).arrays()
    for name in ("link", "length", "counts", "weight", "token", "target"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
