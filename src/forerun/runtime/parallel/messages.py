"""What the leader tells its followers, as bytes: whole numbers and short texts.

Knows: how passes and what happens between them are written and read. Does not know: sockets, what followers do.

A message is a kind, numbers of 64 bits and texts without zero bytes. Followers lay a batch out from the same
sequences as the leader, so what travels of a pass is what the scheduler decided and not the tensors made from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from forerun.models.base import CommittedPath
from forerun.models.batch import SequenceRows

_WORD = 1 << 64


class Kind(IntEnum):
    """What a message is about."""

    BEAT = 0  # the sender lives
    HELLO = 1  # a follower: who it is
    CONFIG = 2  # the leader: what to load
    READY = 3  # a follower has done what it was told, or could not: the answer to that
    LOST = 4  # all end, with this error
    END = 5  # all end
    OPEN = 6  # an engine: its pool and slots
    CLOSE = 7
    PASS = 8
    MOVE = 9  # rows of the pool
    COMMIT = 10
    RELEASE = 11  # a request's recurrent state
    STATES = 12  # kept states: a call of the prefix cache
    DIGEST = 13  # a follower: what a pass gave
    ADAPTER = 14  # read one; READY says why not, if so
    FORGET = 15  # an adapter
    TIERS = 16  # a call of the leader's tiers of KV
    ANSWER = 17  # a follower: to a call that has a number


class StateCall(IntEnum):
    """What the prefix cache does with a kept state."""

    KEEP = 0
    RESTORE = 1
    FORGET = 2


class TierCall(IntEnum):
    """What followers do with their parts of blocks."""

    DESCRIBE = 0  # say what their bits depend on: READY
    OPEN = 1  # a folder for them: READY
    SAVE = 2  # ANSWER, when that is done, which of them this rank does not have
    SAVE_STATE = 3  # so, of states
    TOUCH = 4  # they were used; ANSWER as to SAVE
    READ = 5  # ANSWER says how many blocks there are, and whether the state is
    FILL = 6  # blocks of the pool with what was read
    FILL_STATE = 7
    DROP = 8  # what was read
    FLUSH = 9  # ANSWER, when all is written, which of these tiers do not have


class RankMessage(NamedTuple):
    """One message."""

    kind: Kind
    numbers: Sequence[int] = ()
    texts: Sequence[str] = ()

    def encode(self) -> bytes:
        """The bytes after the kind."""
        numbers = array("q", self.numbers)
        counts = array("q", (len(numbers), len(self.texts)))
        return counts.tobytes() + numbers.tobytes() + "\0".join(self.texts).encode()

    @staticmethod
    def decode(kind: int, body: bytes) -> RankMessage:
        """The message of `encode`; raises ValueError for other bytes."""
        num_numbers, num_texts = array("q", body[:16]) if len(body) >= 16 else (-1, 0)
        end = 16 + 8 * num_numbers
        if not 16 <= end <= len(body):
            raise ValueError(f"a message of {len(body)} bytes is cut short")
        texts = body[end:].decode().split("\0") if num_texts else []
        if len(texts) != num_texts:
            raise ValueError(f"a message has {len(texts)} texts, which announced {num_texts}")
        return RankMessage(Kind(kind), array("q", body[16:end]), texts)


class PassOrder(NamedTuple):
    """One forward pass of one engine's model."""

    engine: int
    number: int  # of all passes, from 1
    is_checked: bool  # whether ranks tell what it gave
    hidden_layers: tuple[int, ...]
    sequences: tuple[SequenceRows, ...]
    adapters: tuple[int, ...] = ()  # of each sequence, 0 for none; () if none has one

    def message(self) -> RankMessage:
        """What the leader sends."""
        numbers = [self.engine, self.number, int(self.is_checked)]
        _put(numbers, self.hidden_layers)
        _put(numbers, self.adapters)
        for rows in self.sequences:
            _put_rows(numbers, rows)
        return RankMessage(Kind.PASS, numbers, [rows.request_id for rows in self.sequences])

    @staticmethod
    def read(message: RankMessage) -> PassOrder:
        """What a follower reads."""
        numbers = iter(message.numbers)
        engine, number, is_checked = next(numbers), next(numbers), bool(next(numbers))
        hidden_layers, adapters = tuple(_take(numbers)), tuple(_take(numbers))
        rows = tuple(_take_rows(numbers, request_id) for request_id in message.texts)
        return PassOrder(engine, number, is_checked, hidden_layers, rows, adapters)


class NamedBlock(NamedTuple):
    """A block, and the name that the leader's tiers have for it."""

    key: bytes
    depth: int  # blocks in front of it
    tokens: tuple[int, ...]
    block: int = -1  # of the pool; -1: it is in none
    has_state: bool = False  # tiers have the recurrent state after it


class TierOrder(NamedTuple):
    """A call of the leader's tiers of one engine."""

    engine: int
    call: TierCall
    number: int = 0  # of what is read or awaited
    numbers: Sequence[int] = ()
    blocks: Sequence[NamedBlock] = ()

    def message(self) -> RankMessage:
        """What the leader sends."""
        numbers = [self.engine, self.call, self.number]
        _put(numbers, self.numbers)
        for each in self.blocks:
            numbers += (each.depth, each.block, int(each.has_state))
            _put(numbers, each.tokens)
        return RankMessage(Kind.TIERS, numbers, [each.key.hex() for each in self.blocks])

    @staticmethod
    def read(message: RankMessage) -> TierOrder:
        """What a follower reads."""
        numbers, blocks = iter(message.numbers), list[NamedBlock]()
        engine, call, number, own = next(numbers), TierCall(next(numbers)), next(numbers), _take(numbers)
        for key in message.texts:
            depth, block, has_state = next(numbers), next(numbers), bool(next(numbers))
            blocks.append(NamedBlock(bytes.fromhex(key), depth, tuple(_take(numbers)), block, has_state))
        return TierOrder(engine, call, number, own, blocks)


def commit_message(engine: int, paths: Sequence[CommittedPath]) -> RankMessage:
    """Where sequences stand after a pass."""
    numbers = [engine]
    for path in paths:
        _put(numbers, path.nodes)
    return RankMessage(Kind.COMMIT, numbers, [path.request_id for path in paths])


def read_commit(message: RankMessage) -> list[CommittedPath]:
    """What `commit_message` was given; the engine is the first number."""
    numbers = iter(message.numbers)
    next(numbers)
    return [CommittedPath(request_id, tuple(_take(numbers))) for request_id in message.texts]


def _put(numbers: list[int], values: Sequence[int]) -> None:
    numbers.append(len(values))
    numbers.extend(values)


def _take(numbers: Iterator[int]) -> list[int]:
    return [next(numbers) for _ in range(next(numbers))]


def _put_rows(numbers: list[int], rows: SequenceRows) -> None:
    numbers += (rows.start, rows.tree_start, int(rows.span_logits))
    columns = rows.block_table, rows.span, rows.tree_tokens, rows.tree_rows, _signed(rows.tree_masks), rows.tree_depths
    for values in columns:
        _put(numbers, values)


def _take_rows(numbers: Iterator[int], request_id: str) -> SequenceRows:
    start, tree_start, span_logits = next(numbers), next(numbers), bool(next(numbers))
    table, span, tokens, nodes, masks, depths = (_take(numbers) for _ in range(6))
    unsigned = [mask % _WORD for mask in masks]
    return SequenceRows(request_id, table, start, span, tree_start, tokens, nodes, unsigned, depths, span_logits)


def _signed(masks: Iterable[int]) -> list[int]:
    return [mask - _WORD if mask >> 63 else mask for mask in masks]
