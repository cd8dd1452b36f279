"""Responses kept for later requests: the answers, and the conversations that led to them.

Knows: bounds on their number and bytes; the least recently used are removed first. Does not know: what is in them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection
from threading import Lock
from typing import Any, NamedTuple

from forerun.server.errors import ApiError


class _Kept(NamedTuple):
    """One response as JSON text, whose length is its size in memory."""

    response: bytes
    items: bytes  # of the conversation before the response's output
    item_ids: tuple[str, ...]  # of the output

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)

    @property
    def output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = json.loads(self.response)["output"]
        return output


class ResponseStore:
    """The last responses, by id. Thread-safe. Ids are random; knowing one is enough to read it."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._places: dict[str, str] = {}  # an item's id -> its response's id
        self.num_bytes = 0

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_responses > 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, response: dict[str, Any], items: bytes) -> None:
        """Keep a response and the items (a JSON list) of the conversation before its output; old ones make room."""
        kept = _Kept(_json(response), items, tuple(item["id"] for item in response["output"]))
        with self._lock:
            self._kept[response["id"]] = kept
            self._places |= dict.fromkeys(kept.item_ids, response["id"])
            self.num_bytes += kept.num_bytes
            while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def response(self, response_id: str) -> bytes | None:
        """A response as JSON, None if it is not here."""
        kept = self._find(response_id)
        return kept and kept.response

    def conversation(self, response_id: str) -> list[dict[str, Any]] | None:
        """All items up to the end of a response, None if it is not here."""
        kept = self._find(response_id)
        return None if kept is None else [*json.loads(kept.items), *kept.output]

    def items(self, item_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """The output items of kept responses among `item_ids`, by id."""
        with self._lock:
            places = {place: None for item_id in item_ids if (place := self._places.get(item_id)) is not None}
        outputs = [kept.output for place in places if (kept := self._find(place)) is not None]
        return {item["id"]: item for output in outputs for item in output if item["id"] in item_ids}

    def delete(self, response_id: str) -> bool:
        """Forget a response; returns whether it was here."""
        with self._lock:
            return self._drop(response_id)

    def _find(self, response_id: str) -> _Kept | None:
        with self._lock:
            if response_id in self._kept:
                self._kept.move_to_end(response_id)
            return self._kept.get(response_id)

    def _drop(self, response_id: str) -> bool:
        kept = self._kept.pop(response_id, None)
        if kept is None:
            return False
        self.num_bytes -= kept.num_bytes
        for item_id in kept.item_ids:
            self._places.pop(item_id, None)
        return True


def not_found(response_id: str) -> ApiError:
    """There is no such response, or no longer."""
    return ApiError(
        404, f"there is no response {response_id[:100]!r} here: it was never stored, was deleted or had to make room",
        param="response_id", code="response_not_found",
    )  # fmt: skip


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
