"""What must hold of a ledger after every batch of events, recomputed from its columns (design section 7)."""

from __future__ import annotations

import numpy as np

from stretto.buffer import Ledger
from stretto.records import Progress, State

ENDED = (State.CONSUMED, State.DISCARDED)


def check(ledger: Ledger) -> None:
    """Every index equals its recomputation; lengths agree; no worker is given more than it has."""
    c, first = ledger.columns, ledger.first_id
    state = c.state[: c.size]

    def ids(*states: State) -> set[int]:
        return {int(row) + first for row in np.flatnonzero(np.isin(state, states))}

    assert set(ledger.waiting) == ids(State.PENDING, State.PARKED), "what waits"
    assert set(ledger.scored) == ids(State.SCORED), "what is scored"
    running = ids(State.RUNNING)
    assert {i for held in ledger.running.values() for i in held} == running, "what runs"
    for worker, held in ledger.running.items():
        assert all(c.worker[i - first] == worker for i in held)
    alive = set(range(first, first + c.size)) - ids(*ENDED)
    assert ledger.alive == len(alive)
    groups = ledger.groups
    for group, members in groups.members.items():
        states = [State(state[i - first]) for i in members]
        assert State.DISCARDED not in states
        if all(s in ENDED for s in states):
            assert group not in groups.unscored
            assert group not in groups.ready
            continue
        unscored = sum(s not in (State.SCORED, *ENDED) for s in states)
        assert groups.unscored[group] == unscored, f"group {group}: members without reward"
        assert (group in groups.ready) == (unscored == 0), f"group {group}: whether it is ready"
    living = {int(c.group[i - first]) for i in alive}
    assert set(groups.unscored) == living
    assert set(groups.ready) <= living
    logged = {int(c.group[i - first]) for i in ledger._to_log}
    assert set(groups.members) == set(groups.prompts) == living | logged, "kept until logged, and no longer"
    check_staleness(ledger)
    unlogged = ledger._to_log.keys()
    assert ledger._records.keys() <= ids(State.FINISHED, State.SCORED) | unlogged, "a record of what is over"
    assert ledger.tokens.keys() | ledger.drafts.keys() <= alive | unlogged, "tokens of what is over"
    for request_id, tokens in ledger.tokens.items():
        length = int(c.length[request_id - first])
        assert length == len(tokens.ids) == len(tokens.logprobs) == len(tokens.raw_logprobs)
        starts = [start for _, _, start in tokens.runs]
        assert starts == sorted(starts)
        assert starts[:1] == [0] if length else not starts
    assert (c.length[: c.size] <= ledger.sampling.max_new_tokens).all()
    assert (c.accepted[: c.size] <= np.minimum(c.drafted, c.length)[: c.size]).all()


def check_progress(event: Progress) -> None:
    """Each request once, and as many tokens as are counted."""
    ids = event.ids.tolist()
    assert len(set(ids)) == len(ids) == event.attempts.size == event.counts.size
    assert (event.counts > 0).all()
    for column in (event.token_ids, event.logprobs, event.raw_logprobs):
        assert column is None or column.size == event.counts.sum()


def check_staleness(ledger: Ledger) -> None:
    """With a gate, nothing that has ended is too old for the next update."""
    if ledger.max_staleness is None:
        return
    c = ledger.columns
    ended = np.isin(c.state[: c.size], (State.FINISHED, State.SCORED))
    oldest = c.first_version[: c.size][ended]
    assert (ledger.version - oldest[oldest >= 0] <= ledger.max_staleness).all()
