"""Messages between the server and the processes that work on grammars.

Knows: sockets, and how a message is framed: JSON after its length in four bytes, with a file descriptor if one is
handed over; and how masks are requested and answered, without JSON. Does not know: grammars.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple

ASK = struct.Struct("<II")  # asks for a mask: tokens kept of the last prefix, new tokens (sent after it, 32 bits each)
ALL, SOME = b"\0", b"\1"  # the mask: any token may follow, or those in the bits after it
FORCED = struct.Struct("<H")  # behind the mask: bytes of the text that alone may follow (sent after it, UTF-8)


class Received(NamedTuple):
    """A message, and the socket that came with it."""

    value: dict[str, Any]
    handed: socket.socket | None


def send(channel: socket.socket, value: dict[str, Any], hand: socket.socket | None = None) -> None:
    """Send a message. Raises OSError if the other side is gone."""
    raw = json.dumps(value).encode()
    hand_over(channel, struct.pack("<I", len(raw)), [hand.fileno()] if hand else [])
    channel.sendall(raw)


def hand_over(channel: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send a few bytes together with descriptors. Raises OSError if the other side is gone."""
    sent = socket.send_fds(channel, [data], list(descriptors))
    channel.sendall(data[sent:])


def receive(channel: socket.socket, timeout_s: float | None = None) -> Received | None:
    """The next message; None if the other side is gone or takes longer."""
    give_up = None if timeout_s is None else monotonic() + timeout_s
    try:
        header, handed = receive_handed(channel, 4, give_up)
        raw = header and _exactly(channel, struct.unpack("<I", header)[0], give_up)
    except OSError:  # a time-out is one of them
        return None
    return Received(json.loads(raw), handed) if raw else None


def receive_handed(
    channel: socket.socket, num_bytes: int, give_up: float | None = None
) -> tuple[bytes, socket.socket | None]:
    """`num_bytes` bytes and the socket that came with them; b"" at the end. Raises OSError, TimeoutError."""
    _set_timeout(channel, give_up)
    data, descriptors, _, _ = socket.recv_fds(channel, num_bytes, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    handed = socket.socket(fileno=descriptors[0]) if descriptors else None
    rest = _exactly(channel, num_bytes - len(data), give_up) if data else b""
    return (b"", None) if rest is None else (data + rest, handed)


def _exactly(channel: socket.socket, num_bytes: int, give_up: float | None) -> bytes | None:
    """Read `num_bytes` bytes; None if the other side is gone."""
    parts = []
    while num_bytes > 0:
        _set_timeout(channel, give_up)
        part = channel.recv(min(num_bytes, 1 << 20))
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _set_timeout(channel: socket.socket, give_up: float | None) -> None:
    channel.settimeout(None if give_up is None else max(give_up - monotonic(), 0.001))


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Length of the common prefix, by bisection: slices compare at the speed of C."""
    low, high = 0, min(len(ours), len(theirs))
    a, b = tuple(ours[:high]), tuple(theirs[:high])
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
