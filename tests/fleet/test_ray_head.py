"""Whether the head of a cluster is missed when it has gone, and only then. Without Ray."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from stretto.fleet import ray_head
from stretto.fleet.ray_head import RAYS_KEY, SHARE, Head, HeadLost


class Clock:
    """Seconds, one more with every look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_head, "time", clock)
    monkeypatch.setenv(RAYS_KEY, "20")
    return clock


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server: socket.socket) -> str:
    return "{}:{}".format(*server.getsockname())


def look(head: Head, times: int) -> None:
    for _ in range(times):
        head.look()


def test_a_head_that_has_gone_is_missed_before_ray_ends_the_program(
    listening: socket.socket, clock: Clock
) -> None:
    head = Head(address(listening))
    look(head, 100)
    listening.close()
    began = clock.now
    with pytest.raises(HeadLost, match=r"head .* does not answer any more.*`stretto resume`"):
        look(head, 100)
    assert SHARE * 20 < clock.now - began < 20
    assert head.lost
    with pytest.raises(HeadLost):
        head.look()


def test_a_head_that_comes_back_in_time_has_not_been_missed(listening: socket.socket, clock: Clock) -> None:
    head = Head(address(listening))
    look(head, 20)
    name = listening.getsockname()
    for _ in range(3):
        listening.close()
        look(head, 4)
        with socket.create_server(name) as again:
            look(head, 4)
        listening = again


def test_a_pause_of_this_process_is_not_the_heads(listening: socket.socket, clock: Clock) -> None:
    head = Head(address(listening))
    look(head, 10)
    clock.now += 1000.0
    listening.close()
    look(head, 3)


def test_a_head_that_was_never_reached_is_not_missed(listening: socket.socket, clock: Clock) -> None:
    """As that of a cluster which Ray's client reaches by another address."""
    listening.close()
    head = Head("127.0.0.1:9")
    look(head, 100)
    assert clock.now > 100


def test_with_a_worker_a_head_that_has_gone_is_missed_at_once(listening: socket.socket, clock: Clock) -> None:
    head = Head(address(listening))
    head.look_again()
    listening.close()
    with pytest.raises(HeadLost):
        head.look_again()
