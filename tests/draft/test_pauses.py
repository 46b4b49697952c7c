from __future__ import annotations

import json

from stretto.draft.pauses import CREDIT, EARNED, RENEWED, Pauses


def asked(pauses: Pauses, steps: int, nodes: int = 0) -> list[int]:
    """Which of so many steps are asked, each of which then has `nodes` nodes."""
    found = []
    for step in range(1, steps + 1):
        if pauses.ask(needed=False):
            found.append(step)
            pauses.found(nodes)
    return found


def test_in_vain_it_is_asked_ever_more_seldom() -> None:
    assert asked(Pauses(16), 70) == [1, 2, 3, 5, 9, 17, 33, 49, 65]


def test_a_pause_of_one_step_is_none() -> None:
    assert asked(Pauses(1), 20) == list(range(1, 21))


def test_a_node_ends_the_pauses() -> None:
    pauses = Pauses(16)
    asked(pauses, 20)
    pauses.found(3)
    assert asked(pauses, 8, nodes=1) == list(range(1, 9))


def test_what_is_needed_is_asked() -> None:
    pauses = Pauses(16)
    asked(pauses, 20)
    assert pauses.ask(needed=True)


def begins_at_every_step(pauses: Pauses, steps: int) -> list[int]:
    found = []
    for step in range(1, steps + 1):
        pauses.begin()
        if pauses.ask(needed=False):
            found.append(step)
            pauses.found(0)
    return found


def test_a_request_that_begins_ends_a_pause() -> None:
    pauses = Pauses(16)
    asked(pauses, 20)
    pauses.begin()
    assert asked(pauses, 8) == [1, 3, 7]


def test_begins_at_every_step_have_every_step_asked_only_for_a_while() -> None:
    pauses = Pauses(16)
    assert begins_at_every_step(pauses, 100)[:CREDIT] == list(range(1, CREDIT + 1))
    assert len(begins_at_every_step(pauses, 160)) == 10


def test_new_history_and_nodes_have_begins_heard_again() -> None:
    pauses = Pauses(16)
    begins_at_every_step(pauses, 100)
    pauses.renew()
    assert len(begins_at_every_step(pauses, 16)) >= RENEWED
    begins_at_every_step(pauses, 100)
    pauses.found(1)
    assert begins_at_every_step(pauses, 16)[:EARNED] == list(range(1, EARNED + 1))


def test_state() -> None:
    pauses, other = Pauses(16), Pauses(16)
    asked(pauses, 5, nodes=1)
    asked(pauses, 7)
    other.load_state_dict(json.loads(json.dumps(pauses.state_dict())))
    assert other.state_dict() == pauses.state_dict()
    assert asked(other, 60) == asked(pauses, 60)
