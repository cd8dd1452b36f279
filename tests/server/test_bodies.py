"""Bodies: what is refused, and how little work a hostile one is."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from forerun import LLM
from forerun.server import bodies, conversation
from forerun.server.app import create_app
from forerun.server.bodies import LARGE, MAX_PARTS, MAX_VALUES, check_parts, parse
from forerun.server.errors import MAX_SHOWN, ApiError
from forerun.server.schema import ChatBody, CompletionBody
from forerun.weights.tokenizer import Tokenizer
from tests.server.conftest import Post, running, settings

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


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 4097}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 4097}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * 4097, "max_tokens": 1}),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 4097}),
    ],
)
def test_messages_are_read_as_far_as_a_conversation_goes(post: Post, path: str, fields: dict[str, Any]) -> None:
    assert "at most 4096 items" in post(path, status=400, **fields)["error"]["message"]


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


def test_json_inside_of_texts_counts(complete: Post) -> None:
    """Arguments of calls and schemas are JSON as text; `"` alone must not hide what stands behind it."""
    many = "[" + "[]," * (MAX_PARTS // 2) + "[]]"
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": text}}
             for n, text in enumerate((many, '"', many))]  # fmt: skip
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    refused = complete("a", status=400, guided_json="[" * (2 * MAX_PARTS))["error"]
    assert refused["code"] == "body_too_complex"
    with pytest.raises(ApiError, match="the most is"):
        conversation.render(None, ChatBody.model_validate({"messages": messages}), [])  # type: ignore[arg-type]


def test_bodies_of_too_many_values() -> None:
    with pytest.raises(ApiError, match=f"{MAX_VALUES + 1} values; the most is {MAX_VALUES}"):
        parse(b'{"prompt": [' + b"0," * (MAX_VALUES + 1) + b"0]}", CompletionBody)


def test_texts_may_hold_any_number_of_brackets() -> None:
    text = '{"[:\\' * MAX_PARTS + "," * MAX_VALUES
    assert parse(json.dumps({"prompt": text}).encode(), CompletionBody).prompt == text


@pytest.mark.parametrize("end", [b"", b"\\", b'"', b"\\\\"])
def test_a_text_without_end_is_looked_at_once(end: bytes) -> None:
    raw = b'{"prompt": "' + b'\\"[' * (MAX_PARTS * 4) + end
    with pytest.raises(ApiError, match="not JSON"):
        parse(raw)


@pytest.mark.parametrize("text", [b'\\\\\\":', b'a:",", ', b'"":', b'":"'])
def test_counting_parts_takes_little_memory(text: bytes) -> None:
    """Strings are told from the rest without a copy of each: it was 40 times the body, in one go."""
    raw = b'"' + text * (1_000_000 // len(text))
    tracemalloc.start()
    with suppress(ApiError):
        check_parts(raw)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 24 * (1 << 20)


def test_parts_are_counted_outside_of_strings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_PARTS", 5)
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice('"\\{[:a') for _ in range(rng.randrange(12)))
        value = {text: [text, text * 3]}  # an object, a list, a named value
        for chunk in (1, 3, 1 << 10):
            monkeypatch.setattr(bodies, "_CHUNK", chunk)
            check_parts(json.dumps(value).encode())
            with pytest.raises(ApiError, match="holds 7 objects"):
                check_parts(json.dumps([value, [], {text + ":": ""}]).encode() + b'"')


def test_many_wrong_fields_are_counted() -> None:
    fields = {"prompt": "a", "logit_bias": {str(i): "x" for i in range(5000)}}
    with pytest.raises(ApiError, match="5000 fields of the body are wrong"):
        parse(json.dumps(fields).encode(), CompletionBody)


def test_large_bodies_are_answered_like_small_ones(complete: Post) -> None:
    ids = [5, 6, 7]
    small = complete(ids)["choices"]
    assert complete(ids, allowed_token_ids=None, user="x" * (2 * LARGE))["choices"] == small
    wrong = complete(ids, status=400, user=["x" * (2 * LARGE)])["error"]
    assert wrong["param"] == "user" and len(wrong["message"]) < 2 * MAX_SHOWN


def test_texts_that_cannot_fit_are_refused_by_their_length(llm: LLM, complete: Post, chat: Post, post: Post) -> None:
    """However long they are, no token is made of them."""
    long = "word " * 400_000
    most = (llm.max_model_len - 1) * llm.tokenizer.max_token_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
        for answer in (
            complete(long, status=400),
            complete(["a" * (most + 1)], status=400),
            complete(long, status=400, truncate_prompt_tokens=5),
            chat(long, status=400),
            post("/tokenize", status=400, prompt=long),
            post("/tokenize", status=400, messages=[{"role": "user", "content": long}]),
        ):
            assert answer["error"]["code"] == "context_length_exceeded"
            assert "bytes" in answer["error"]["message"]


def test_texts_that_are_surely_too_long_are_tokenized_in_part(llm: LLM, complete: Post) -> None:
    text = "a b c " * 3000
    assert len(text) < (llm.max_model_len - 1) * llm.tokenizer.max_token_bytes
    assert "more than" in complete(text, status=400)["error"]["message"]
    assert len(complete(text, truncate_prompt_tokens=5, return_token_ids=True)["choices"][0]["prompt_token_ids"]) == 5
    assert "tokens; the most is" in complete(text[: len(text) // 6], status=400)["error"]["message"]


def test_detokenizing_is_bounded(llm: LLM, post: Post) -> None:
    assert "the most is" in post("/detokenize", status=400, tokens=[5] * (llm.max_model_len + 1))["error"]["message"]


def test_health_is_answered_beside_long_texts(llm: LLM) -> None:
    """A prompt of 8 MB blocked everything for 22 seconds, /tokenize of 2 MB for 2.4."""
    attacks = [
        ("/v1/completions", {"prompt": "word of the day " * 500_000}),
        ("/v1/completions", {"prompt": [0] * 300_000 + ["a"]}),
        ("/tokenize", {"prompt": "a b " * 500_000}),
    ]
    with (
        running(create_app(llm, settings())) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        sent = [pool.submit(httpx.post, url + path, json=fields, timeout=60) for path, fields in attacks]
        slowest = 0.0
        while not all(future.done() for future in sent):
            started = time.perf_counter()
            assert client.get("/health").status_code == client.head("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - started)
        assert {future.result().status_code for future in sent} == {400}
    assert slowest < 2
