"""generation_config.json: sampling defaults and end tokens for whoever gives none, in the API and on the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from forerun.weights.resolve import resolve_model
from tests.support import mini

PROMPT = "Once upon a time there was a little fox"
OWN = {"temperature": 0.5, "top_p": 0.8, "top_k": 3, "min_p": 0.05, "repetition_penalty": 1.3}


def folder_with(path: Path, **values: Any) -> Path:
    """A folder with the embedded model and a generation_config.json of its own."""
    path.mkdir()
    for file in resolve_model("mini").iterdir():
        (path / file.name).symlink_to(file)
    (path / "generation_config.json").unlink()
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def open_llm(model: str | Path, choice: str | Path = "auto") -> LLM:
    return LLM(str(model), max_model_len=128, max_num_seqs=4, generation_config=str(choice))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ends = [300, 2]  # not the model's own, so that it shows which are in use
    return folder_with(
        tmp_path_factory.mktemp("own") / "model", **OWN, do_sample=True, eos_token_id=ends, bos_token_id=1
    )


@pytest.fixture(scope="module")
def opinionated(folder: Path) -> LLM:
    return open_llm(folder)


def text_of(llm: LLM, params: SamplingParams | None) -> str:
    return llm.generate(PROMPT, params)[0].outputs[0].text


def test_values_that_nobody_gives_are_the_models_own(opinionated: LLM) -> None:
    assert opinionated.loaded.sampling == OWN
    assert opinionated.sampling_params(top_k=0, max_tokens=5) == SamplingParams(**{**OWN, "top_k": 0}, max_tokens=5)
    assert set(opinionated.tokenizer.eos_token_ids) == {300, 2}
    groups = [opinionated.prepare(PROMPT), opinionated.prepare(PROMPT, SamplingParams())]
    own, given = (group.samples[0].request.params for group in groups)
    assert own == SamplingParams(**OWN)
    assert given == SamplingParams()  # whoever gives parameters gives all of them
    assert opinionated.generate(PROMPT)[0].outputs[0].text != ""


def test_end_tokens_end_texts(opinionated: LLM) -> None:
    params = SamplingParams(logit_bias={300: 100.0}, max_tokens=4)
    [output] = opinionated.generate(PROMPT, params)
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].token_ids == (300,)


def test_another_file_or_none_at_all(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    plain = open_llm(folder, "none")
    assert plain.loaded.sampling == {}
    named = config["eos_token_id"]
    assert set(plain.tokenizer.eos_token_ids) == {2} | set(named if isinstance(named, list) else [named])
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"temperature": 0, "top_k": None, "eos_token_id": 301}))
    greedy = open_llm("mini", file)
    assert greedy.loaded.sampling == {"temperature": 0} and set(greedy.tokenizer.eos_token_ids) == {301, 2}
    expected = mini.plain().generate(PROMPT, SamplingParams(temperature=0.0))[0].outputs[0].text
    assert text_of(greedy, None) == expected == text_of(greedy.with_drafter("ngram"), None)
    assert open_llm("mini", folder).loaded.sampling == OWN


def test_the_embedded_model_has_a_temperature() -> None:
    assert mini.plain().loaded.sampling == {"temperature": 0.5}
    assert mini.plain().sampling_params() == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("content", "says"),
    [('{"temperature": "hot"}', "temperature"), ('{"top_p": 7}', "top_p"), ("[]", "JSON object"), (None, "no ")],
)
def test_files_that_are_wrong(tmp_path: Path, content: str | None, says: str) -> None:
    file = tmp_path / "generation_config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(Exception, match=says) as caught:
        open_llm("mini", file)
    assert "generation_config.json" in str(caught.value)
    assert content == "[]" or isinstance(caught.value, ConfigError)


def test_requests_to_a_server(opinionated: LLM) -> None:
    pytest.importorskip("fastapi")
    from tests.server.conftest import client_of

    with client_of(opinionated) as client:
        for path, asked in (
            ("/v1/completions", {"prompt": PROMPT}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            body = {**asked, "seed": 5, "max_tokens": 16}
            silent, spoken, other = (
                client.post(path, json={**body, **more}).json()["choices"]
                for more in ({}, OWN, {**OWN, "top_k": 0, "top_p": 1.0, "temperature": 1.5})
            )
            partly = client.post(path, json={**body, "temperature": 1.5, "top_p": 1, "top_k": 0}).json()["choices"]
            assert silent == spoken != other == partly


def test_the_command_line(folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from forerun.cli.app import app

    def said(*options: str) -> tuple[list[int], str]:
        limits = ["--max-tokens", "12", "--max-model-len", "128", "--drafter", "none", "--json"]
        result = CliRunner().invoke(app, ["generate", str(folder), PROMPT, *limits, *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["token_ids"], " ".join(result.stderr.split())

    written = [part for name, value in OWN.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    own, note = said()
    assert "temperature 0.5, top_p 0.8, top_k 3" in note
    assert said(*written)[0] == own
    plain, note = said("--generation-config", "none")
    usual = ["--temperature", "0.7", "--top-p", "1", "--top-k", "0", "--min-p", "0", "--repetition-penalty", "1"]
    assert plain == said(*usual, "--generation-config", "none")[0] != own and "temperature" not in note


def test_run_samples_as_generate_does(folder: Path) -> None:
    from typer.testing import CliRunner

    from forerun.cli.app import app

    def text(*arguments: str) -> str:
        limits = ["--max-tokens", "12", "--max-model-len", "128", "--drafter", "none"]
        result = CliRunner().invoke(app, [*arguments, *limits])
        assert result.exit_code == 0, result.output
        return result.stdout

    asked = (str(folder), PROMPT)
    assert text("run", *asked) == text("generate", *asked) != text("run", *asked, "--temperature", "3")
