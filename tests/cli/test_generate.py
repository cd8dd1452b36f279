"""`forerun generate`: where prompts come from, what is printed, the JSON fields."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.cli.generate import as_prompt
from forerun.errors import ConfigError

PROMPT = "Tell me a story about a little bird."
SHORT = ("--max-tokens", "12", "--temperature", "0")
FIELDS = {"text", "token_ids", "finish_reason", "stats"}
STATS = {"num_tokens", "num_steps", "acceptance_length", "tokens_per_s", "ttft_s", "drafters"}


def test_json_fields_are_these(run_json: Any) -> None:
    answer = run_json("generate", PROMPT, *SHORT)
    assert set(answer) == FIELDS and set(answer["stats"]) == STATS
    assert len(answer["token_ids"]) == answer["stats"]["num_tokens"] <= 12
    assert answer["finish_reason"] in ("stop", "length")
    assert all(set(count) == {"drafted", "accepted"} for count in answer["stats"]["drafters"].values())


def test_every_drafter_writes_the_same(run_json: Any) -> None:
    long = ("--max-tokens", "40", "--temperature", "1", "--seed", "7")
    answers = [run_json("generate", PROMPT, *long, "--drafter", name) for name in ("none", "ngram", "draft")]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 1
    assert answers[0]["stats"]["drafters"] == {} and answers[0]["stats"]["acceptance_length"] == 1.0


def test_the_precision_of_the_cache_can_be_chosen(run: Any, run_json: Any) -> None:
    long = ("--max-tokens", "24", "--temperature", "1", "--kv-cache-dtype", "int8")
    answers = [run_json("generate", PROMPT, *long, "--drafter", name) for name in ("none", "draft")]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    said = run("generate", PROMPT, "--kv-cache-dtype", "fp8", status=2).stderr
    assert "error: --kv-cache-dtype must be one of auto, float32, bfloat16, int8" in " ".join(said.split())


def test_nothing_learned_is_kept_where_that_is_not_wanted(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    run("generate", PROMPT, *SHORT, "--no-keep-learned")
    run("chat", *SHORT, "--no-keep-learned", stdin="Hello")
    assert not list(tmp_path.iterdir())
    run("generate", PROMPT, *SHORT)
    assert len(list((tmp_path / "learned").iterdir())) == 1


def test_prompts_come_from_arguments_files_and_stdin(run_json: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, "utf-8")
    answers = [
        run_json("generate", PROMPT, *SHORT),
        run_json("generate", "mini", PROMPT, *SHORT),
        run_json("generate", "--model", "mini", "--file", str(file), *SHORT),
        run_json("generate", "mini", "--file", str(file), *SHORT),
        run_json("generate", *SHORT, stdin=PROMPT),
    ]
    assert len({answer["text"] for answer in answers}) == 1


@pytest.mark.parametrize("arguments", [["a", "b", "c"], ["a", "b", "--file", "c"]])
def test_too_many_prompts_are_refused(run: Any, arguments: list[str]) -> None:
    run("generate", *arguments, status=2)


@pytest.mark.parametrize("stdin", ["", " \n"])
def test_an_empty_prompt_is_refused(run: Any, stdin: str) -> None:
    assert "the prompt is empty" in run("generate", stdin=stdin, status=2).stderr


def test_a_missing_prompt_file_is_named(run: Any, tmp_path: Path) -> None:
    assert "cannot read the prompt" in run("generate", "--file", str(tmp_path / "none"), status=2).stderr


def test_a_prompt_longer_than_the_context_is_refused(run: Any) -> None:
    said = run("generate", "word " * 200, "--max-model-len", "64", status=2).stderr
    assert "the prompt has" in said and "64" in said


def test_streamed_text_is_the_text(run: Any, run_json: Any) -> None:
    text = run_json("generate", PROMPT, *SHORT)["text"]
    streamed = run("generate", PROMPT, *SHORT)
    assert streamed.stdout == f"{text}\n" == run("generate", PROMPT, *SHORT, "--no-stream").stdout
    assert "tokens/s" in streamed.stderr and "tokens a pass" in streamed.stderr


def test_drafts_are_marked_where_there_are_no_colours(run: Any, run_json: Any) -> None:
    options = ("--max-tokens", "40", "--ignore-eos", "--allowed-token-id", "300", "--drafter", "ngram", "--no-adaptive")
    text = run_json("generate", PROMPT, *options)["text"]
    marked = run("generate", PROMPT, *options, "--show-drafts")
    assert "[" in marked.stdout and "drafted and accepted" in marked.stderr
    assert marked.stdout.replace("[", "").replace("]", "") == f"{text}\n"


def test_raw_prompts_go_around_the_chat_template(run_json: Any) -> None:
    raw, chat = (run_json("generate", PROMPT, *SHORT, flag) for flag in ("--raw", "--chat"))
    assert raw["text"] != chat["text"] and chat == {**run_json("generate", PROMPT, *SHORT), "stats": chat["stats"]}


def test_several_samples_are_a_list(run: Any, run_json: Any) -> None:
    options = ("--num-samples", "2", "--max-tokens", "8", "--temperature", "1")
    answers = run_json("generate", PROMPT, *options)
    assert len(answers) == 2 and answers[0]["token_ids"] != answers[1]["token_ids"]
    assert "#2" in run("generate", PROMPT, *options).stdout


def test_logprobs_come_when_asked_for(run_json: Any) -> None:
    answer = run_json("generate", PROMPT, *SHORT, "--logprobs", "2")
    assert set(answer) == FIELDS | {"logprobs"} and len(answer["logprobs"]) == len(answer["token_ids"])
    assert answer["logprobs"][0]["chosen"]["token_id"] == answer["token_ids"][0]


def test_sampling_options_reach_the_engine(run_json: Any) -> None:
    plain = run_json("generate", PROMPT, *SHORT)
    first = plain["token_ids"][0]
    assert run_json("generate", PROMPT, *SHORT, "--logit-bias", f"{first}=-100")["token_ids"][0] != first
    assert set(run_json("generate", PROMPT, *SHORT, "--allowed-token-id", "300", "--ignore-eos")["token_ids"]) == {300}
    stopped = run_json("generate", PROMPT, *SHORT, "--stop-token-id", str(first))
    assert stopped["finish_reason"] == "stop" and stopped["stats"]["num_tokens"] == 1


def test_a_predicted_text_makes_drafts_and_changes_nothing(run: Any, run_json: Any, tmp_path: Path) -> None:
    long = ("--max-tokens", "40", "--temperature", "0", "--drafter", "suffix", "--no-adaptive")
    plain = run_json("generate", PROMPT, *long)
    (tmp_path / "said.txt").write_text(plain["text"], "utf-8")
    predicted = run_json("generate", PROMPT, *long, "--prediction", str(tmp_path / "said.txt"))
    assert predicted["text"] == plain["text"]
    assert predicted["stats"]["num_steps"] < 0.7 * plain["stats"]["num_steps"]
    missing = run("generate", PROMPT, *long, "--prediction", str(tmp_path / "no.txt"), status=2).stderr
    assert "cannot read the prediction" in " ".join(missing.split())


def test_chat_without_a_template_says_what_to_leave_out() -> None:
    llm: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    with pytest.raises(ConfigError, match="no chat template: leave --chat out, or give --raw"):
        as_prompt(llm, "Hi", chat=True)
