"""What must hold of a ledger after every batch of events, recomputed from its columns (design section 7)."""

from __future__ import annotations

import numpy as np

from stretto.buffer import ENDED, Ledger
from stretto.records import State


def check(ledger: Ledger) -> None:
    """Every index equals its recomputation; lengths agree; no worker is given more than it has."""
    c, first = ledger.columns, ledger.first_id
    state = c.state[: c.size]

    def ids(*states: State) -> set[int]:
        return {int(row) + first for row in np.flatnonzero(np.isin(state, states))}

    assert set(ledger.waiting) == ids(State.PENDING, State.PARKED)
    assert set(ledger.scored) == ids(State.SCORED)
    running = ids(State.RUNNING)
    assert {i for held in ledger.running.values() for i in held} == running
    for worker, held in ledger.running.items():
        assert all(c.worker[i - first] == worker for i in held)
    alive = set(range(first, first + c.size)) - ids(*ENDED)
    assert ledger.alive == len(alive)
    for group, members in ledger.members.items():
        states = [State(state[i - first]) for i in members]
        if all(s in ENDED for s in states):
            assert any(i in ledger._to_log for i in members), "an ended group is kept only until it is logged"
            continue
        unscored = sum(s not in (State.SCORED, *ENDED) for s in states)
        assert ledger.unscored[group] == unscored
        assert (group in ledger.ready_groups) == all(s == State.SCORED for s in states)
    for request_id, tokens in ledger.tokens.items():
        length = int(c.length[request_id - first])
        assert length == len(tokens.ids) == len(tokens.logprobs) == len(tokens.raw_logprobs)
        assert length == sum(count for _, _, count in tokens.runs)
    assert (c.length[: c.size] <= ledger.sampling.max_new_tokens).all()
    assert (c.accepted[: c.size] <= np.minimum(c.drafted, c.length)[: c.size]).all()
