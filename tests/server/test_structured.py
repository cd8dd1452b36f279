"""Structured output: always valid, equal with and without speculation, hostile grammars refused in time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from fastapi.testclient import TestClient

pytest.importorskip("xgrammar", reason="structured output is not installed")

from forerun import LLM
from forerun.server.context import ServerContext
from forerun.server.errors import ApiError
from forerun.server.json_schema import normal_schema
from forerun.server.structured import MAX_PENDING, AfterToken, GrammarCompiler, GrammarSpec, PrefixMask
from tests.server.conftest import client_of, settings, wait_until

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["fox", "cat", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
}


@pytest.fixture(scope="module")
def structured(llm: LLM) -> Iterator[TestClient]:
    """A server whose compiler is the only one of this file: starting one takes seconds."""
    with client_of(llm) as client:
        yield client


@pytest.fixture(scope="module")
def compiler(structured: TestClient) -> GrammarCompiler:
    context: ServerContext = structured.app.state.context  # type: ignore[attr-defined]
    return context.grammars


def ask(client: TestClient, status: int = 200, **fields: Any) -> Any:
    body = {"prompt": "A person: ", "max_tokens": 120, "temperature": 1.0, "seed": 5, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == set(PERSON["required"])
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 150
        and value["kind"] in ("fox", "cat", None)
        and len(value["tags"]) <= 2
    )


def test_schema_output_is_valid_and_the_same_without_speculation(structured: TestClient) -> None:
    for fields in ({"seed": 1}, {"seed": 2, "top_k": 50}, {"seed": 3, "temperature": 0.0}, {"seed": 4, "n": 3}):
        drafted = ask(structured, guided_json=PERSON, **fields)
        plain = ask(structured, guided_json=PERSON, speculation="off", **fields)
        assert drafted["choices"] == plain["choices"]
        assert plain["forerun"]["drafted_tokens"] == 0
        for choice in drafted["choices"]:
            assert choice["finish_reason"] == "stop" and is_person(choice["text"]), choice


def test_drafts_are_accepted_under_a_grammar(structured: TestClient) -> None:
    text = json.dumps({"name": "Anna", "age": 30, "kind": "fox", "tags": []})
    answer = ask(structured, prompt=f"{text}\n{text}\n{text}\n", guided_json=PERSON, temperature=0)
    assert is_person(answer["choices"][0]["text"]) and answer["forerun"]["accepted_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"regex": "(ab){2,4}"}}, "(ab){2,4}"),
        ({"guided_choice": ["yes", 'no "quoted"', "grün\n"]}, '(yes|no "quoted"|grün\n)'),
        ({"guided_grammar": 'root ::= "x" [0-9]{1,3} "y"\n'}, "x[0-9]{1,3}y"),
        ({"response_format": {"type": "json_object"}, "logit_bias": {}, "max_tokens": 100}, None),
    ],
)
def test_every_kind_of_structure(structured: TestClient, fields: dict[str, Any], pattern: str | None) -> None:
    [choice] = ask(structured, **fields)["choices"]
    if pattern is not None:
        assert re.fullmatch(pattern, choice["text"]), choice
    elif choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)
    else:
        assert choice["text"].startswith("{")


def test_chat_with_a_json_schema(structured: TestClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name a person"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}},
        "seed": 1,
    }
    [choice] = structured.post("/v1/chat/completions", json=body).json()["choices"]
    assert is_person(choice["message"]["content"])


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "("},
        {"guided_regex": r"(a)\1"},
        {"guided_regex": "a" * 70_000},
        {"guided_grammar": "foo ::= bar"},
        {"guided_grammar": 'root ::= "x'},
        {"guided_choice": []},
        {"guided_json": {"type": "objekt"}},
        {"guided_json": {"$ref": "#/nowhere"}},
        {"guided_json": {"$ref": "http://example.org/schema"}},
        {"guided_json": {"type": "array", "uniqueItems": True}},
        {"guided_json": {"not": {"type": "string"}}},
        {"guided_json": {"allOf": [{"type": "object", "properties": {"a": {}}}, {"required": ["a"]}]}},
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 2}},
        {"guided_json": "{not json"},
        {"guided_json": {"enum": []}},
        {"guided_json": {}, "guided_regex": "a"},
        {"guided_json": {"properties": {"a": {"items": {"if": {}, "then": {}}}}}},
    ],
)
def test_structures_that_cannot_be_enforced_are_refused(structured: TestClient, fields: dict[str, Any]) -> None:
    error = ask(structured, 400, **fields)["error"]
    assert error["message"] and error["type"] == "invalid_request_error"


def test_a_deep_schema_is_refused(structured: TestClient) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    assert "deep" in ask(structured, 400, guided_json=schema)["error"]["message"]


def test_exponential_grammars_end_in_time(llm: LLM, compiler: GrammarCompiler) -> None:
    """Nested counted repeats blow up whoever unrolls or tracks them; the server stays able to compile others."""
    impatient = GrammarCompiler(llm.tokenizer, llm.loaded.model.vocab_size, timeout_s=2.0)
    impatient._worker, impatient._info = compiler._worker, compiler._info  # the process is there already
    hostile = [
        GrammarSpec("regex", "(" * 5000 + "a" + ")*" * 5000),
        GrammarSpec("regex", "(((((a?){200}){200}){200}){200}){200}b"),
        GrammarSpec("regex", "((a|b|ab|ba)*(a|ab|b)*){500}{500}c"),
        GrammarSpec("grammar", 'root ::= s\ns ::= s s s s | s s | "a" | "b" | ""\n'),
    ]
    for spec in hostile:
        try:
            impatient.mask(spec)
        except ApiError as error:
            assert error.status_code == 400
    assert impatient.mask(GrammarSpec("regex", "[a-z]{3}")).allowed([]) is not None


def test_grammars_that_take_their_time_keep_nobody_else_waiting(
    structured: TestClient, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ask(structured, guided_regex="[ab]{3}")["choices"]
    release = Event()
    monkeypatch.setattr(compiler, "_ask", lambda spec: (release.wait(60), ("refused", "too slow"))[1])
    with ThreadPoolExecutor(MAX_PENDING + 8) as pool:
        body = {"prompt": "a", "max_tokens": 1}
        slow = [pool.submit(structured.post, "/v1/completions", json={**body, "guided_regex": "c" * (i + 1)})
                for i in range(MAX_PENDING)]  # fmt: skip
        try:
            assert wait_until(lambda: len(compiler._pending) == MAX_PENDING)
            assert ask(structured)["choices"] and ask(structured, guided_regex="[ab]{3}")["choices"] == known
            refused = structured.post("/v1/completions", json={**body, "guided_regex": "d"})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        finally:
            release.set()
        assert {answer.result().status_code for answer in slow} == {400}
    assert not compiler._pending


def test_masks_depend_on_the_prefix_alone(llm: LLM, compiler: GrammarCompiler) -> None:
    spec = GrammarSpec("json", json.dumps(normal_schema(PERSON)))
    texts = ['{"name": "Al", "age": 3', '{"name": "Bo", "age": 14, "kind"', '{"na', "", '{"name": "Al", "age": 31, "k']
    prefixes = [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    prefixes += [prefix[:length] for prefix in prefixes for length in range(len(prefix))] + prefixes[::-1]
    shared = compiler.mask(spec)
    for prefix in prefixes:
        assert shared.allowed(prefix) == compiler.mask(spec).allowed(prefix)


def test_after_the_end_only_the_end_may_follow(llm: LLM, compiler: GrammarCompiler) -> None:
    mask = compiler.mask(GrammarSpec("regex", "yes"))
    ids = llm.tokenizer.encode("yes", add_special_tokens=False)
    ends = set(llm.tokenizer.eos_token_ids)
    assert listed(mask, ids) == ends == listed(mask, [*ids, min(ends)])
    assert mask.allowed([*ids, *ids]) is None  # forbidden prefixes, which drafts may hold, say nothing


def listed(mask: PrefixMask, prefix: list[int]) -> set[int]:
    bits = mask.allowed(prefix)
    assert bits is not None
    return {8 * i + j for i, byte in enumerate(bits.packed) for j in range(8) if byte >> j & 1}


def test_a_mask_may_begin_after_a_token(compiler: GrammarCompiler) -> None:
    inner = compiler.mask(GrammarSpec("regex", "yes"))
    mask = AfterToken(inner, 77)
    assert mask.allowed([1, 2, 3]) is None
    assert mask.allowed([1, 77]) == inner.allowed([]) and mask.allowed([1, 77, 5]) == inner.allowed([5])


def test_a_dead_compiler_is_replaced(llm: LLM, structured: TestClient, compiler: GrammarCompiler) -> None:
    compiler.close()
    assert ask(structured, guided_regex="[xyz]{2}")["choices"][0]["finish_reason"] == "stop"


def test_objects_with_listed_properties_are_closed() -> None:
    made = normal_schema({"properties": {"a": {"properties": {"b": {}}}}, "required": ["a", "c"]})
    assert made["additionalProperties"] is False and made["properties"]["a"]["additionalProperties"] is False
    assert made["properties"]["c"] == {}
    free = {"type": "object", "additionalProperties": {"type": "string"}}
    assert normal_schema(free) == free
    for values in ({"const": {"not": 1}}, {"enum": [{"if": 1}]}):  # values, not schemas
        assert normal_schema(values) == values


def test_settings_are_checked() -> None:
    from forerun.errors import ConfigError

    for wrong in (
        {"served_names": ()},
        {"max_queue": -1},
        {"grammar_timeout_s": 0},
        {"api_keys": ("",)},
        {"timeout_s": 0},
    ):
        with pytest.raises(ConfigError):
            settings(**wrong)
