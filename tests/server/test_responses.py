"""/v1/responses: the same answers as chat completions, told in OpenAI's newer words; responses kept for later."""

from __future__ import annotations

import json
import re
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="the openai client is not installed")

import httpx  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from forerun import LLM  # noqa: E402
from forerun.server import responses  # noqa: E402
from forerun.server.responses_input import chat_body  # noqa: E402
from forerun.server.responses_schema import MessageItem, ResponsesBody  # noqa: E402
from forerun.server.responses_store import ResponseStore  # noqa: E402
from forerun.server.schema import MAX_MESSAGES, ChatBody, Message  # noqa: E402
from tests.server.conftest import Post, client_of, events_of  # noqa: E402

ASKED: dict[str, Any] = {"seed": 7, "temperature": 0.8}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


def stream_of(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed request, whose names must be their types."""
    answer = client.post("/v1/responses", json={"stream": True, **fields})
    assert answer.status_code == 200, answer.text
    named = re.findall(r"event: (\S+)\ndata: (.*)\n\n", answer.text)
    events = [json.loads(data) for _, data in named]
    assert [name for name, _ in named] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """What two runs of one request share."""
    if isinstance(value, dict):
        changing = ("id", "created_at", "completed_at", "call_id", "item_id", "forerun", "input_tokens_details")
        return {name: without_ids(field) for name, field in value.items() if name not in changing}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


CONVERSATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> chat's fields, ours
    "text": (
        {"messages": [{"role": "user", "content": "Tell me about a fox"}]},
        {"input": "Tell me about a fox"},
    ),
    "turns": (
        {"messages": [
            {"role": "system", "content": "Be kind."}, {"role": "user", "content": [
                {"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]},
            {"role": "assistant", "content": "Good day.", "reasoning_content": "A greeting."},
            {"role": "user", "content": "Tell me about a cat"}]},
        {"instructions": "Be kind.", "input": [
            {"role": "user", "content": [
                {"type": "input_text", "text": "Hello"}, {"type": "input_text", "text": "you"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "A greeting."}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                {"type": "output_text", "text": "Good ", "annotations": []}, {"type": "output_text", "text": "day."}]},
            {"type": "message", "role": "user", "content": "Tell me about a cat"}]},
    ),
    "calls": (
        {"tools": [CHAT_TOOL], "messages": [
            {"role": "user", "content": "Add"},
            {"role": "assistant", "content": "I will.", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "tool", "tool_call_id": "c2", "content": "two"}]},
        {"tools": [TOOL], "input": [
            {"role": "user", "content": "Add"},
            {"role": "assistant", "content": "I will."},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}', "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]}]},
    ),
}  # fmt: skip


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as dictionaries, a single part as its text."""
    made = [message.model_dump(exclude_none=True) for message in messages]
    for message in made:
        if isinstance(message.get("content"), list) and len(message["content"]) == 1:
            message["content"] = message["content"][0]["text"]
    return made


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_same_conversation_whatever_the_template(name: str) -> None:
    chat, ours = CONVERSATIONS[name]
    body = ResponsesBody(**ours)
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    made, expected = chat_body(body, items or []), ChatBody(**chat)
    assert plain(made.messages) == plain(expected.messages) and made.tools == expected.tools


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_same_text_as_chat_completions(client: TestClient, post: Post, name: str) -> None:
    chat, ours = CONVERSATIONS[name]
    expected = post("/v1/chat/completions", **chat, **ASKED, max_tokens=16)
    response = post("/v1/responses", **ours, **ASKED, max_output_tokens=16)
    assert text_of(response) == expected["choices"][0]["message"]["content"] != ""
    assert response["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
    assert response["forerun"]["seeds"] == [7] and response["forerun"].keys() == expected["forerun"].keys()
    streamed = stream_of(client, **ours, **ASKED, max_output_tokens=16)[-1]["response"]
    assert without_ids(streamed) == without_ids(response)


def test_all_events_in_their_order(thinking: httpx.Client) -> None:
    asked = {
        **ASKED, "input": "Add", "tools": [TOOL],
        "guided_choice": [f"<think>hm so</think>I will. {CALL}"],
    }  # fmt: skip
    events = stream_of(thinking, **asked)
    kinds = [kind.removeprefix("response.") for kind, _ in groupby(event["type"] for event in events)]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    response = events[-1]["response"]
    reasoning, message, call = response["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
    deltas = {
        index: "".join(e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index)
        for index in range(3)
    }
    assert deltas == {0: "hm so", 1: "I will. ", 2: call["arguments"]}
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm so"}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "I will. " and json.loads(call["arguments"]) == {"a": 1}
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < response["usage"]["output_tokens"]
    whole = thinking.post("/v1/responses", json=asked).json()
    assert without_ids(whole) == without_ids(response)
    summarized = thinking.post("/v1/responses", json={**asked, "reasoning": {"summary": "auto"}}).json()["output"][0]
    assert summarized["summary"] == [{"type": "summary_text", "text": "hm so"}] and "content" not in summarized


def test_text_behind_a_call_is_an_item_of_its_own(thinking: httpx.Client) -> None:
    asked = {**ASKED, "input": "Add", "tools": [TOOL], "guided_choice": [f"{CALL}Done."],
             "include": ["message.output_text.logprobs"]}  # fmt: skip
    told = []
    for speculation in ("auto", "off"):
        call, message = thinking.post("/v1/responses", json={**asked, "speculation": speculation}).json()["output"]
        assert json.loads(call["arguments"]) == {"a": 1}, speculation
        assert message["content"][0]["text"] == "Done.", speculation
        told.append([entry["token"] for entry in message["content"][0]["logprobs"]])
    assert told[0] == told[1] and re.fullmatch(r"Done\.(<[^>]*>)?", "".join(told[0])), "its own tokens, and the end"


def test_a_conversation_of_too_many_messages_is_refused(post: Post) -> None:
    items = [{"role": "user", "content": "a"}] * MAX_MESSAGES
    error = post("/v1/responses", 400, input=items, instructions="Be kind.")["error"]
    assert error["param"] == "input" and f"the most is {MAX_MESSAGES}" in error["message"]


def test_a_response_copied_back_or_named_is_the_same_conversation(thinking: httpx.Client) -> None:
    """Whole items, references to them and previous_response_id make one prompt, the one chat completions makes."""
    asked = {**ASKED, "tools": [TOOL], "max_output_tokens": 8}
    first = thinking.post(
        "/v1/responses",
        json={**ASKED, "tools": [TOOL], "input": "Add", "guided_choice": [f"<think>hm</think>I will. {CALL}"]},
    ).json()
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "2"}
    question = {"role": "user", "content": "Add"}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    by_name = {**asked, "previous_response_id": first["id"], "input": [output]}
    answers = [
        thinking.post("/v1/responses", json=body).json()
        for body in (
            {**asked, "input": [question, *first["output"], output]},
            {**asked, "input": [question, *references, output]},
            by_name,
        )
    ]
    call = {"id": output["call_id"], "function": {"name": "add", "arguments": first["output"][2]["arguments"]}}
    said = {"role": "assistant", "content": "I will. ", "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": output["call_id"], "content": "2"}
    chat = {**ASKED, "tools": [CHAT_TOOL], "max_tokens": 8, "messages": [question, said, result]}
    expected = thinking.post("/v1/chat/completions", json=chat).json()
    for answer in answers:
        assert answer["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
        assert text_of(answer) == expected["choices"][0]["message"]["content"]
    third = {**asked, "previous_response_id": answers[2]["id"], "input": "And then?"}
    longer = thinking.post("/v1/responses", json=third).json()
    assert longer["usage"]["input_tokens"] > answers[2]["usage"]["total_tokens"]


def test_responses_are_kept_read_and_deleted(client: TestClient, post: Post) -> None:
    kept = post("/v1/responses", input="Hello", max_output_tokens=3)
    assert client.get(f"/v1/responses/{kept['id']}").json() == kept and kept["store"] is True
    assert client.get(f"/v1/responses/{kept['id']}?stream=true").status_code == 400
    strange = client.get(f"/v1/responses/{kept['id']}?colour=red").json()["error"]
    assert (strange["param"], strange["code"]) == ("colour", "unknown_parameter")
    assert client.delete(f"/v1/responses/{kept['id']}").json()["deleted"] is True
    gone = client.get(f"/v1/responses/{kept['id']}")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "response_not_found"
    assert client.delete(f"/v1/responses/{kept['id']}").status_code == 404
    error = post("/v1/responses", 400, input="x", previous_response_id=kept["id"])["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    error = post("/v1/responses", 404, input=[{"type": "item_reference", "id": kept["output"][0]["id"]}])["error"]
    assert error["code"] == "item_not_found"
    unkept = post("/v1/responses", input="Hello", max_output_tokens=3, store=False)
    assert unkept["store"] is False and client.get(f"/v1/responses/{unkept['id']}").status_code == 404


def test_a_server_that_keeps_nothing(llm: LLM) -> None:
    with client_of(llm, max_stored_responses=0) as client:
        assert client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}).json()["store"] is False
        refused = client.post("/v1/responses", json={"input": "Hi", "store": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "store"


def test_references_multiply_nothing(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs some bytes to send: 20,000 of them to one answer were as many copies of it."""
    first = post("/v1/responses", input="Hello", max_output_tokens=3)
    again = {"type": "item_reference", "id": first["output"][0]["id"]}
    answer = post("/v1/responses", 400, input=[again, again])
    assert "referenced twice" in answer["error"]["message"] and answer["error"]["param"] == "input"
    asked = {"input": [{"role": "user", "content": "Hi"}, again], "max_output_tokens": 1}
    assert post("/v1/responses", **asked)["status"] in ("completed", "incomplete")
    adapter = SimpleNamespace(validate_python=responses.ITEMS.validate_python)  # which writes nothing down
    monkeypatch.setattr(responses, "ITEMS", adapter)
    assert post("/v1/responses", **asked, store=False)["store"] is False
    long = [{"role": "user", "content": "word " * 2000}]
    assert post("/v1/responses", 400, input=long)["error"]["code"] == "context_length_exceeded"


def test_the_store_is_bounded_by_number_and_bytes() -> None:
    def response(number: int, size: int = 10) -> dict[str, Any]:
        return {"id": f"r{number}", "output": [{"id": f"m{number}", "text": "x" * size}]}

    store = ResponseStore(3, 10_000)
    for number in range(4):
        store.add(response(number), b'[{"role":"user"}]')
    assert [store.response(f"r{n}") is not None for n in range(4)] == [False, True, True, True]
    assert store.items(["m0", "m3"]) == {"m3": response(3)["output"][0]}
    assert store.conversation("r1") == [{"role": "user"}, *response(1)["output"]]  # which makes it the last used
    store.add(response(4), b"[]")
    assert store.response("r2") is None and store.response("r1") is not None
    store.add(response(5, size=4_000), b"[%s]" % (b" " * 2_000))
    store.add(response(6, size=4_000), b"[]")
    assert len(store) == 1 and store.num_bytes <= 10_000
    store.add(response(7, size=9_990), b"[]")
    assert len(store) == 0 and store.num_bytes == 0  # larger than all there is


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # what -> fields, the word in the message
    "background": ({"background": True}, "background"),
    "conversation": ({"conversation": "conv_1"}, "previous_response_id"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "hosted tool": ({"tools": [{"type": "web_search", "user_location": {}}]}, "web_search"),
    "custom tool": ({"tools": [{"type": "custom", "name": "x"}]}, "custom"),
    "hosted choice": ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "file_search"),
    "allowed tools": ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "allowed_tools"),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    "file": ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file"),
    "hosted item": ({"input": [{"type": "web_search_call", "id": "ws_1", "action": {}}]}, "web_search_call"),
    "encrypted": ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "encrypted"),
    "include": ({"include": ["file_search_call.results"]}, "file_search_call.results"),
    "chat's limit": ({"max_tokens": 5}, "max_output_tokens"),
    "chat's format": ({"response_format": {"type": "json_object"}}, "text.format"),
    "samples": ({"n": 2}, "n is not supported"),
    "unknown": ({"temprature": 1}, "temprature"),
    "padding": ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
    "effort": ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    "schema": ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
    "nothing": ({"input": None}, "input"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_by_name(post: Post, what: str) -> None:
    fields, word = REFUSED[what]
    error = post("/v1/responses", 400, **{"input": "Hello", **fields})["error"]
    assert word in error["message"] and error["param"] in (*fields, "text.format", "reasoning.effort")


def test_fields_without_effect_on_the_text_are_accepted(post: Post) -> None:
    asked = {"input": "Hello", "max_output_tokens": 4, "seed": 1}
    plain = post("/v1/responses", **asked)
    harmless: dict[str, Any] = {
        "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto",
        "prompt_cache_retention": "24h", "max_tool_calls": 3, "truncation": "disabled", "background": False,
        "include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False}, "tools": [],
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": None}, "parallel_tool_calls": True,
        "client_metadata": {"session": "x"},
    }  # fmt: skip
    answer = post("/v1/responses", **asked, **harmless)
    assert text_of(answer) == text_of(plain) and answer["metadata"] == {"a": "b"}


def test_unknown_fields_are_dropped_where_the_server_drops_them(llm: LLM) -> None:
    strange = {"input": [{"role": "user", "content": "Hi", "colour": 1}], "max_output_tokens": 2, "temprature": 1}
    message = {"messages": [{"role": "user", "content": "Hi", "colour": 1}], "max_tokens": 2, "temprature": 1}
    with client_of(llm, unknown_fields="ignore") as client:
        first = client.post("/v1/responses", json=strange).json()
        assert set(first["forerun"]["dropped_fields"]) == {"temprature", "input.0.colour"}
        again = client.post("/v1/responses", json={"input": "x", "previous_response_id": first["id"]})
        assert again.status_code == 200, again.text
        answer = client.post("/v1/messages", json=message).json()
        assert set(answer["forerun"]["dropped_fields"]) == {"temprature", "messages.0.colour"}


def test_logprobs_are_those_of_the_text(client: TestClient, post: Post) -> None:
    asked = {"input": "Hello", "max_output_tokens": 4, "seed": 1, "top_logprobs": 2}
    include = ["message.output_text.logprobs"]
    part = post("/v1/responses", **asked, include=include)["output"][0]["content"][0]
    chat = post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, seed=1, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    expected = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == [entry["token"] for entry in expected]
    assert part["logprobs"][0]["logprob"] == pytest.approx(expected[0]["logprob"], abs=1e-4)
    events = stream_of(client, **asked, include=include)
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in expected]


def test_incomplete_and_failed(client: TestClient, post: Post) -> None:
    events = stream_of(client, input="Hello", max_output_tokens=3, ignore_eos=True)
    last = events[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    slow = {"input": "Hello", "max_output_tokens": 480, "ignore_eos": True, "timeout": 0.05}
    failed = stream_of(client, **slow)[-1]
    assert failed["type"] == "response.failed" and failed["response"]["error"]["code"] == "server_error"
    assert post("/v1/responses", 504, **slow)["error"]["code"] == "deadline_exceeded"
    assert client.get(f"/v1/responses/{failed['response']['id']}").status_code == 404


def test_chat_streams_and_unnamed_events_are_as_before(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2}
    text = client.post("/v1/chat/completions", json=body).text
    assert "event:" not in text and events_of(text)[-1] == "[DONE]"


def test_embeddings_say_why_not(post: Post) -> None:
    error = post("/v1/embeddings", 404, input="x", model="mini")["error"]
    assert error["code"] == "not_served" and "embed" in error["message"]


# -- the official client ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=120)


class Count(BaseModel):
    """A small number."""

    digit: bool


def test_the_client_creates_streams_and_continues(api: Any) -> None:
    asked = {"model": "mini", "instructions": "Be kind.", "max_output_tokens": 12, "extra_body": {"seed": 7}}
    whole = api.responses.create(input="Hi", **asked)  # the answer ends: an unfinished one has no `response.completed`
    assert whole.output_text and whole.usage.output_tokens <= 12 and whole.forerun["num_steps"] > 0
    with api.responses.stream(input="Hi", **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    again = api.responses.create(input="And a cat?", previous_response_id=whole.id, **asked)
    assert again.usage.input_tokens > whole.usage.total_tokens
    assert api.responses.retrieve(whole.id).output_text == whole.output_text
    api.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(whole.id)
    with pytest.raises(openai.BadRequestError, match="web_search"):
        api.responses.create(model="mini", input="x", tools=[{"type": "web_search"}])


def test_the_client_parses_schemas_and_calls(api: Any) -> None:
    pytest.importorskip("xgrammar")
    parsed = api.responses.parse(model="mini", input="A digit", text_format=Count, extra_body=ASKED)
    assert isinstance(parsed.output_parsed, Count)
    choice: Any = {"type": "function", "name": "add"}
    asked: dict[str, Any] = {
        "model": "mini",
        "input": "Add",
        "tools": [TOOL],
        "tool_choice": choice,
        "extra_body": ASKED,
    }
    call = api.responses.create(**asked, max_output_tokens=200).output[0]  # seeded: unlucky digits fill 200 tokens
    assert (call.type, call.name) == ("function_call", "add") and isinstance(json.loads(call.arguments)["a"], int)
    items = [{"role": "user", "content": "Add"}, call, {
        "type": "function_call_output", "call_id": call.call_id, "output": "3"}]  # fmt: skip
    assert api.responses.create(model="mini", input=items, tools=[TOOL], max_output_tokens=8).status
    with api.responses.stream(**asked, max_output_tokens=200) as stream:
        events = list(stream)
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    pieces = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert pieces == done.arguments == stream.get_final_response().output[0].arguments
