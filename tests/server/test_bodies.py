"""Bodies: what is refused, and how little work a hostile one is."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from pydantic import ValidationError

from forerun.server.bodies import LARGE, MAX_PARTS, parse
from forerun.server.errors import MAX_SHOWN, ApiError
from forerun.server.schema import ChatBody, CompletionBody
from tests.server.conftest import Post

MANY = 400_000


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [0] * MANY + ["a"]}),
        (CompletionBody, {"prompt": ["a"] * MANY + [0]}),
        (CompletionBody, {"prompt": "a", "stop": [0] * MANY}),
        (CompletionBody, {"prompt": "a", "allowed_token_ids": ["0"] * MANY}),
        (ChatBody, {"messages": [{}] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"text": 1}] * 1000}]}),
        (ChatBody, {"messages": [], "tools": [{"type": "function", "function": 0}] * 1000}),
    ],
)
def test_a_list_of_wrong_values_is_one_error(kind: type[ChatBody], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() < 10


def test_memory_and_time_are_bounded_by_the_body() -> None:
    """It was 20 seconds and a thousand times the body's size."""
    raw = json.dumps({"prompt": [0] * MANY + ["a"]}).encode()
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(ApiError) as caught:
        parse(raw, CompletionBody)
    seconds, (_, most) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.param == "prompt" and len(caught.value.message) < 2 * MAX_SHOWN
    assert seconds < 5 and most < 20 * len(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [' + b"[]," * MAX_PARTS + b"[]]}",
        b'{"messages": [' + b"{}," * MAX_PARTS + b"{}]}",
        b"{" + b",".join(b'"k%d": 0' % i for i in range(MAX_PARTS + 1)) + b"}",
        b'{"prompt": "' + b"x" * 100 + b'", ' + b"[" * MAX_PARTS,
    ],
)
def test_bodies_of_too_many_parts(raw: bytes) -> None:
    with pytest.raises(ApiError, match=f"the most is {MAX_PARTS}") as caught:
        parse(raw, CompletionBody)
    assert caught.value.code == "body_too_complex"


def test_texts_may_hold_any_number_of_brackets() -> None:
    text = '{"[:\\' * MAX_PARTS
    assert parse(json.dumps({"prompt": text}).encode(), CompletionBody).prompt == text


@pytest.mark.parametrize("end", [b"", b"\\", b'"', b"\\\\"])
def test_a_text_without_end_is_looked_at_once(end: bytes) -> None:
    raw = b'{"prompt": "' + b'\\"[' * (MAX_PARTS * 4) + end
    with pytest.raises(ApiError, match="not JSON"):
        parse(raw)


def test_many_wrong_fields_are_counted() -> None:
    fields = {"prompt": "a", "logit_bias": {str(i): "x" for i in range(5000)}}
    with pytest.raises(ApiError, match="5000 fields of the body are unknown or wrong"):
        parse(json.dumps(fields).encode(), CompletionBody)


def test_large_bodies_are_answered_like_small_ones(complete: Post) -> None:
    ids = [5, 6, 7]
    small = complete(ids)["choices"]
    assert complete(ids, allowed_token_ids=None, user="x" * (2 * LARGE))["choices"] == small
    wrong = complete(ids, status=400, user=["x" * (2 * LARGE)])["error"]
    assert wrong["param"] == "user" and len(wrong["message"]) < 2 * MAX_SHOWN
