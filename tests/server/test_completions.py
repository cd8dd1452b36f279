"""Completions: prompts of all kinds, echo, log-probabilities, sampling parameters, tokenizing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM, SamplingParams
from forerun.server import answers
from tests.server.conftest import Post, events_of

PROMPT = "Once upon a time there was"


def test_text_and_token_prompts_alone_and_together(llm: LLM, complete: Post) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    [text] = complete(PROMPT)["choices"]
    assert complete(ids)["choices"] == [text]
    several = complete([PROMPT, "The cat", PROMPT], n=2)
    assert [choice["index"] for choice in several["choices"]] == list(range(6))
    assert [c["text"] for c in several["choices"][:2]] == [c["text"] for c in several["choices"][4:]]
    assert several["choices"][0]["text"] == text["text"]
    assert complete([ids, ids])["usage"]["prompt_tokens"] == 2 * len(ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {"300": 20.0}},
        {"allowed_token_ids": [300, 301, 302]},
        {"bad_words": ["the"], "min_tokens": 4},
        {"stop_token_ids": [300], "logit_bias": {"300": 8.0}},
    ],
)
def test_sampling_parameters_reach_the_model(llm: LLM, complete: Post, fields: dict[str, Any]) -> None:
    own = {k: v for k, v in fields.items() if k != "logit_bias"}
    bias = {int(token): value for token, value in fields.get("logit_bias", {}).items()}
    params = llm.sampling_params(**{"max_tokens": 8, "seed": 1, **own, "logit_bias": bias})
    [offline] = llm.with_drafter("none").generate(PROMPT, params)
    assert complete(PROMPT, **fields)["choices"][0]["text"] == offline.outputs[0].text


@pytest.mark.parametrize("text", [PROMPT, "naïve 🦊🦊 日本 été<|im_end|> ünï"])
def test_logprobs_and_echo(llm: LLM, complete: Post, text: str) -> None:
    ids = llm.tokenizer.encode(text)
    fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    [choice] = complete(text, echo=True, logprobs=2, return_token_ids=True, **fields)["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(text) and len(choice["text"]) > len(text)
    assert len(found["tokens"]) == len(ids) + 4 == len(found["text_offset"]) == len(found["top_logprobs"])
    assert found["tokens"] == [answers.token_text(llm.tokenizer, token) for token in [*ids, *choice["token_ids"]]]
    check_offsets(llm, choice["text"], found["text_offset"], [*ids, *choice["token_ids"]])
    params = SamplingParams(**fields, logprobs=2, prompt_logprobs=2)
    [offline] = llm.with_drafter("none").generate(text, params)
    expected = [*(offline.prompt_logprobs or ())[1:], *(offline.outputs[0].logprobs or ())]
    assert found["token_logprobs"] == [None, *(entry.chosen.logprob for entry in expected if entry)]


def check_offsets(llm: LLM, text: str, offsets: list[int], ids: list[int]) -> None:
    """An offset is where the characters begin that a token has bytes of."""
    raw = b""
    for token, offset in zip(ids, offsets, strict=True):
        whole = raw.decode("utf-8", "ignore")
        assert (offset, text[:offset]) == (len(whole), whole)
        raw += answers.token_bytes(llm.tokenizer, token)


def test_scoring_a_text_without_writing(complete: Post) -> None:
    [choice] = complete(PROMPT, echo=True, logprobs=0, max_tokens=0)["choices"]
    assert choice["text"] == PROMPT and len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"])


def test_streaming_several_prompts(client: TestClient, complete: Post) -> None:
    body = {"prompt": [PROMPT, "The cat"], "max_tokens": 8, "seed": 1, "stream": True, "logprobs": 1, "min_tokens": 8}
    events = events_of(client.post("/v1/completions", json=body).text)
    texts, tokens = {0: "", 1: ""}, {0: 0, 1: 0}
    for event in map(json.loads, events[:-1]):
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert list(texts.values()) == [choice["text"] for choice in complete([PROMPT, "The cat"], min_tokens=8)["choices"]]
    assert set(tokens.values()) == {8}


def test_token_ids_of_several_prompts_and_samples(llm: LLM, client: TestClient, complete: Post) -> None:
    fields = {"n": 2, "min_tokens": 8, "return_token_ids": True, "logprobs": 0}
    whole = complete([PROMPT, "The cat"], **fields)["choices"]
    prompts = [llm.tokenizer.encode(text) for text in (PROMPT, "The cat")]
    assert [choice["prompt_token_ids"] for choice in whole] == [prompts[0]] * 2 + [prompts[1]] * 2
    for choice in whole:
        assert len(choice["token_ids"]) == 8 == len(choice["logprobs"]["tokens"])
        assert llm.tokenizer.decode(choice["token_ids"]) == choice["text"]
    body = {"prompt": [PROMPT, "The cat"], "max_tokens": 8, "seed": 1, "stream": True, **fields}
    told: dict[int, list[int]] = {i: [] for i in range(4)}
    heads: dict[int, list[int]] = {}
    for event in events_of(client.post("/v1/completions", json=body).text)[:-1]:
        [choice] = json.loads(event)["choices"]
        told[choice["index"]] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            assert choice["index"] not in heads
            heads[choice["index"]] = choice["prompt_token_ids"]
    assert list(told.values()) == [choice["token_ids"] for choice in whole]
    assert [heads[i] for i in range(4)] == [choice["prompt_token_ids"] for choice in whole]


def test_nothing_written_has_no_token_ids(complete: Post) -> None:
    [choice] = complete(PROMPT, echo=True, max_tokens=0, return_token_ids=True)["choices"]
    assert choice["token_ids"] == [] and choice["prompt_token_ids"]


def test_a_streamed_echo_begins_with_the_prompt(client: TestClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "echo": True}
    events = events_of(client.post("/v1/completions", json=body).text)
    assert json.loads(events[0])["choices"][0]["text"] == PROMPT


def test_requests_without_a_seed_differ(client: TestClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.5}
    answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
    assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]
    [seed] = answers[0]["forerun"]["seeds"]
    again = client.post("/v1/completions", json={**body, "seed": seed}).json()
    assert again["choices"] == answers[0]["choices"]  # the reported seed repeats the text


def test_tokenize_and_detokenize(llm: LLM, post: Post) -> None:
    answer = post("/tokenize", prompt="Grüße, 世界!", return_token_strs=True)
    assert answer["tokens"] == llm.tokenizer.encode("Grüße, 世界!") and answer["count"] == len(answer["tokens"])
    assert len(answer["token_strs"]) == answer["count"] and answer["max_model_len"] == llm.max_model_len
    assert post("/detokenize", tokens=answer["tokens"])["prompt"] == "Grüße, 世界!"
    messages = [{"role": "user", "content": "hi"}]
    assert post("/tokenize", messages=messages)["tokens"] == llm.render_chat(messages)


def test_models_and_names(client: TestClient, complete: Post) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["mini", "other-name"]
    assert complete(PROMPT, model="other-name")["choices"] == complete(PROMPT, model="mini")["choices"]
