"""Connections between the leader and its followers: messages, beats that show who lives, and who does not.

Knows: sockets, time limits. Does not know: what messages mean, models.

Every second each side sends a beat, from a thread of its own; a process that was stopped sends none, one that died
closes its sockets. Nobody else could tell a rank that hangs from one that computes for long.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from threading import Event, Lock, Thread

from forerun.runtime.parallel.messages import Kind, RankMessage

BEAT_S = 1.0
_MOST_BYTES = 1 << 28  # of one message; more is not ours


ENDED = "its process ended"


class LinkClosed(Exception):
    """The other side has closed the connection, or what it sent is no message."""


class AllEnd(LinkClosed):
    """The other side has said why all ranks end."""


def _closed(error: Exception) -> LinkClosed:
    return LinkClosed(f"{ENDED} ({error})")


class Link:
    """One end of a connection. One thread reads; any may send."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes the socket over."""
        with suppress(OSError):  # sockets of one machine have nothing to wait for
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        self._socket = connected
        self._lock = Lock()
        self._unread = bytearray()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, kind: Kind, body: bytes) -> None:
        """Send a message that is encoded. Raises LinkClosed."""
        try:
            with self._lock:
                self._socket.sendall(len(body).to_bytes(4, "little") + bytes([kind]) + body)
        except OSError as error:
            raise _closed(error) from error

    def send_if_room(self, message: RankMessage) -> None:
        """Send a short message, unless another is on its way or nobody reads: never waits. Raises LinkClosed."""
        try:
            has_room = bool(select.select([], [self._socket], [], 0)[1])
        except (OSError, ValueError) as error:  # the latter of a socket that was closed here
            raise _closed(error) from error
        if has_room and not self._lock.locked():
            self.send(message.kind, message.encode())

    def receive(self) -> Iterator[RankMessage]:
        """The whole messages among what has arrived; waits for some bytes. Raises LinkClosed."""
        try:
            arrived = self._socket.recv(1 << 16)
        except OSError as error:
            raise _closed(error) from error
        if not arrived:
            raise LinkClosed(ENDED)
        self._unread += arrived
        while len(self._unread) >= 5:
            size, kind = int.from_bytes(self._unread[:4], "little"), self._unread[4]
            if size > _MOST_BYTES:
                raise LinkClosed(f"a message of {size} bytes was announced, which is none of forerun's")
            if len(self._unread) < 5 + size:
                return
            body = bytes(self._unread[5 : 5 + size])
            del self._unread[: 5 + size]
            try:
                yield RankMessage.decode(kind, body)
            except ValueError as error:
                raise LinkClosed(str(error)) from error

    def wait_for(self, kind: Kind, limit_s: float) -> RankMessage:
        """The next message that is no beat.

        Raises LinkClosed for another kind, and where nothing comes in time; AllEnd if the other side says why.
        """
        until = time.monotonic() + limit_s
        while select.select([self._socket], [], [], max(0.0, until - time.monotonic()))[0]:
            for message in self.receive():
                if message.kind == kind:
                    return message
                if message.kind == Kind.LOST:
                    raise AllEnd(message.texts[0])
                if message.kind != Kind.BEAT:
                    raise LinkClosed(f"{message.kind.name} came in place of {kind.name}")
        raise LinkClosed(f"nothing came for {limit_s:g} s")

    def close(self) -> None:
        """Both directions; whoever waits for bytes notices."""
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Watch:
    """A thread that beats on every link, hands on what arrives, and says who is lost."""

    def __init__(
        self, links: Mapping[int, Link], limit_s: float, arrived: Callable[[int, RankMessage], None],
        lost: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        """links by rank. arrived(rank, message) is called for all but beats, lost(rank, why) once for a rank.

        limit_s: of silence.
        """
        self._links = dict(links)
        self._limit_s = limit_s
        self._arrived = arrived
        self._lost = lost
        self._ended = Event()
        self._heard: dict[int, float] = {}
        self._thread = Thread(target=self._run, name="forerun-ranks", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """No more beats, and nobody is lost any more."""
        self._ended.set()

    def _run(self) -> None:
        self._heard = dict.fromkeys(self._links, time.monotonic())
        next_beat = looked = 0.0
        while not self._ended.is_set() and self._links:
            now = time.monotonic()
            if looked and now - looked > self._limit_s / 2:  # it is this process that was stopped
                self._heard = dict.fromkeys(self._links, now)
            looked = now
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._each(list(self._links), self._beat)
            try:
                readable = select.select(list(self._links.values()), [], [], BEAT_S / 2)[0]
            except (OSError, ValueError):  # a link was closed beside us
                readable = list(self._links.values())
            self._each([rank for rank, link in self._links.items() if link in readable], self._read)
            self._each(list(self._links), self._check)

    def _beat(self, rank: int) -> None:
        self._links[rank].send_if_room(RankMessage(Kind.BEAT))

    def _read(self, rank: int) -> None:
        self._heard[rank] = time.monotonic()
        for message in self._links[rank].receive():
            if message.kind != Kind.BEAT:
                self._arrived(rank, message)

    def _check(self, rank: int) -> None:
        if time.monotonic() - self._heard[rank] > self._limit_s:
            raise LinkClosed(f"nothing was heard of it for {self._limit_s:g} s: it hangs, or was stopped")

    def _each(self, ranks: list[int], work: Callable[[int], None]) -> None:
        for rank in ranks:
            try:
                work(rank)
            except LinkClosed as error:
                del self._links[rank]
                if not self._ended.is_set():
                    self._lost(rank, str(error))
