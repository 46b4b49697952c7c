from __future__ import annotations

import json

from stretto.draft.pauses import HARDLY, LATELY, Pauses


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
    assert not pauses.paused


def test_begins_end_a_pause_where_nodes_are_found_at_times() -> None:
    pauses = Pauses(16)
    asked(pauses, 8, nodes=1)
    assert 8 * LATELY > HARDLY
    asked(pauses, 20)
    pauses.begin()
    assert asked(pauses, 8) == [1, 3, 7]


def test_begins_at_every_step_do_not_have_every_step_asked() -> None:
    pauses = Pauses(16)
    steps = []
    for step in range(64):
        pauses.begin()
        if pauses.ask(needed=False):
            pauses.found(0)
            steps.append(step)
    assert steps == [0, 1, 2, 4, 8, 16, 32, 48]


def test_state() -> None:
    pauses, other = Pauses(16), Pauses(16)
    asked(pauses, 5, nodes=1)
    asked(pauses, 7)
    other.load_state_dict(json.loads(json.dumps(pauses.state_dict())))
    assert other.state_dict() == pauses.state_dict()
    assert asked(other, 60) == asked(pauses, 60)
