"""The playground: its page lets nothing foreign in, and its trace is what was generated."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM
from forerun.server.playground import FILES, STREAM_PATH, PlaygroundBody, TracedChat
from forerun.server.streams import Delta
from tests.server.conftest import Post, client_of, events_of

PROMPT = "The cat sat on the mat. The cat sat on the mat. The cat sat on the"
REPETITIVE = {"temperature": 0.0, "max_tokens": 64}
ASKED = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "seed": 3}


PAGES = ("/", "/playground", "/docs")
MARKED = "/playground/marked.js"  # the library that reads markdown: its comments say where it comes from


def imports(script: str) -> list[str]:
    return re.findall(r'^import .* from "\./(\w+\.js)";$', script, re.MULTILINE)


def trace(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    answer = client.post(STREAM_PATH, json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    *events, last = events_of(answer.text)
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["step"] for event in events if "step" in event]


def text_of(events: list[dict[str, Any]], of: str = "content") -> str:
    return "".join(event["delta"].get(of, "") for event in events if "delta" in event)


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    return [token["id"] for step in steps(events) for token in step["tokens"]]


# -- the page ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES)
def test_files_are_served_under_a_strict_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert client.head(path).status_code == 200
    assert answer.status_code == 200 and answer.headers["content-type"] == FILES[path][1]
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", sorted(set(FILES) - {MARKED}))
def test_files_name_no_other_host(client: TestClient, path: str) -> None:
    text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")  # a name, nobody fetches it
    assert not re.findall(r"(?:\w+:)?//[\w.-]+\.\w+|@import|url\(", text)


def test_the_pages_load_only_served_files_and_run_nothing_inline(client: TestClient) -> None:
    pages = [client.get(path).text for path in PAGES]
    linked = {name for page in pages for name in re.findall(r'(?:src|href)="([^"#]+)"', page)} - {"data:,"}
    assert not any(name.startswith("/") for name in linked)  # which a proxy's prefix would break
    imported = {f"playground/{name}" for path in FILES for name in imports(client.get(path).text)}
    assert {f"/{name}" for name in linked | imported} == {*FILES, "/openapi.json"} - set(PAGES)
    for page in pages:
        assert not re.search(r"\son\w+=|javascript:|<style|style=", page)
        assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]


@pytest.mark.parametrize("path", [path for path in FILES if path.endswith(".js")])
def test_scripts_never_turn_text_into_markup(client: TestClient, path: str) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\b|new Function"
    assert not re.search(forbidden, client.get(path).text)


def test_elements_named_in_the_scripts_exist(client: TestClient) -> None:
    for path in FILES:
        if path.endswith(".js") and path != MARKED:
            named = set(re.findall(r'\$\("(\w+)"\)', client.get(path).text))
            page = client.get("/docs" if path == "/playground/docs.js" else "/").text
            assert named <= set(re.findall(r'id="(\w+)"', page)), path
            assert named or path not in ("/playground/docs.js", "/playground/playground.js")


def test_with_keys_the_page_is_open_and_its_stream_is_not(llm: LLM) -> None:
    with client_of(llm, api_keys=("secret",)) as client:
        assert [client.get(path).status_code for path in FILES] == [200] * len(FILES)
        assert client.post(STREAM_PATH, json=ASKED).status_code == 401
        answer = client.post(STREAM_PATH, json=ASKED, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200


# -- the stream -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_trace_says_what_the_chat_endpoint_says(client: TestClient, post: Post, temperature: float) -> None:
    events = trace(client, temperature=temperature)
    chat = post("/v1/chat/completions", **ASKED, temperature=temperature)
    end = events[-1]["end"]
    assert text_of(events) == chat["choices"][0]["message"]["content"]
    assert "".join(token["text"] for step in steps(events) for token in step["tokens"]) == text_of(events)
    assert end["finish_reason"] == chat["choices"][0]["finish_reason"]
    assert end["usage"]["completion_tokens"] == chat["usage"]["completion_tokens"] == len(ids_of(events))
    assert end["forerun"]["num_steps"] == len(steps(events))
    assert int(events[0]["start"]["seed"]) == ASKED["seed"]


def test_each_step_is_a_tree_and_a_path_through_it(client: TestClient) -> None:
    events = trace(client, **REPETITIVE)
    known: int | None = None
    for step in steps(events):
        nodes, path = step["nodes"], [0, *step["accepted"]]
        assert [node["parent"] for node in nodes[:1]] == [-1]
        assert all(0 <= node["parent"] < i for i, node in enumerate(nodes[1:], 1))
        assert [nodes[node]["parent"] for node in path[1:]] == path[:-1]
        assert known in (None, nodes[0]["id"])  # the root is the last token of the step before
        emitted = [token["id"] for token in step["tokens"]]
        assert emitted[: len(path) - 1] == [nodes[node]["id"] for node in path[1:]]
        assert len(emitted) - len(path[1:]) in (0, 1)
        sources = [token["source"] for token in step["tokens"]]
        assert sources[: len(path) - 1] == [nodes[node]["source"] for node in path[1:]]
        assert sources[len(path) - 1 :] in ([], [""])
        known = emitted[-1]


def test_the_trace_adds_up_to_the_figures(client: TestClient) -> None:
    events = trace(client, **REPETITIVE)
    figures = events[-1]["end"]["forerun"]
    drafted = sum(len(step["nodes"]) - 1 for step in steps(events))
    accepted = sum(len(step["accepted"]) for step in steps(events))
    assert (drafted, accepted) == (figures["drafted_tokens"], figures["accepted_tokens"])
    assert accepted > 0 and drafted > accepted  # of a repetitive answer's drafts some hold, some do not
    times = [step["time_s"] for step in steps(events)]
    assert times == sorted(times) and times[0] > 0


def test_plain_steps_are_roots_alone_with_the_same_tokens(client: TestClient) -> None:
    plain = trace(client, speculation="off", temperature=1.0)
    assert {len(step["nodes"]) for step in steps(plain)} == {1}
    assert {len(step["tokens"]) for step in steps(plain)} == {1}
    assert ids_of(plain) == ids_of(trace(client, temperature=1.0))


def test_nobody_elses_steps_are_kept(llm: LLM) -> None:
    from forerun import SamplingParams

    group = llm.prepare([5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(max_tokens=6, temperature=0.0))
    llm.start(group)
    while not group.finished:
        llm.step()
    assert group.samples[0].trace is None and group.samples[0].take_trace() == ()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, None),
        ({"messages": "hello"}, 400, "messages"),
        ({"temperature": 1000.0}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"seed": -2}, 400, "seed"),
        ({"speculation": "sometimes"}, 400, "speculation"),
        ({"top_p": 2}, 400, "top_p"),
        ({"n": 2}, 400, "n"),
        ({"model": "nobody"}, 404, "model"),
    ],
)
def test_wrong_requests_are_refused(client: TestClient, fields: dict[str, Any], status: int, param: str | None) -> None:
    answer = client.post(STREAM_PATH, json={**ASKED, **fields})
    assert answer.status_code == status, answer.text
    assert param is None or answer.json()["error"]["param"] == param


def test_sampling_parameters_count(client: TestClient, post: Post) -> None:
    chosen = {"temperature": 1.0, "top_p": 0.8, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.3}
    chat = post("/v1/chat/completions", **ASKED, **chosen)
    assert text_of(trace(client, **chosen)) == chat["choices"][0]["message"]["content"]


def test_an_unnamed_temperature_is_that_of_the_model(client: TestClient) -> None:
    story = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
    unnamed, named, other = (
        ids_of(trace(client, **story, **t)) for t in ({}, {"temperature": 0.5}, {"temperature": 1.5})
    )
    assert unnamed == named != other


def test_thinking_comes_apart_as_in_the_api(llm: LLM) -> None:
    """Channels of gpt-oss, too."""
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    with client_of(llm, tool_parser="openai") as client:
        context = client.app.state.context  # type: ignore[attr-defined]
        events = asyncio.run(chunks_of(TracedChat(context, PlaygroundBody.model_validate(ASKED)), said))
    assert (text_of(events, "reasoning_content"), text_of(events)) == ("Hm.", "Yes.")
    assert events[-1]["end"]["finish_reason"] == "stop"


async def chunks_of(traced: TracedChat, text: str) -> list[dict[str, Any]]:
    """The events of an answer of that text, whatever its tokens are."""
    delta = Delta(0, text, (), (), "stop", None, seed=1, stats=None, speedup=None, steps=())

    class Given:
        async def events(self) -> AsyncIterator[Any]:
            yield SimpleNamespace(delta=delta)

    return [event async for event in traced.chunks(Given())]  # type: ignore[arg-type]


def test_the_page_is_told_when_two_runs_need_not_have_the_same_tokens(client: TestClient) -> None:
    assert trace(client, temperature=1.0)[0]["start"]["same_tokens"]
    with LLM("mini", drafter="ngram", verification="rejection") as other, client_of(other) as rejecting:
        assert [trace(rejecting, temperature=t)[0]["start"]["same_tokens"] for t in (0.0, 1.0)] == [True, False]
