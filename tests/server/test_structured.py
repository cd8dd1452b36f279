"""Structured output: always valid, equal with and without speculation, hostile grammars refused in time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from socket import socketpair
from threading import Event
from time import monotonic, perf_counter
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

pytest.importorskip("xgrammar", reason="structured output is not installed")

from forerun import LLM
from forerun.core import TokenBits
from forerun.errors import GrammarError
from forerun.server import grammar_compiler
from forerun.server.context import ServerContext
from forerun.server.errors import ApiError
from forerun.server.grammar_compiler import MAX_PENDING, GrammarCompiler
from forerun.server.grammar_masks import AfterThinking, PrefixMask
from forerun.server.grammar_messages import ALL, FORCED
from forerun.server.json_schema import normal_schema
from forerun.server.structured import GrammarSpec
from tests.server.conftest import settings, wait_until
from tests.support.processes import end, own_processes

MESSAGES = [{"role": "user", "content": "Name a person"}]
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


@pytest.fixture
def compiler(app: FastAPI, client: TestClient) -> GrammarCompiler:
    """Of the server of all files: starting one takes seconds."""
    context: ServerContext = app.state.context
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


AMBIGUOUS = "".join(f's{i} ::= s{(7 * i + 1) % 20} s{(3 * i + 2) % 20} | s{(i + 5) % 20} s0 | "a"\n' for i in range(20))


def test_a_grammar_that_is_slow_in_a_branch_fails_alone(llm: LLM, client: TestClient) -> None:
    """Random texts do not find the branch, a bias leads into it; others do not wait for its masks."""
    body = {"prompt": "A", "guided_grammar": f'root ::= [^x]* | "x" s0\n{AMBIGUOUS}', "max_tokens": 400}
    first, then = llm.tokenizer.encode("xa", add_special_tokens=False)
    bias = {str(first): 100.0, str(then): 50.0}
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(client.post, "/v1/completions", json={**body, "logit_bias": bias})
        waits = []
        while not hostile.done():
            started = monotonic()
            assert ask(client, max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4
            waits.append(monotonic() - started)
    assert hostile.result().status_code == 400, waits
    assert "takes too long to apply" in hostile.result().json()["error"]["message"]
    assert len(waits) > 3 and max(waits) < 10, waits  # 35 to 78 s before, in an engine that did nothing else
    assert ask(client, guided_grammar=body["guided_grammar"], max_tokens=8)["choices"][0]["text"][:1] != "x"


def test_schema_output_is_valid_and_the_same_without_speculation(client: TestClient) -> None:
    for fields in ({"seed": 1}, {"seed": 2, "top_k": 50}, {"seed": 3, "temperature": 0.0}, {"seed": 4, "n": 3}):
        drafted = ask(client, guided_json=PERSON, **fields)
        plain = ask(client, guided_json=PERSON, speculation="off", **fields)
        assert drafted["choices"] == plain["choices"]
        assert plain["forerun"]["drafted_tokens"] == 0
        for choice in drafted["choices"]:
            assert choice["finish_reason"] == "stop" and is_person(choice["text"]), choice


def test_drafts_are_accepted_under_a_grammar(client: TestClient) -> None:
    text = json.dumps({"name": "Anna", "age": 30, "kind": "fox", "tags": []})
    answer = ask(client, prompt=f"{text}\n{text}\n{text}\n", guided_json=PERSON, temperature=0)
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
def test_every_kind_of_structure(client: TestClient, fields: dict[str, Any], pattern: str | None) -> None:
    [choice] = ask(client, **fields)["choices"]
    if pattern is not None:
        assert re.fullmatch(pattern, choice["text"]), choice
    elif choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)
    else:
        assert choice["text"].startswith("{")


def test_chat_with_a_json_schema(client: TestClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name a person"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}},
        "seed": 1,
    }
    [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
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
def test_structures_that_cannot_be_enforced_are_refused(client: TestClient, fields: dict[str, Any]) -> None:
    error = ask(client, 400, **fields)["error"]
    assert error["message"] and error["type"] == "invalid_request_error"


def test_a_deep_schema_is_refused(client: TestClient) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    assert "deep" in ask(client, 400, guided_json=schema)["error"]["message"]


@pytest.fixture(scope="module")
def impatient(llm: LLM) -> Iterator[GrammarCompiler]:
    """A compiler with a short time limit; its process is there already."""
    made = GrammarCompiler(llm.tokenizer, llm.loaded.model.vocab_size, timeout_s=2.0)
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("regex", "(" * 5000 + "a" + ")*" * 5000), "Nest layer|more than 2 s"),
        (GrammarSpec("grammar", 'root ::= s\ns ::= s s s s | s s | "a" | "b" | ""\n'), "too slow|more than 2 s"),
    ],
    ids=["deep", "ambiguous"],
)
def test_exponential_grammars_end_in_time(impatient: GrammarCompiler, spec: GrammarSpec, reason: str) -> None:
    """Refused when the time is over, and whoever comes next is served."""
    started = monotonic()
    with pytest.raises(ApiError, match=reason) as refused:
        impatient.mask(spec)
    assert refused.value.status_code == 400 and monotonic() - started < 30
    assert listed(impatient.mask(GrammarSpec("regex", "[a-z]{3}")), [])


def test_a_hostile_pattern_holds_nobody_up(client: TestClient, impatient: GrammarCompiler) -> None:
    """Python's engine goes back for hours; it runs in the process that is ended."""
    schema = {"patternProperties": {"^(a+)+$": {}}, "properties": {"a" * 60 + "!": {}}}
    with pytest.raises(ApiError, match="guided_json: compiling this JSON schema takes more than 2 s"):
        impatient.mask(GrammarSpec("json", json.dumps(schema), "guided_json"))
    started = monotonic()
    assert ask(client, guided_json={"patternProperties": {"^(a+)+$": {}}, "properties": {"b": {}}}, max_tokens=1)
    assert monotonic() - started < 30


