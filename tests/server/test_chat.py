"""Chat completions: shape, streaming, samples, seeds, log-probabilities, usage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM, SamplingParams
from tests.server.conftest import Post, events_of

MESSAGES = [{"role": "user", "content": "Tell me about a fox"}]


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """The parsed chunks of a streamed chat answer."""
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 1, "stream": True, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_an_answer_is_what_the_offline_api_gives(llm: LLM, chat: Post) -> None:
    answer = chat("Tell me about a fox", temperature=0.7, min_tokens=12)
    params = SamplingParams(max_tokens=12, min_tokens=12, seed=1, temperature=0.7)
    [offline] = llm.with_drafter("none").chat(MESSAGES, params)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": offline.outputs[0].text}
    assert choice["finish_reason"] == offline.outputs[0].finish_reason == "length"
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "mini"


def test_usage_and_what_speculation_did(llm: LLM, chat: Post) -> None:
    answer = chat("la la la la la la la la la la la la", temperature=0, max_tokens=24)
    usage, figures = answer["usage"], answer["forerun"]
    assert usage["prompt_tokens"] == len(llm.render_chat([{"role": "user", "content": "la" + 11 * " la"}]))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert figures["num_steps"] + figures["accepted_tokens"] == usage["completion_tokens"]
    assert figures["acceptance_length"] == pytest.approx(usage["completion_tokens"] / figures["num_steps"], abs=1e-4)
    assert figures["drafters"]["ngram"]["drafted"] == figures["drafted_tokens"] >= figures["accepted_tokens"]
    again = chat("la la la la la la la la la la la la", temperature=0, max_tokens=24)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["choices"] == answer["choices"]


def test_a_stream_adds_up_to_the_whole_answer(client: TestClient, chat: Post) -> None:
    chunks = stream(client, min_tokens=12, stream_options={"include_usage": True})
    whole = chat("Tell me about a fox", min_tokens=12)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-1]["forerun"]["num_steps"] > 0
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_no_usage_in_a_stream_unless_asked(client: TestClient) -> None:
    assert all(chunk["choices"] and "usage" not in chunk for chunk in stream(client))


def test_samples_differ_and_keep_their_seed(client: TestClient, chat: Post) -> None:
    answer = chat("Tell me about a fox", n=3, temperature=1.2, min_tokens=12)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 36
    streamed = {0: "", 1: "", 2: ""}
    for chunk in stream(client, n=3, temperature=1.2, min_tokens=12):
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert list(streamed.values()) == texts


def test_logprobs(client: TestClient, chat: Post) -> None:
    answer = chat("Tell me about a fox", logprobs=True, top_logprobs=3, temperature=0, max_tokens=64)
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] > 3 and all(
        len(entry["top_logprobs"]) == 3 for entry in content
    )
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] < 0 for entry in content)  # greedy: the best
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == choice["message"]["content"]
    assert (content[-1]["token"], choice["finish_reason"]) == ("<|im_end|>", "stop")
    chunks = stream(client, logprobs=True, top_logprobs=3, temperature=0, max_tokens=64)
    assert [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]] == content


def test_stop_strings_end_the_answer_before_them(chat: Post) -> None:
    text = chat("Tell me a story", max_tokens=30, temperature=0)["choices"][0]["message"]["content"]
    word = text.split()[3]
    [choice] = chat("Tell me a story", max_tokens=30, temperature=0, stop=[word])["choices"]
    assert choice["message"]["content"] == text[: text.index(word)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)


def test_content_parts_are_joined(chat: Post) -> None:
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "more"}]
    assert chat(parts)["choices"] == chat("Tell me\nmore")["choices"]


@pytest.mark.parametrize("speculation", ["auto", "off", {"drafter": "ngram"}, {"drafter": "none"}, {"max_nodes": 2}])
def test_speculation_per_request_changes_figures_only(chat: Post, speculation: Any) -> None:
    prompt = "la la la la la la la la"
    plain = chat(prompt, temperature=0.5, max_tokens=16, speculation="off")
    assert plain["forerun"]["drafted_tokens"] == 0 and plain["forerun"]["acceptance_length"] == 1.0
    assert plain["forerun"]["estimated_speedup"] is None  # nothing was drafted: what is left is noise
    assert chat(prompt, temperature=0.5, max_tokens=16, speculation=speculation)["choices"] == plain["choices"]


def test_developer_messages_are_system_messages_for_models_without_them(llm: LLM, post: Post) -> None:
    turns = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
    as_system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert post("/tokenize", messages=turns)["tokens"] == llm.render_chat(as_system)


def test_token_ids_are_those_of_the_engine(llm: LLM, client: TestClient, chat: Post) -> None:
    answer = chat("Tell me about a fox", min_tokens=12, return_token_ids=True)
    params = llm.sampling_params(max_tokens=12, min_tokens=12, seed=1)
    [offline] = llm.with_drafter("none").chat(MESSAGES, params)
    assert answer["choices"][0]["token_ids"] == list(offline.outputs[0].token_ids)
    assert answer["prompt_token_ids"] == llm.render_chat(MESSAGES)
    chunks = stream(client, min_tokens=12, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    pieces = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", ())]
    assert pieces == answer["choices"][0]["token_ids"]
    assert "token_ids" not in chat("Tell me about a fox")["choices"][0]
