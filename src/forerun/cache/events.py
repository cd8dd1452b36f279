"""Tells routers over ZeroMQ which blocks the prefix cache has, in the messages of vLLM.

Knows: vLLM's wire format, sockets, what was sent lately. Does not know: tensors, requests beyond their tokens' owner,
routers.

Three frames a message: topic, sequence number (8 bytes, big-endian), and MessagePack of [time, events, 0]. An event is
a map: BlockStored, BlockRemoved or AllBlocksCleared, as vLLM sends them since 0.24 (`vllm/distributed/kv_events.py`);
llm-d and Dynamo read these. Whoever missed a message asks the second socket for all from a number on; the answer ends
with number -1. The first message says that nothing is cached: what an earlier process on this address had is gone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final
from weakref import finalize

from forerun.cache.prefix_cache import Node
from forerun.core import Request
from forerun.errors import ConfigError

KEPT_MESSAGES: Final = 10_000  # for those who missed some
HIGH_WATER: Final = 100_000  # messages that wait for a slow subscriber; more are lost to it, and can be asked for
POLL_S: Final = 0.1
MEDIUM: Final = "GPU"  # vLLM's word for the pool requests are computed in, on a CPU, too
_END = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger("forerun.cache")
Event = dict[str, Any]


def check_installed() -> None:
    """Raise ConfigError where the libraries for events are missing."""
    missing = [name for name in ("zmq", "msgspec") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'kv_events needs {" and ".join(missing)}: pip install ".[kv-events]" in the checkout of forerun'
        )


class KVEvents:
    """The publisher of one prefix cache; implements `lower.Listener`. The engine's thread only queues events."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        """`endpoint`: where to publish, bound if it holds `*` or is ipc or inproc, else connected to, as in vLLM.

        `replay_endpoint`: where to answer those who missed messages. Raises ConfigError for addresses that are not
        free or not valid.
        """
        check_installed()
        import zmq

        context = zmq.Context.instance()
        publisher, replay = context.socket(zmq.PUB), None
        publisher.set_hwm(HIGH_WATER)
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (publisher.bind if binds else publisher.connect)(endpoint)
            if replay_endpoint is not None:
                replay = context.socket(zmq.ROUTER)
                replay.set_hwm(0)  # no repeated message is dropped, however slowly they are taken
                replay.bind(replay_endpoint)
        except zmq.ZMQError as error:
            publisher.close(linger=0)
            if replay is not None:
                replay.close(linger=0)
            where = endpoint if replay is None else f"{endpoint} and {replay_endpoint}"
            is_taken = error.errno == zmq.EADDRINUSE
            advice = "a port that is free" if is_taken else "an address of this machine, such as tcp://*:5557"
            raise ConfigError(f"kv_events: cannot use {where}: {error}; give {advice}") from error
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._events.put({"type": "AllBlocksCleared"})
        sender = _Sender(publisher, replay, topic.encode(), self._events)
        Thread(target=sender.run, name="forerun-kv-events", daemon=True).start()
        self.close = finalize(self, self._events.put, None)

    def stored(self, node: Node, request: Request) -> None:
        """See `Listener`."""
        assert node.parent is not None
        name, salt = _adapter_name(request), request.cache_salt if node.depth == 0 else ""
        extra = [*([name] if name else []), *([sha256(salt.encode()).hexdigest()] if salt else [])]
        self._events.put(
            {
                "type": "BlockStored",
                "block_hashes": [_hash_of(node)],
                "parent_block_hash": _hash_of(node.parent) if node.depth > 0 else None,
                "token_ids": list(node.tokens),
                "block_size": len(node.tokens),
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": name,
                "extra_keys": [extra or None],
            }
        )

    def removed(self, node: Node) -> None:
        """See `Listener`."""
        self._events.put({"type": "BlockRemoved", "block_hashes": [_hash_of(node)], "medium": MEDIUM})


class _Sender:
    """Sends what is queued, on a thread of its own."""

    def __init__(self, publisher: Any, replay: Any, topic: bytes, events: SimpleQueue[Event | None]) -> None:
        self._publisher, self._replay, self._topic, self._events = publisher, replay, topic, events
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_MESSAGES)
        self._next = 0

    def run(self) -> None:
        """Until None is queued."""
        import msgspec

        encode, is_open = msgspec.msgpack.Encoder().encode, True
        while is_open:
            events, is_open = self._take()
            try:
                if events:
                    number, payload = self._next.to_bytes(8, "big"), encode([time.time(), joined(events), 0])
                    self._next += 1
                    self._sent.append((number, payload))
                    self._publisher.send_multipart((self._topic, number, payload))
                self._answer()
            except Exception:  # a subscriber's fault must not end it
                log.exception("KV events could not be sent")
        self._publisher.close(linger=500)
        if self._replay is not None:
            self._replay.close(linger=0)

    def _take(self) -> tuple[list[Event], bool]:
        """What is queued, after a short wait for something; False when it is the last."""
        events = list[Event]()
        try:
            event = self._events.get(timeout=POLL_S)
            while event is not None:
                events.append(event)
                event = self._events.get_nowait()
        except Empty:
            return events, True
        return events, False

    def _answer(self) -> None:
        """Repeat messages to those who asked."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("a request for KV events is not [b'', number in 8 bytes]: %r", frames[1:])
                continue
            for number, payload in self._sent:
                if number >= frames[2]:
                    self._replay.send_multipart((frames[0], b"", number, payload))
            self._replay.send_multipart((frames[0], b"", _END, b""))


def joined(events: Sequence[Mapping[str, Any]]) -> list[Event]:
    """The same events, blocks of one request that follow each other in one."""
    result = list[Event]()
    for event in events:
        last = result[-1] if result else {"type": ""}
        if event["type"] == last["type"] == "BlockRemoved":
            last["block_hashes"] += event["block_hashes"]
        elif _follows(event, last):
            for name in ("block_hashes", "token_ids", "extra_keys"):
                last[name] += event[name]
        else:
            result.append({name: list(each) if isinstance(each, list) else each for name, each in event.items()})
    return result


def _follows(event: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    return bool(
        event["type"] == last["type"] == "BlockStored"
        and event["parent_block_hash"] == last["block_hashes"][-1]
        and event["lora_name"] == last["lora_name"]
    )


def _hash_of(node: Node) -> int:
    """The last 64 bits of its key, as vLLM shortens its own."""
    return int.from_bytes(node.key[-8:], "big")


def _adapter_name(request: Request) -> str | None:
    return None if request.adapter is None else str(getattr(request.adapter, "name", ""))
