"""Which argument is the model, where the prompt comes from, and that nothing is guessed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ConfigError, DataError
from forerun.weights.resolve import resolve_model

PROMPT = "Tell me a story about a lost key."
SHORT = ("--max-tokens", "24", "--temperature", "0", "--drafter", "none")


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with another model than the default one, and the current folder."""
    shutil.copytree(resolve_model("mini-draft"), tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "other"


@pytest.mark.parametrize("form", ["./other", "other", "{folder}", "mini-draft"])
def test_a_lone_argument_that_is_a_model_is_one(run_json: Any, other: Path, form: str) -> None:
    name = form.format(folder=other)
    expected = run_json("generate", "mini-draft", PROMPT, *SHORT)
    assert run_json("generate", name, *SHORT, stdin=PROMPT)["text"] == expected["text"]
    assert expected["text"] != run_json("generate", "mini", PROMPT, *SHORT)["text"]


def test_a_pipe_of_the_shell_is_the_prompt(run_json: Any, other: Path) -> None:
    command = [sys.executable, "-m", "forerun.cli", "generate", "./other", *SHORT]
    done = subprocess.run(command, input=PROMPT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.rstrip("\n") == run_json("generate", "mini-draft", PROMPT, *SHORT)["text"]


def test_a_path_that_is_no_model_is_never_the_prompt(run: Any, other: Path) -> None:
    said = run("generate", "./othr", *SHORT, stdin=PROMPT, status=2).stderr
    assert "there is no model './othr'" in said and "did you mean other?" in said


def test_a_word_that_is_nearly_a_model_is_said_to_be_the_prompt(run: Any, other: Path) -> None:
    assert "'minni' is the prompt, for mini; did you mean mini?" in run("generate", "minni", *SHORT).stderr
    assert "is the prompt" not in run("generate", "Minnie is here", *SHORT).stderr


def test_the_same_text_is_a_prompt_behind_a_model(run_json: Any, other: Path) -> None:
    assert run_json("generate", "mini", "./other", *SHORT)["text"]


@pytest.mark.parametrize("arguments", [["Summarize this."], ["mini", "Summarize this."]])
def test_two_prompts_are_refused(run: Any, arguments: list[str]) -> None:
    said = run("generate", *arguments, *SHORT, stdin=PROMPT, status=2).stderr
    assert "the prompt was given twice, as an argument and on standard input" in said


def test_a_path_that_is_not_there_is_said_before_a_missing_prompt(run: Any, other: Path) -> None:
    assert "there is no model './nofolder'" in run("generate", "./nofolder", stdin="", status=2).stderr


def test_a_head_is_no_model(run: Any) -> None:
    for command in (("generate", "mini-eagle", PROMPT), ("inspect", "mini-eagle")):
        said = run(*command, status=2).stderr
        assert "mini-eagle is a draft head, not a model" in said and "--drafter eagle=mini-eagle" in said


def test_a_text_beside_a_file_is_a_second_prompt(run: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    said = run("generate", "hello", "--file", str(tmp_path / "prompt.txt"), *SHORT, status=2).stderr
    assert "'hello' names no model that is here" in said and "--file" in said


def test_a_model_of_the_hub_or_a_text(run: Any) -> None:
    said = run("generate", "someone/some-model", *SHORT, stdin=PROMPT, status=2).stderr
    assert "someone/some-model is a text, or a model of the hub that was not downloaded yet" in said


def test_two_models_are_refused(run: Any, other: Path) -> None:
    said = run("generate", "./other", "--model", "mini", *SHORT, stdin=PROMPT, status=2).stderr
    assert "two models were given, ./other and --model mini" in said


def test_a_terminal_gives_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.prompt import model_and_prompt

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(ConfigError, match="there is no prompt for the model mini-draft"):
        model_and_prompt(["mini-draft"], None, None)
    assert model_and_prompt(["a long text of words"], None, None) == ("mini", "a long text of words")


def test_long_and_odd_texts_are_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.prompt import model_and_prompt

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for text in ("word " * 5000, "w" * 5000, "w" * 90, "a\nb", "Hello", "and so on ...", "what is a/b?"):
        assert model_and_prompt([text], None, None) == ("mini", text)


WINDOWS = b"\xef\xbb\xbfOne\r\nTwo\r\n"  # a byte order mark and its line ends


def test_a_text_from_windows_is_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.prompt import _read_prompt, read_file

    for given, text in ((b"One\n\n", "One\n"), (b"One", "One"), (WINDOWS, "One\nTwo")):
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(given), newline="\n"))
        (tmp_path / "prompt.txt").write_bytes(given)
        assert _read_prompt(None, None) == _read_prompt(tmp_path / "prompt.txt", None) == text, "without its newline"
    assert read_file(tmp_path / "prompt.txt", "the prediction") == "One\nTwo\n"
    (tmp_path / "prompt.txt").write_bytes(b"One \xff")
    with pytest.raises(DataError, match=r"the prompt is not UTF-8 text \(byte 4\)"):
        read_file(tmp_path / "prompt.txt", "the prompt")


def test_a_line_from_windows_goes_on_behind_a_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.terminal import read_line

    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"One\\\r\nTwo\r\nThree\r\n"), newline="\n"))
    assert [read_line("> ") for _ in range(3)] == ["One\nTwo", "Three", None]


def test_what_is_missing_is_said(run: Any) -> None:
    assert (
        "the prompt is empty: give some text (the model is mini)" in run("generate", "mini", stdin="", status=2).stderr
    )
