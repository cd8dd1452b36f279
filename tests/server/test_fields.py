"""Request fields of other servers and clients: each means what its sender means, or is refused; none is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM, SamplingParams
from forerun.server import completions
from tests.server.conftest import Post, client_of, events_of
from tests.server.test_completions import check_offsets
from tests.support import mini

PROMPT = "Once upon a time there was"
NOTES: dict[str, Any] = {
    "metadata": {"run": 7}, "store": True, "user": "u", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "safety_identifier": "s", "service_tier": "priority", "extra_body": {}, "max_tokens": 12.0, "n": 1.0, "top_k": 0.0,
    "best_of": 1, "stream_options": None,
}  # fmt: skip


def streamed(client: TestClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = client.post(path, json={"stream": True, "seed": 1, "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    *events, end = events_of(answer.text)
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


# -- usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"include_usage": True}])
def test_usage_in_every_event(client: TestClient, extra: dict[str, Any]) -> None:
    options = {"continuous_usage_stats": True, **extra}
    events = streamed(client, "/v1/completions", prompt=[PROMPT, "A"], n=2, min_tokens=8, stream_options=options)
    prompts = [client.post("/tokenize", json={"prompt": text}).json()["count"] for text in (PROMPT, "A")]
    last: dict[int, dict[str, int]] = {}
    for event in (event for event in events if event["choices"]):
        [choice] = event["choices"]
        before = last.get(choice["index"], {"completion_tokens": 0})
        last[choice["index"]] = event["usage"]
        assert event["usage"]["completion_tokens"] > before["completion_tokens"]
    assert [last[i]["prompt_tokens"] for i in range(4)] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert {usage["completion_tokens"] for usage in last.values()} == {8}
    assert (events[-1]["choices"] == []) is bool(extra)

    chat = streamed(
        client, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], stream_options=options
    )
    counts = [event["usage"]["completion_tokens"] for event in chat]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] > 0


def test_scoring_counts_no_written_tokens(complete: Post) -> None:
    scored = complete(PROMPT, echo=True, logprobs=1, max_tokens=0, return_token_ids=True)
    assert scored["usage"]["completion_tokens"] == 0 == len(scored["choices"][0]["token_ids"])
    assert scored["usage"]["total_tokens"] == scored["usage"]["prompt_tokens"]


def test_seeds_are_listed_by_prompt(client: TestClient) -> None:
    for _ in range(5):  # seeds are drawn: any order of two is as likely as the other
        drawn = client.post("/v1/completions", json={"prompt": [PROMPT] * 2, "max_tokens": 8}).json()
        seeds = drawn["forerun"]["seeds"]
        texts = [choice["text"] for choice in drawn["choices"]]
        for seed, text in zip(seeds, texts, strict=True):
            again = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "seed": seed}).json()
            assert again["choices"][0]["text"] == text


# -- fields without an effect, unknown fields ---------------------------------------------------------------------


def test_notes_change_nothing(complete: Post, chat: Post) -> None:
    assert complete(PROMPT, **NOTES)["choices"] == complete(PROMPT, max_tokens=12)["choices"]
    assert chat("hi", **NOTES, documents=[], echo=False)["choices"] == chat("hi")["choices"]
    assert chat("hi", request_id="mine")["id"] == "chatcmpl-mine"
    assert complete("a", request_id="mine")["id"] == "cmpl-mine"


def test_messages_that_clients_copy_back(post: Post) -> None:
    answer = {"role": "assistant", "content": "hello"}
    copied = {**answer, "id": "m1", "refusal": None, "annotations": [], "audio": None, "reasoning": None,
              "cache_control": {"type": "ephemeral"}, "function_call": None, "tool_calls": None,
              "parsed": None}  # fmt: skip
    again = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    plain = [answer, {"role": "user", "content": "hi"}]
    given, wanted = ({"messages": m, "max_tokens": 8, "seed": 1} for m in ([copied, again], plain))
    assert post("/v1/chat/completions", **given)["choices"] == post("/v1/chat/completions", **wanted)["choices"]


def test_minus_one_is_no_limit_and_any_seed(llm: LLM, complete: Post, chat: Post) -> None:
    prompt = [300] * (llm.max_model_len - 9)
    long = complete(prompt, max_tokens=-1, stop_token_ids=[], ignore_eos=True)
    assert long["usage"]["total_tokens"] == llm.max_model_len
    assert complete(PROMPT, seed=-1)["forerun"]["seeds"] != complete(PROMPT, seed=-1)["forerun"]["seeds"]
    assert chat("hi", max_tokens=-1, stop=["e"])["choices"][0]["finish_reason"] == "stop"


def test_every_path_refuses_unknown_fields_or_says_that_it_dropped_them(llm: LLM, client: TestClient) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "messages": {"messages": [{"role": "user", "content": "hi", "colour": "red"}], "max_tokens": 4},
        "prompt": {"prompt": "hi", "max_tokens": 4},
        "tokens": {"tokens": [300]},
        "input": {"input": "hi"},
        "adapter": {"lora_name": "one"},
        "its folder": {"lora_name": "one", "lora_path": "one"},
        "batch": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    }
    without_json = {"/v1/embeddings", "/v1/files", "/v1/batches/{batch_id}/cancel"}
    paths = [path for path, kinds in client.app.openapi()["paths"].items() if "post" in kinds]  # type: ignore[attr-defined]
    assert len(paths) >= 4
    for path in {*paths, "/playground/stream"} - without_json:
        answers = [client.post(path, json={**body, "shade": {"deep": 1}}) for body in bodies.values()]
        assert {answer.status_code for answer in answers} == {400}, path
        assert any("unknown field" in answer.text for answer in answers), path  # the others lack something
    refused = client.post("/v1/completions", json={**bodies["prompt"], "shade": 1}).json()["error"]
    assert refused["param"] == "shade" and refused["code"] == "unknown_parameter"
    with client_of(llm, unknown_fields="ignore") as tolerant:
        for name, path in (("messages", "/v1/chat/completions"), ("prompt", "/v1/completions")):
            body = {**bodies[name], "seed": 1, "max_tokens": 4}
            told = tolerant.post(path, json={**body, "shade": 1}).json()
            dropped = ["shade", "messages.0.colour"] if name == "messages" else ["shade"]
            assert told["forerun"]["dropped_fields"] == dropped
            assert tolerant.post("/tokenize", json={**bodies["prompt"], "shade": 1}).status_code == 200
            assert "dropped_fields" not in client.post("/v1/completions", json={"prompt": "a"}).json()["forerun"]


def test_a_strict_function_that_no_grammar_holds_to_its_schema_is_named(chat: Post, post: Post) -> None:
    pytest.importorskip("xgrammar")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    lax = {"type": "function", "function": {"name": "g"}}
    assert chat("hi", tools=[lax, tool])["forerun"]["dropped_fields"] == ["tools.1.function.strict"]
    assert chat("hi", functions=[tool["function"]])["forerun"]["dropped_fields"] == ["functions.0.strict"]
    flat = {"name": "f", "strict": True}
    asked = {"input": "hi", "max_output_tokens": 1, "tools": [{**flat, "type": "function"}]}
    assert post("/v1/responses", **asked)["forerun"]["dropped_fields"] == ["tools.0.strict"]
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = post("/v1/messages", **message, tools=[{**flat, "input_schema": {}}])
    assert answer["forerun"]["dropped_fields"] == ["tools.0.strict"]
    for choice in ("none", "required", {"type": "function", "function": {"name": "f"}}):
        assert "dropped_fields" not in chat("hi", tools=[lax, tool], tool_choice=choice)["forerun"]


# -- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"continue_final_message": True, "add_generation_prompt": False}, {"prefix": True}])
def test_an_answer_that_is_begun_is_gone_on_with(llm: LLM, post: Post, complete: Post, fields: dict[str, Any]) -> None:
    begun = {"role": "assistant", "content": "The fox was "}
    if "prefix" in fields:
        begun, fields = {**begun, "prefix": True}, {}
    body = {"messages": [{"role": "user", "content": "Tell me"}, begun], **fields, "max_tokens": 8, "seed": 1}
    answer = post("/v1/chat/completions", **body, return_token_ids=True)
    prompt = "<|im_start|>user\nTell me<|im_end|>\n<|im_start|>assistant\nThe fox was "
    assert llm.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False) == prompt
    assert text_of(answer) == complete(prompt)["choices"][0]["text"]


def test_templates_of_requests_need_trust(llm: LLM) -> None:
    template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    asked = {"messages": [{"role": "assistant", "content": " So "}], "chat_template": template, "max_tokens": 4}
    with client_of(llm, trust_request_chat_template=True) as client:
        answer = client.post("/v1/chat/completions", json={**asked, "return_token_ids": True}).json()
        assert llm.tokenizer.decode(answer["prompt_token_ids"]) == "[So]"
        tokens = client.post("/tokenize", json={k: v for k, v in asked.items() if k != "max_tokens"}).json()["tokens"]
        assert tokens == answer["prompt_token_ids"]
        begun = {**asked, "continue_final_message": True, "return_token_ids": True}
        begun_ids = client.post("/v1/chat/completions", json=begun).json()["prompt_token_ids"]
        assert llm.tokenizer.decode(begun_ids) == "[So"  # this template strips texts, so what it was given ends there
        wrong = client.post("/v1/chat/completions", json={**asked, "chat_template": "{% if %}"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "chat_template"
        known = {**asked, "chat_template": "{{ verbosity }}{{ documents[0].t }}", "verbosity": "low"}
        answer = client.post(
            "/v1/chat/completions", json={**known, "documents": [{"t": "!"}], "return_token_ids": True}
        )
        assert llm.tokenizer.decode(answer.json()["prompt_token_ids"]) == "low!"


def test_prompts_are_cut_from_the_left(llm: LLM, complete: Post, chat: Post) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    assert complete(PROMPT, truncate_prompt_tokens=3)["choices"] == complete(ids[-3:])["choices"]
    assert complete(PROMPT, truncate_prompt_tokens=3, echo=True, max_tokens=0)["choices"][0]["text"] == (
        llm.tokenizer.decode(ids[-3:])
    )
    most = complete([300] * 2000, truncate_prompt_tokens=-1, max_tokens=5, ignore_eos=True)["usage"]
    assert most == {**most, "completion_tokens": 5, "total_tokens": llm.max_model_len}
    assert chat("hi", truncate_prompt_tokens=4)["usage"]["prompt_tokens"] == 4


def test_filling_in(llm: LLM, complete: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = complete("def f(", 400, suffix="return 1")
    assert refused["error"]["param"] == "suffix" and "no tokens for filling in" in refused["error"]["message"]
    names = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    monkeypatch.setattr(completions, "FILL_MARKS", (("<none>", "<at>", "<all>"), names))
    before, behind, gap = map(llm.tokenizer.token_id, names)
    first, last = (llm.tokenizer.encode(text) for text in ("def f(", "    return x\n"))
    asked = {"suffix": "    return x\n", "return_token_ids": True}
    answer = complete("def f(", **asked)["choices"]
    assert answer == complete([before, *first, behind, *last, gap], return_token_ids=True)["choices"]
    assert complete(first, **asked)["choices"] == answer


# -- answers ------------------------------------------------------------------------------------------------------


def test_prompt_logprobs(llm: LLM, complete: Post, chat: Post) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    [offline] = llm.with_drafter("none").generate(PROMPT, params)
    answer = complete(PROMPT, prompt_logprobs=2, max_tokens=0, return_tokens_as_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == "" and answer["usage"]["completion_tokens"] == 0
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) + 1 == len(llm.tokenizer.encode(PROMPT))
    for found, entry in zip(others, (offline.prompt_logprobs or ())[1:], strict=True):
        assert entry is not None
        expected = {str(t.token_id): t for t in (entry.chosen, *entry.top)}
        assert {k: (v["logprob"], v["rank"]) for k, v in found.items()} == {
            k: (t.logprob, t.rank) for k, t in expected.items()
        }
        assert all(v["decoded_token"] == f"token_id:{k}" for k, v in found.items())
    talked = chat("hi", prompt_logprobs=0, return_token_ids=True)
    ids = talked["prompt_token_ids"]
    assert [next(iter(entry)) for entry in talked["prompt_logprobs"][1:]] == [str(token) for token in ids[1:]]
    both = complete(PROMPT, prompt_logprobs=3, echo=True, logprobs=1)["choices"][0]
    alone = complete(PROMPT, echo=True, logprobs=1)["choices"][0]
    assert both["logprobs"] == alone["logprobs"] and both["text"] == alone["text"]


def test_tokens_as_ids_and_without_text(llm: LLM, client: TestClient, complete: Post, chat: Post) -> None:
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    [choice] = complete(PROMPT, logprobs=1, **fields)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    [said] = chat("hi", logprobs=True, top_logprobs=1, **fields)["choices"]
    assert [p["token"] for p in said["logprobs"]["content"]] == [f"token_id:{token}" for token in said["token_ids"]]
    silent = complete(PROMPT, detokenize=False, return_token_ids=True)["choices"][0]
    assert (
        silent["text"] == ""
        and silent["token_ids"] == complete(PROMPT, return_token_ids=True)["choices"][0]["token_ids"]
    )
    pieces = streamed(client, "/v1/completions", prompt=PROMPT, detokenize=False)
    assert {piece["choices"][0]["text"] for piece in pieces} == {""}


def test_text_of_stop_tokens_where_it_is_asked_for(llm: LLM, complete: Post, chat: Post) -> None:
    comma = llm.tokenizer.encode(",")[0]
    fields = {"stop_token_ids": [comma], "logit_bias": {str(comma): 8.0}}
    assert complete(PROMPT, **fields)["choices"][0]["text"].count(",") == 0
    kept = complete(PROMPT, **fields, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"].endswith(",") and kept["stop_reason"] == comma
    end = llm.tokenizer.token_id("<|im_end|>")
    ended = {"logit_bias": {str(end): 50.0}, "include_stop_str_in_output": True}
    assert text_of(chat("hi", **ended)) == ""
    assert text_of(chat("hi", **ended, skip_special_tokens=False)) == "<|im_end|>"


def test_offsets_of_answers_beyond_ascii_whole_and_streamed(llm: LLM, client: TestClient, complete: Post) -> None:
    pytest.importorskip("xgrammar")
    asked = {"guided_choice": ["né 🦊日, END"], "max_tokens": 40, "logprobs": 0, "return_token_ids": True}
    [choice] = complete(PROMPT, **asked)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert choice["text"] == "né 🦊日, END"
    check_offsets(llm, choice["text"], offsets, choice["token_ids"])
    # Text that may begin a stop string is held back; offsets are not.
    events = streamed(client, "/v1/completions", prompt=PROMPT, **{**asked, "stop": ["日本", ", ENDE"]})
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert [offset for piece in pieces for offset in piece["logprobs"]["text_offset"]] == offsets


# -- functions ------------------------------------------------------------------------------------------------------


def test_functions_as_they_were_before_tools(client: TestClient, llm: LLM, post: Post) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    functions = [{"name": "count", "description": "Counts.", "parameters": schema}]
    asked = {"messages": [{"role": "user", "content": "count"}], "functions": functions, "seed": 1, "max_tokens": 40}
    forced = {**asked, "function_call": {"name": "count"}}
    [choice] = post("/v1/chat/completions", **forced)["choices"]
    call = choice["message"]["function_call"]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert call["name"] == "count" and 0 <= json.loads(call["arguments"])["n"] <= 9
    pieces = [event["choices"][0] for event in streamed(client, "/v1/chat/completions", **forced)]
    calls = [piece["delta"]["function_call"] for piece in pieces if "function_call" in piece["delta"]]
    assert calls[0]["name"] == "count" and pieces[-1]["finish_reason"] == "function_call"
    assert "".join(call.get("arguments", "") for call in calls) == call["arguments"]

    history = [
        *asked["messages"],
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "count", "content": "3"},
    ]
    calls_of_today = [{"id": "call00001", "type": "function", "function": call}]
    today = [
        *asked["messages"],
        {"role": "assistant", "content": None, "tool_calls": calls_of_today},
        {"role": "tool", "name": "count", "tool_call_id": "call00001", "content": "3"},
    ]
    shown = {"chat_template": "{{ messages | tojson }}"}  # mini's own template shows texts only
    with client_of(llm, trust_request_chat_template=True) as trusting:
        tokens = [
            trusting.post("/tokenize", json={"messages": messages, **shown}).json()["tokens"]
            for messages in (history, today)
        ]
    assert tokens[0] == tokens[1] and '"tool_call_id": "call00001"' in llm.tokenizer.decode(tokens[0])


# -- predictions ------------------------------------------------------------------------------------------------


def test_a_prediction_makes_drafts_and_changes_nothing() -> None:
    llm = mini.drafting("suffix", adaptive=False, across_requests=False)
    question = [{"role": "user", "content": "Tell me a story."}]
    with client_of(llm) as own:

        def asked(**fields: Any) -> Any:
            body = {"messages": question, "max_tokens": 40, "seed": 3, "ignore_eos": True, **fields}
            answer = own.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        plain = asked()
        text = text_of(plain)
        assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
        halves = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
        for content, least in ((text, 25), (halves, 25), ("nothing of the kind", 0)):
            answer = asked(prediction={"type": "content", "content": content})
            assert text_of(answer) == text
            details = answer["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] >= least
            expected = content if isinstance(content, str) else text
            num = len(llm.tokenizer.encode(expected, add_special_tokens=False))
            assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == num
        assert asked(prediction={"type": "content", "content": text})["forerun"]["num_steps"] < 12
        events = streamed(
            own, "/v1/chat/completions", messages=question, max_tokens=40, seed=3, ignore_eos=True,
            prediction={"type": "content", "content": text}, stream_options={"include_usage": True},
        )  # fmt: skip
        assert events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 25


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ({"type": "content", "content": "a"}, "read by the drafter suffix alone"),  # this server has ngram
        ({"type": "code", "content": "a"}, "prediction"),
        ({"type": "content"}, "prediction"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction"),
        ("a text", "prediction"),
    ],
)
def test_predictions_that_cannot_be_used(chat: Post, prediction: Any, message: str) -> None:
    assert message in chat("hello", 400, prediction=prediction)["error"]["message"]
