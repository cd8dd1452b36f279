"""`--lora NAME=PATH`: the commands that answer use the adapter, `verify` takes all in turn."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.weights.resolve import resolve_model
from tests.support.adapters import write_adapter

PROMPT = "Tell me a story about a little bird."
SHORT = ("--max-tokens", "8", "--temperature", "0")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, base = tmp_path_factory.mktemp("adapters"), resolve_model("mini")
    modules = ("q_proj", "v_proj", "down_proj")
    return [str(write_adapter(folder / f"a{seed}", base, modules, seed, rank=2 + seed)) for seed in range(2)]


def test_answers_have_the_adapter(run: Any, run_json: Any, folders: list[str]) -> None:
    plain, *adapted = (
        run_json("generate", PROMPT, *SHORT, *(word for name in given for word in ("--lora", f"x={name}")))
        for given in ((), *zip(folders))
    )
    texts = [answer["text"] for answer in (plain, *adapted)]
    assert len(set(texts)) == 3, "adapters change nothing"
    streamed = run("generate", PROMPT, *SHORT, "--lora", f"x={folders[0]}").stdout
    assert streamed.removesuffix("\n") == texts[1]
    chat = run("chat", *SHORT, "--lora", f"x={folders[0]}", stdin=PROMPT).stdout
    assert texts[1].strip() in chat and texts[0].strip() not in chat


def test_an_answer_has_one_adapter(run: Any, folders: list[str]) -> None:
    both = [word for index, folder in enumerate(folders) for word in ("--lora", f"a{index}={folder}")]
    for command in (("generate", PROMPT), ("chat",)):
        assert "an answer has one adapter" in " ".join(run(*command, *both, status=2).stderr.split())
    assert "--lora must be NAME=PATH" in run("generate", PROMPT, "--lora", "a", status=2).stderr


def test_verify_takes_several(run_json: Any, folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})
    both = [word for index, folder in enumerate(folders) for word in ("--lora", f"a{index}={folder}")]
    report = run_json("verify", "mini", *both, "--drafters", "ngram", "--limit", "3", *SHORT)
    assert report["passed"] and report["checks"][0]["num_prompts"] == 3


def test_serve_refuses_an_adapter_with_the_models_name_before_it_reads_files(run: Any) -> None:
    said = run("serve", "mini", "--lora", "mini=/nowhere", status=2).stderr
    assert "give one of them another name" in " ".join(said.split())