def test_a_refusal_for_lack_of_time_is_not_remembered(
    impatient: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = GrammarSpec("regex", "(xy|z){3}")
    monkeypatch.setattr(impatient, "_timeout_s", 1e-6)
    with pytest.raises(ApiError, match="takes more than 1e-06 s"):
        impatient.mask(spec)
    monkeypatch.undo()
    assert impatient.mask(spec).allowed([]) is not None


def test_a_refusal_for_what_a_grammar_is_is_remembered(llm: LLM) -> None:
    made = GrammarCompiler(llm.tokenizer, llm.loaded.model.vocab_size, timeout_s=60.0)
    wrong = GrammarSpec("regex", "(", "guided_regex")
    for _ in range(2):
        with pytest.raises(ApiError, match="cannot be used") as refused:
            made.mask(wrong)
        assert refused.value.param == "guided_regex"
        made.close()  # from now on nothing new can be compiled
    with pytest.raises(ApiError, match="shutting down"):
        made.mask(GrammarSpec("regex", "["))


def test_grammars_that_take_their_time_keep_nobody_else_waiting(
    client: TestClient, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ask(client, guided_regex="[ab]{3}")["choices"]
    release = Event()
    monkeypatch.setattr(compiler, "_ask", lambda spec, limit_s: (release.wait(60), (None, "too slow"))[1])
    with ThreadPoolExecutor(MAX_PENDING + 8) as pool:
        body = {"prompt": "a", "max_tokens": 1}
        slow = [pool.submit(client.post, "/v1/completions", json={**body, "guided_regex": "c" * (i + 1)})
                for i in range(MAX_PENDING)]  # fmt: skip
        try:
            assert wait_until(lambda: compiler.num_waiting == MAX_PENDING)
            assert ask(client)["choices"] and ask(client, guided_regex="[ab]{3}")["choices"] == known
            refused = client.post("/v1/completions", json={**body, "guided_regex": "d"})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        finally:
            release.set()
        assert {answer.result().status_code for answer in slow} == {400}
    assert compiler.num_waiting == 0


def test_requests_that_wait_for_the_same_grammar_fail_together(
    impatient: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had the whole time limit, one after the other, and a thread of the server's as long."""
    asked, release, spec = [], Event(), GrammarSpec("regex", "q{7}")
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 6)
    monkeypatch.setattr(impatient, "_ask", lambda *given: (asked.append(given), release.wait(60), (None, None))[2])
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(impatient.mask, spec) for _ in range(6)]
        try:
            assert wait_until(lambda: impatient.num_waiting == 6)
            with pytest.raises(ApiError, match="6 requests wait for 1 schemas") as refused:
                impatient.mask(spec)
            assert refused.value.status_code == 429
        finally:
            release.set()
        assert all("takes more than 2 s" in str(future.exception()) for future in waiting)
    assert len(asked) == 1
    with pytest.raises(ApiError, match="takes more than"):
        impatient.mask(spec)
    assert len(asked) == 2  # whoever comes later tries again


def test_a_short_deadline_is_not_the_grammar_s_fault(
    impatient: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits behind a request with little time has more of it."""
    asked, release, spec = [], Event(), GrammarSpec("regex", "q{8}")
    monkeypatch.setattr(impatient, "_ask", lambda *given: (asked.append(given), release.wait(60), (None, None))[2])
    with ThreadPoolExecutor(2) as pool:
        hurried = pool.submit(impatient.mask, spec, perf_counter() + 1.5)
        try:
            assert wait_until(lambda: len(asked) == 1)
            patient = pool.submit(impatient.mask, spec)
            assert wait_until(lambda: impatient.num_waiting == 2)
        finally:
            release.set()
        assert hurried.exception() and patient.exception()
    assert len(asked) == 2


def test_masks_depend_on_the_prefix_alone(llm: LLM, compiler: GrammarCompiler) -> None:
    spec = GrammarSpec("json", json.dumps(PERSON))
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


def test_what_a_grammar_forces_is_known_with_its_mask(llm: LLM, compiler: GrammarCompiler) -> None:
    """As text that does not depend on how the text before it was cut, and as the tokens a model would write."""
    spec = GrammarSpec("json", json.dumps(PERSON))
    for start, text in (
        ("", '{"name": "'), ('{"na', 'me": "'), ('{"name": "Al', ""), ('{"name": "Al"', ', "age": '),
        ('{"name": "Al", "age": 31,', ' "kind": '), ('{"name": "Al", "age": 31, "kind": "f', 'ox", "tags": ['),
    ):  # fmt: skip
        for prefix in (llm.tokenizer.encode(start, add_special_tokens=False), [*bytes_of(llm, start)]):
            mask = compiler.mask(spec)
            assert mask.forced(prefix) == () or not prefix, "not before its mask was asked for"
            mask.allowed(prefix)
            tokens = list(mask.forced(prefix))
            assert llm.tokenizer.decode(tokens) == text, start
            assert tokens == llm.tokenizer.encode_behind(prefix, text)
            for num in range(1, len(tokens)):  # what is left of it
                mask.allowed([*prefix, *tokens[:num]])
                assert llm.tokenizer.decode(mask.forced([*prefix, *tokens[:num]])) == llm.tokenizer.decode(tokens[num:])


def bytes_of(llm: LLM, text: str) -> list[int]:
    """One token a character: a spelling that no tokenizer would choose."""
    return [token for character in text for token in llm.tokenizer.encode_behind((), character)]


def test_long_forced_texts_come_in_parts(llm: LLM, compiler: GrammarCompiler) -> None:
    mask, said = compiler.mask(GrammarSpec("regex", "(häßlich ){400}[ab]")), list[int]()
    for _ in range(60):
        mask.allowed(said)
        said += mask.forced(said)
    text = llm.tokenizer.decode(said)
    assert len(text) > 3000 and ("häßlich " * 400).startswith(text)


def test_forced_tokens_are_accepted_by_a_server(client: TestClient) -> None:
    answer = ask(client, guided_json=PERSON, temperature=0)
    assert is_person(answer["choices"][0]["text"])
    assert answer["forerun"]["drafters"]["grammar"]["accepted"] >= 8, answer["forerun"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [(b"ab\xc3", ["ab"]), (b"\xc3\xa9b", ["\u00e9b"]), (b"\xa9 is", []), (b"\xc3", []), (b"a\xa9b", [])],
)
def test_forced_text_is_whole_characters_from_its_start(raw: bytes, said: list[str]) -> None:
    """Behind a token that ends inside a character its rest is forced: no text that could be cut into tokens."""
    ours, theirs = socketpair()
    spelled: list[str] = []
    mask = PrefixMask(ours, 32, lambda known, text: spelled.append(text) or [7])
    with theirs:
        mask._asked.append(((), 0))
        theirs.sendall(ALL + FORCED.pack(len(raw)) + raw)
        assert mask.ready((), 1.0) and list(mask.forced(())) == [7] * len(said)
    assert spelled == said


def listed(mask: PrefixMask | AfterThinking, prefix: list[int]) -> set[int]:
    bits = mask.allowed(prefix)
    assert isinstance(bits, TokenBits)
    return {8 * i + j for i, byte in enumerate(bits.packed) for j in range(8) if byte >> j & 1}


def test_a_mask_may_begin_behind_the_thinking(compiler: GrammarCompiler) -> None:
    inner = compiler.mask(GrammarSpec("regex", "yes"))
    inside = AfterThinking(inner, None, [77])
    assert inside.allowed([]) is None and inside.allowed([1, 2, 3]) is None
    assert inside.allowed([1, 77]) == inner.allowed([]) and inside.allowed([1, 77, 5]) == inner.allowed([5])
    several = AfterThinking(inner, None, [7, 7, 8])
    assert several.allowed([7, 8, 7]) is None and several.allowed([7, 7, 7, 8, 5]) == inner.allowed([5])


def test_a_mask_begins_behind_any_header_of_the_final_channel(compiler: GrammarCompiler) -> None:
    """<|channel|> is token 70, final 71, <|message|> 77."""
    inner = compiler.mask(GrammarSpec("regex", "yes"))
    mask = AfterThinking(inner, None, [70, 71], [77])
    assert mask.allowed([70, 72, 77, 5, 71]) is None and mask.allowed([70, 71, 73]) is None
    assert mask.allowed([70, 72, 77, 5, 70, 71, 73, 74, 77]) == inner.allowed([])
    assert mask.allowed([70, 71, 77, 5]) == inner.allowed([5])


def test_a_model_that_does_not_think_keeps_to_its_grammar(llm: LLM, compiler: GrammarCompiler) -> None:
    inner = compiler.mask(GrammarSpec("regex", "yes"))
    mask, yes = AfterThinking(inner, 70, [77]), llm.tokenizer.encode("yes", add_special_tokens=False)
    assert listed(mask, []) == listed(inner, []) | {70}  # it may think first
    assert listed(mask, yes) == listed(inner, yes) == set(llm.tokenizer.eos_token_ids)
    assert mask.allowed([70]) is None and mask.allowed([70, *yes]) is None
    assert mask.forced([]) == mask.forced([70]) == () and mask.allowed(yes[:1]) is not None
    assert len(yes) == 1 or list(mask.forced(yes[:1])) == yes[1:]
    assert mask.allowed([70, 5, 77]) == inner.allowed([]) and mask.allowed([70, 77, *yes]) == inner.allowed(yes)


def test_a_call_may_come_instead_of_what_the_grammar_describes(llm: LLM, compiler: GrammarCompiler) -> None:
    """80 opens a call; 70 to 77 is thinking."""
    inner, yes = compiler.mask(GrammarSpec("regex", "yes")), llm.tokenizer.encode("yes", add_special_tokens=False)
    plain, thinking = AfterThinking(inner, None, call_id=80), AfterThinking(inner, 70, [77], call_id=80)
    assert listed(plain, []) == listed(inner, []) | {80} and listed(thinking, []) == listed(inner, []) | {70, 80}
    assert listed(thinking, [70, 5, 77]) == listed(plain, []) and thinking.allowed([70, 80]) is None
    for mask, before in ((plain, []), (thinking, []), (thinking, [70, 77])):
        assert mask.allowed([*before, 80]) is None and mask.allowed([*before, 80, *yes, 80]) is None
        assert listed(mask, [*before, *yes]) == listed(inner, yes), "no call behind the text"
        assert mask.forced(before) == mask.forced([*before, 80]) == () and mask.ready([*before, 80])


def test_masks_that_have_come_are_kept_when_their_process_ends() -> None:
    ours, theirs = socketpair()
    mask = PrefixMask(ours, 32, lambda known, text: [])
    with theirs:
        mask._asked.append(((), 0))
        theirs.sendall(ALL + FORCED.pack(0))
        assert mask.ready((), 1.0)
    with pytest.raises(GrammarError):
        while True:  # until it is noticed
            mask.ready((5,), 0.1)
    assert mask.ready(()) and mask.allowed(()) is None
    with pytest.raises(GrammarError):
        mask.ready((5,))


def test_times_count_from_arrival(client: TestClient) -> None:
    for path, fields in (("completions", {"prompt": "A"}), ("chat/completions", {"messages": MESSAGES})):
        body = {**fields, "max_tokens": 3, "guided_regex": f"[abc]{{9}}{len(path)}"}
        first, again = (client.post(f"/v1/{path}", json=body).json()["forerun"] for _ in range(2))
        assert first["ttft_s"] >= first["queue_s"] >= first["grammar_s"] > again["grammar_s"] > 0
        plain = client.post(f"/v1/{path}", json={**fields, "max_tokens": 3}).json()["forerun"]
        assert plain["grammar_s"] is None
    text = client.get("/metrics").text
    assert int(float(text.split("forerun_grammar_seconds_count ")[1].split()[0])) >= 4


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_compiling_counts_towards_the_timeout(client: TestClient, path: str) -> None:
    fields = {"prompt": "A"} if path == "completions" else {"messages": MESSAGES}
    body = {**fields, "max_tokens": 3, "guided_regex": f"x{{3}}{len(path)}", "timeout": 0.0001}
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
    assert client.post(f"/v1/{path}", json={**body, "timeout": 60}).status_code == 200  # and is not remembered


def test_a_dead_compiler_is_replaced(client: TestClient, compiler: GrammarCompiler) -> None:
    compiler.start()
    running = own_processes("grammar_worker")  # also those that hold grammars
    assert len(running) > 1
    end(running)
    for regex in ("[ab]{3}", "[xyz]{2}"):
        assert ask(client, guided_regex=regex)["choices"][0]["finish_reason"] == "stop"


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
