"""What a subscriber of vLLM's KV events hears, decoded by the definitions of vLLM."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from forerun.cache import events
from forerun.cache.block_pool import BlockPool
from forerun.cache.events import KVEvents, joined
from forerun.cache.prefix_cache import PrefixCache
from forerun.core import SamplingParams
from forerun.errors import ConfigError
from tests.support import harness
from tests.support.toy import ToyModel

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")


class Stored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):  # type: ignore[misc,name-defined]
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):  # type: ignore[misc,name-defined]
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):  # type: ignore[misc,name-defined]
    pass


class Batch(msgspec.Struct, array_like=True):  # type: ignore[misc,name-defined]
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


class Subscriber:
    """A router's side: what it heard, and which blocks it believes there are."""

    def __init__(self, folder: Path, topic: str = "") -> None:
        self.address, self.replay = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        self.topic, self.blocks, self.numbers = topic.encode(), dict[int, tuple[int, ...]](), list[int]()
        self.events = list[Any]()
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(self.address)
        self.socket.setsockopt(zmq.SUBSCRIBE, self.topic)

    def ask(self, start: int) -> list[tuple[int, bytes]]:
        """Messages from a number on, as the second socket repeats them."""
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(self.replay)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while socket.poll(5000):
            _, number, payload = socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                socket.close(linger=0)
                return found
            found.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("the answer has no end")

    def hear(self, number: int, payload: bytes) -> None:
        assert number == len(self.numbers), "a message is missing"
        self.numbers.append(number)
        for event in DECODER.decode(payload).events:
            self.events.append(event)
            if isinstance(event, Stored):
                assert event.parent_block_hash is None or event.parent_block_hash in self.blocks
                for index, block in enumerate(event.block_hashes):
                    tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
                    assert len(tokens) == event.block_size and block not in self.blocks
                    self.blocks[block] = tuple(tokens)
            elif isinstance(event, Removed):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                self.blocks.clear()


def nodes(cache: PrefixCache) -> dict[int, tuple[int, ...]]:
    """The hashes and tokens of all blocks in the tree."""
    return {int.from_bytes(node.key[-8:], "big"): node.tokens for node in cache._nodes.values()}


def test_a_subscriber_knows_what_is_cached(tmp_path: Path) -> None:
    """Every block that the tree has and none it lost, from live messages and repeated ones."""
    subscriber = Subscriber(tmp_path, "kv@pod@toy")
    made = harness.engine("none", model=ToyModel(memory=0), num_kv_blocks=26, max_num_seqs=2)
    cache = made.scheduler.prefix_cache
    assert cache is not None
    cache.names = lambda adapter, salt: salt.encode()
    cache.listener = publisher = KVEvents(subscriber.address, subscriber.replay, "kv@pod@toy")
    rng = random.Random(1)
    prefix = [rng.randrange(24) for _ in range(12)]
    for number in range(6):
        prompt = prefix[: rng.choice([12, 8])] + [rng.randrange(24) for _ in range(rng.randrange(30))]
        group = harness.request(number, prompt, SamplingParams(max_tokens=6, seed=number))
        group.samples[0].request.cache_salt = "tenant" * (number == 3)
        harness.run(made, [group])
    assert cache.stats.evicted_blocks > 0
    for number, payload in subscriber.ask(0):
        subscriber.hear(number, payload)
    while subscriber.blocks != nodes(cache):  # what the thread had not sent when it was asked
        found = subscriber.ask(len(subscriber.numbers))
        for number, payload in found:
            subscriber.hear(number, payload)
    assert isinstance(subscriber.events[0], Cleared)
    stored = [event for event in subscriber.events if isinstance(event, Stored)]
    assert any(len(event.block_hashes) > 1 for event in stored)
    assert [event.extra_keys for event in stored if event.extra_keys != [None] * len(event.block_hashes)] != []
    while subscriber.socket.poll(200):  # all that was sent meanwhile, after it was connected
        subscriber.socket.recv_multipart()
    harness.run(made, [harness.request(9, [1, 2] * 9, SamplingParams(max_tokens=6, seed=9))])
    while subscriber.blocks != nodes(cache):
        assert subscriber.socket.poll(5000), "nothing was sent"
        topic, number, payload = subscriber.socket.recv_multipart()
        assert topic == b"kv@pod@toy" and DECODER.decode(payload).data_parallel_rank == 0
        subscriber.hear(int.from_bytes(number, "big"), payload)
    subscriber.socket.close(linger=0)
    publisher.close()


def test_no_repeated_message_is_lost_to_who_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sender(events._Sender):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._sent.extend((number.to_bytes(8, "big"), bytes(2000)) for number in range(6000))
            self._next = 6000

    monkeypatch.setattr(events, "_Sender", Sender)
    made = KVEvents(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{tmp_path}/replay")
    socket.send_multipart([b"", bytes(8)])
    time.sleep(0.5)  # it looks away while all is sent
    for number in range(6000):
        assert socket.poll(5000) and socket.recv_multipart()[1] == number.to_bytes(8, "big")
    socket.close(linger=0)
    made.close()


def test_blocks_of_one_request_are_one_event() -> None:
    def stored(block: int, parent: int | None, name: str | None = None) -> dict[str, Any]:
        return {
            "type": "BlockStored", "block_hashes": [block], "parent_block_hash": parent, "token_ids": [block] * 2,
            "lora_name": name, "extra_keys": [None],
        }  # fmt: skip

    def removed(block: int) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": [block]}

    found = joined(
        [stored(1, None), stored(2, 1), stored(3, 1), removed(2), removed(1), stored(4, 3), stored(5, 4, "a")]
    )
    assert [event["block_hashes"] for event in found] == [[1, 2], [3], [2, 1], [4], [5]]
    assert found[0]["token_ids"] == [1, 1, 2, 2] and found[0]["extra_keys"] == [None, None]


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    first = KVEvents(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")
    with pytest.raises(ConfigError, match="kv_events: cannot use"):
        KVEvents(f"ipc://{tmp_path}/other", "tcp://not an address")
    with pytest.raises(ConfigError, match="kv_events: cannot use"):
        KVEvents("nonsense")
    first.close()
    with (
        socket.create_server(("", 0)) as taken,
        pytest.raises(ConfigError, match=r"in use.*; give a port that is free$"),
    ):
        KVEvents(f"tcp://*:{taken.getsockname()[1]}")


def test_without_a_listener_there_are_no_keys() -> None:
    assert PrefixCache(BlockPool(4), 4).top_of(None, "").key == b""
