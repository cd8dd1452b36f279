"""What the prefix cache asks of slower memory, what it tells others, and by which names.

Knows: when blocks go down and come back. Does not know: who does it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

from forerun.core import Request

if TYPE_CHECKING:
    from forerun.cache.prefix_cache import Node


class LowerTiers(Protocol):
    """Slower memory that blocks of the tree are copied to, and come back from when a request needs them."""

    num_hits: int  # requests whose prefix came back

    def counts(self) -> dict[str, dict[str, int]]:
        """What each tier has counted, by its name."""

    def save(self, nodes: Sequence[Node]) -> int:
        """Begin to store these -> how many, from the first on, need no further call."""

    def save_state(self, node: Node) -> None:
        """Begin to store the recurrent state after this block."""

    def hand_over(self, requests: Sequence[Request]) -> None:
        """If some of the requests have ended, return when their prompts are stored where others reach them.

        What is not there is stored once more. Those with blocks that are still not there get an error.
        """

    def take_done(self) -> None:
        """Put into the tree what has been read. It overwrites free blocks: no request may be about to copy from one."""

    def is_reading(self, request: Request) -> bool:
        """Whether blocks of this waiting request are being read, or have been since the last `take_done`."""

    def pause(self) -> None:
        """Nobody runs: wait a moment for what is being read, if anything is."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prompt's tokens took so long."""


class Listener(Protocol):
    """Hears which blocks the tree has."""

    def stored(self, node: Node, request: Request) -> None:
        """The block was added, with the adapter and salt of this request."""

    def removed(self, node: Node) -> None:
        """The pool has evicted the block."""


def chained(key: bytes, tokens: tuple[int, ...]) -> bytes:
    """The key of the block of these tokens that follows the block of this key."""
    return sha256(key + array("q", tokens).tobytes()).digest()


def state_key(key: bytes) -> bytes:
    """The key of the recurrent state after the block of this key."""
    return key[:-1] + bytes([key[-1] ^ 1])
