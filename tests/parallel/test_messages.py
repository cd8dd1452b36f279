"""What the leader says is what followers read, whatever it is."""

from __future__ import annotations

import random

import pytest

from forerun.models.base import CommittedPath
from forerun.models.batch import SequenceRows
from forerun.runtime.parallel.messages import Kind, PassOrder, RankMessage, commit_message, read_commit


def again(message: RankMessage) -> RankMessage:
    return RankMessage.decode(message.kind, message.encode())


def random_rows(rng: random.Random, index: int) -> SequenceRows:
    """A span, a tree of up to 64 nodes with full masks, both, or nothing; at any place of any context."""
    span = [rng.randrange(1 << 18) for _ in range(rng.choice([0, 1, 7]))]
    nodes = rng.choice([0, 1, 5, 64])
    start = rng.randrange(1 << 20)
    return SequenceRows(
        request_id=rng.choice(["", f"{index}-0", "ü"]),
        block_table=[rng.randrange(1 << 30) for _ in range(rng.randrange(4))],
        start=start,
        span=span,
        tree_start=start + len(span),
        tree_tokens=[rng.randrange(1 << 18) for _ in range(nodes)],
        tree_rows=list(range(nodes)),
        tree_masks=[rng.getrandbits(64) | 1 << node for node in range(nodes)],
        tree_depths=[rng.randrange(64) for _ in range(nodes)],
        span_logits=rng.random() < 0.5,
    )


def test_a_pass_arrives_as_it_was_sent() -> None:
    rng = random.Random(0)
    for number in range(200):
        rows = tuple(random_rows(rng, index) for index in range(rng.randrange(4)))
        layers, adapters = tuple(range(rng.randrange(3))), tuple(rng.choices(range(3), k=rng.choice([0, len(rows)])))
        order = PassOrder(rng.randrange(9), number, rng.random() < 0.5, layers, rows, adapters)
        found = PassOrder.read(again(order.message()))
        assert found == order


def test_a_commit_arrives_as_it_was_sent() -> None:
    paths = [CommittedPath("", ()), CommittedPath("7-0", (0, 3, 63)), CommittedPath("7-1", (0,))]
    found = again(commit_message(5, paths))
    assert found.numbers[0] == 5 and read_commit(found) == paths


@pytest.mark.parametrize("body", [b"", b"\0" * 15, RankMessage(Kind.MOVE, [1, 2], ["a"]).encode()[:-10]])
def test_bytes_of_others_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="cut short"):
        RankMessage.decode(Kind.MOVE, body)
    with pytest.raises(ValueError, match="99"):
        RankMessage.decode(99, RankMessage(Kind.MOVE).encode())
