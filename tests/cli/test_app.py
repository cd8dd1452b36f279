"""The command as a whole: version, help, how errors end it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun import __version__

COMMANDS = (
    "demo",
    "run",
    "pull",
    "list",
    "rm",
    "learned",
    "generate",
    "chat",
    "deploy",
    "batch",
    "bench",
    "verify",
    "inspect",
    "quantize",
    "perplexity",
    "train",
)


def test_version(run: Any) -> None:
    assert run("--version").stdout == f"forerun {__version__}\n"


def test_help_names_every_command(run: Any) -> None:
    text = run("--help").stdout
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("command", ["generate", "inspect", "verify", "chat", "demo"])
def test_an_unknown_model_is_one_clear_line(run: Any, command: str, tmp_path: Path) -> None:
    prompt = ["some text"] if command == "generate" else []
    result = run(command, *prompt, "--model", str(tmp_path / "nothing"), status=2, stdin="")
    assert result.stderr.startswith("error: there is no model") and str(tmp_path / "nothing") in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr


def test_two_models_are_refused(run: Any) -> None:
    assert "two models were given" in run("inspect", "mini", "--model", "other", status=2).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1"], "error: --temperature must be a number in [0, 100]"),
        (["--top-p", "0"], "error: --top-p must be"),
        (["--max-tokens", "0"], "error: --max-tokens must be"),
        (["--min-tokens", "9", "--max-tokens", "3"], "error: --min-tokens 9 is above --max-tokens 3"),
        (["--logit-bias", "abc"], "--logit-bias must be ID=VALUE"),
        (["--logit-bias", "3=x"], "must be numbers"),
        (["--logit-bias", "99999999=1"], "token id 99999999"),
        (["--stop", ""], "error: --stop and --bad-word may not hold an empty string"),
        (["--drafter", "magic"], "there is no drafter magic; choose from"),
        (["--draft-model", "mini-draft", "--drafter", "ngram"], "choose one of dflash, draft, eagle, medusa, mtp"),
        (["--dtype", "int3"], "error: --dtype must be one of"),
        (["--kernels", "cuda"], "kernels must be one of"),
        (["--kernels", "cpu:sse9"], "there is no instruction set 'sse9'"),
        (["--kernels", "avx2"], "or cpu:ISA for an instruction set, such as cpu:avx2; got 'avx2'"),
        (["--verification", "typical"], "verification must be one of"),
        (["--max-model-len", "99999999"], "the positions this model can use; got 99999999"),
        (["--threads", "0"], f"threads must be from 1 to {os.cpu_count()}, the cores of this machine; got 0"),
        (["--threads", "99999"], f"threads must be from 1 to {os.cpu_count()}, the cores of this machine; got 99999"),
        (["--drafter", "ngrm"], "there is no drafter ngrm; choose from"),
        (["--drafter", "mini-draft"], "a model drafts as draft=mini-draft"),
        (["--drafter", "ngram=5"], "a draft model was given but the drafter is 'ngram': choose one of"),
        (["--logprobs", "3"], "--logprobs 3 are printed with --json only"),
        (["--dtype", "float16"], "is stored in BF16, whose values float16 would round"),
        (["--model", "./mini-drft"], "did you mean mini-draft?"),
        (["--drafter", "draft=./mini-drft"], "there is no model './mini-drft'"),
    ],
)
def test_bad_values_are_named(run: Any, arguments: list[str], said: str) -> None:
    result = run("generate", "some text", "--temperature", "1", *arguments, status=2)
    assert result.stderr.startswith("error: ") and said in " ".join(result.stderr.split())


def test_ctrl_c_ends_with_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.cli.engine.open_llm", interrupted)
    assert run("generate", "some text", status=130).stderr == "error: interrupted\n"


def test_a_path_that_cannot_be_written_is_one_clear_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "/there/file")

    monkeypatch.setattr("forerun.cli.engine.open_llm", refused)
    said = run("generate", "some text", status=2).stderr
    assert said.startswith("error: /there/file: Permission denied; choose another path") and "Trace" not in said


def test_a_full_disk_is_one_clear_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing, unlike opening, names no file."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("forerun.cli.engine.open_llm", fail)
    said = run("generate", "some text", status=2).stderr
    assert said.startswith("error: output: No space left on device; choose another path, or") and said.count("\n") == 1


@pytest.mark.parametrize("is_full", [True, False])
def test_output_that_cannot_be_written_is_dropped(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the interpreter tries to write it once more when it ends."""
    from forerun.cli import app

    def flush() -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    dropped: list[bool] = []
    monkeypatch.setattr(app, "_drop_stdout", lambda: dropped.append(True))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(flush=flush))
    app._drop_stdout_if_full()
    monkeypatch.undo()
    assert dropped == [True] * is_full


def test_an_error_without_a_path_keeps_its_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("a device went away")

    monkeypatch.setattr("forerun.cli.engine.open_llm", broken)
    with pytest.raises(OSError, match="a device went away"):
        run("generate", "some text", status=1)


def test_a_closed_pipe_leaves_no_trace() -> None:
    command = f"{sys.executable} -m forerun.cli generate 'some text' --max-tokens 64 --temperature 0 | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_the_shell_completes_commands() -> None:
    asked = {"_FORERUN_COMPLETE": "complete_bash", "COMP_WORDS": "forerun pu", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from forerun.cli.app import app; app(prog_name='forerun')"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["pull"]


@pytest.mark.parametrize(("given", "said"), [("generat", "Did you mean 'generate'"), ("pul", "Did you mean 'pull'")])
def test_what_was_meant_is_asked_for_commands(run: Any, given: str, said: str) -> None:
    assert said in run(given, status=2).stderr


@pytest.mark.parametrize("arguments,hint", [
    (("generate", "hi", "--temp", "0"), "--temp (Possible options: --temperature)"),
    (("serve", "mini", "--gpu-memory-utilization", "0.9"), "--gpu-memory-utilization (forerun takes what memory"),
    (("generate", "hi", "--nonsense"), "No such option: --nonsense"),
    (("chat", "mini", "hello"), "(hello); for a single question use `forerun generate MODEL QUESTION`"),
])  # fmt: skip
def test_what_a_command_does_not_know_comes_with_a_hint(run: Any, arguments: tuple[str, ...], hint: str) -> None:
    assert hint in run(*arguments, status=2).stderr
