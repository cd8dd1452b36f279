"""Who is lost is noticed, and nobody else is."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from forerun.runtime.parallel.links import Link, Watch
from forerun.runtime.parallel.messages import Kind, RankMessage


def until(found: Callable[[], object]) -> float:
    """Seconds until it is true; fails after 10."""
    begun = time.monotonic()
    while not found():
        assert time.monotonic() - begun < 10
        time.sleep(0.01)
    return time.monotonic() - begun


def test_the_lost_are_told_from_the_living() -> None:
    """Rank 1 lives and speaks, rank 2 closes its socket, rank 3 says nothing."""
    pairs = {rank: socket.socketpair() for rank in (1, 2, 3)}
    near = {rank: Link(pair[0]) for rank, pair in pairs.items()}
    far = {rank: Link(pair[1]) for rank, pair in pairs.items()}
    lost, arrived, never = dict[int, str](), list[tuple[int, RankMessage]](), list[tuple[int, str]]()
    watch = Watch(near, 1.5, lambda *told: arrived.append(told), lambda rank, why: lost.update({rank: why}))
    living = Watch({0: far[1]}, 1.5, lambda *told: None, lambda *told: never.append(told))
    watch.start()
    living.start()
    far[2].close()
    assert until(lambda: 2 in lost) < 1 and "ended" in lost[2]
    assert until(lambda: 3 in lost) > 0.5 and "nothing was heard of it for 1.5 s" in lost[3]
    message = RankMessage(Kind.DIGEST, [4, 2**40], ["", "text"])
    far[1].send(message.kind, message.encode())
    until(lambda: arrived)
    assert set(lost) == {2, 3} and not never
    assert [(rank, RankMessage(told.kind, list(told.numbers), told.texts)) for rank, told in arrived] == [(1, message)]
    watch.stop()
    living.stop()
    for link in (*near.values(), *far.values()):
        link.close()


def test_what_is_no_message_ends_a_link() -> None:
    ours, theirs = socket.socketpair()
    lost = dict[int, str]()
    watch = Watch({1: Link(ours)}, 5, lambda *told: None, lambda rank, why: lost.update({rank: why}))
    watch.start()
    theirs.sendall(b"GET / HTTP/1.1\r\n")
    until(lambda: lost)
    assert "none of forerun's" in lost[1]
    theirs.close()
