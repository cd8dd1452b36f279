"""Every command and every piece of Python in README.md and docs/*.md runs as it is written, with sizes cut.

Placeholders (`MODEL`, `./model`, `prompts.jsonl`, ...) are files of a temporary folder, the model of all of them the
embedded draft model. Lines that cannot run are in NOT_RUN with the reason; their options must exist all the same, and
so must those of commands that are named within sentences.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from forerun import LLM
from forerun.bench.shapes import SHAPES
from forerun.cli import serve
from forerun.cli.app import app
from forerun.models.gguf_export import export_gguf
from forerun.server import reasoning, tools
from forerun.server.app import create_app
from forerun.weights.resolve import resolve_model
from tests.server.conftest import running, settings
from tests.support import other_tokens
from tests.support.fake_hub import FakeHub, pretended
from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs" / "log.md"})]
SPOKEN = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]

NOT_RUN = {
    "forerun train lm recipes/mini-target.toml": "trains for hours on text that does not come with forerun",
    "forerun batch in.jsonl part2.jsonl --model MODEL --shard 2/3    # on the second of three machines": (
        "tests/server/test_batches.py runs parts of a batch"
    ),
    "forerun batch in.jsonl out.jsonl --model MODEL --ray HOST:6379  # on any machine of a Ray cluster": (
        "there is no cluster; tests/server/test_batch_cluster.py has one"
    ),
    "forerun deploy deploy.yaml": "starts a Ray cluster, as tests/replicas/test_on_ray.py does",
}
# What is added to a command so that it takes seconds; where an option comes twice the last one counts.
LITTLE = ("--limit", "1", "--max-tokens", "3", "--repeats", "1")
CUTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("demo",): ("--max-tokens", "4", "--repeats", "1"),
    ("generate",): ("--max-tokens", "4"),
    ("chat",): ("--max-tokens", "4"),
    ("run",): ("--max-tokens", "4"),
    ("verify",): ("--limit", "1", "--max-tokens", "4"),
    ("bench", "speed"): LITTLE,
    ("bench", "drafters"): (*LITTLE, "--temperature", "1"),
    ("bench", "curve"): ("--tokens", "1,2", "--context", "4", "--repeats", "1"),
    ("bench", "serve"): ("--num-requests", "2", "--max-tokens", "3", "--warmup", "0"),
    ("train", "answers"): ("--answer-tokens", "4"),
    ("lab", "assisted"): ("--limit", "1", "--max-tokens", "4"),
    ("train", "eagle3"): ("--recipe", "short.toml", "--steps", "2", "--tokens-per-step", "512"),
}
SHORT_RECIPE = """
name = "short"
kind = "eagle3"
[head]
num_steps = 2
[data]
heldout_prompts = 2
heldout_tokens = 4
[run]
precision = "float32"
"""
TALKS = ("chat", "run")  # with a model alone, with whoever types
PLACEHOLDERS = {"NAME": "ngram"}
MODELS = ("MODEL", "SMALL", "Llama-3.2-1B-Instruct", "Qwen2.5-0.5B-Instruct", "big-model", "small-model", "model")
FOREIGN = "runs/mini-foreign/export"  # a draft model with another tokenizer
HUB = ("Qwen/Qwen2.5-0.5B-Instruct",)
HUB_GGUF = {"bartowski/Llama-3.2-1B-Instruct-GGUF": "Q4_K_M", "org/name": "Q8_0"}
PROMPT_FILES = ("prompts.jsonl", "PROMPTS.jsonl", "FILE.jsonl", "mine.jsonl", "question.jsonl", "text.jsonl")
SENTENCE = "The little fox ran over the hill to look for the big river and the old boat. "
SMALL_SHAPE = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """Its lines that run forerun or a script of lab/, each on one line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if re.match(r"((echo [^|]*\| *)?forerun [a-z-]+( |$))|python lab/", line)]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield Block(page.name, text[: found.start()].count("\n") + 1, found[1], found[2])


BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.commands()]
PYTHON = [block for block in BLOCKS if block.language == "python" and "import" in block.text]


def named(block: Block) -> str:
    return f"{block.page}-{block.line}"


def words_of(line: str) -> list[str]:
    return shlex.split(line.rpartition("| ")[2] if line.startswith("echo") else line, comments=True)[1:]


@cache
def forerun() -> Any:
    return typer.main.get_command(app)


def command_of(words: list[str]) -> tuple[tuple[str, ...], Any, list[str]]:
    """The command that words name, and the words behind its name."""
    command = forerun()
    path: tuple[str, ...] = ()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"forerun {' '.join(path)} has no command {words[0]}"
        command, path, words = command.commands[words[0]], (*path, words[0]), words[1:]
    return path, command, words


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return export_gguf(resolve_model("mini-draft"), path, "Q8_0").read_bytes()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of mini in this process; tests/server/test_serve_command.py has one of its own."""
    with running(create_app(LLM("mini", drafter="ngram"), settings())) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run: stand-ins for all that the pages name."""
    logging.getLogger("forerun").handlers.clear()  # of commands that have ended: their streams are closed
    folder = tmp_path / "checkout"
    folder.mkdir()
    model = resolve_model("mini-draft")
    for name in MODELS:
        (folder / name).symlink_to(model, target_is_directory=True)
    questions = folder.parent / "shared" / "data" / "bench" / "spec_bench" / "question.jsonl"
    questions.parent.mkdir(parents=True)
    lines = [{"category": "writing", "turns": [f"{number}: {SENTENCE}", "Go on."]} for number in range(70)]
    for path in (questions, *(folder / name for name in PROMPT_FILES)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (folder / "prompt.txt").write_text(SENTENCE, "utf-8")
    (folder / "text.txt").write_text(SENTENCE * 60, "utf-8")
    (folder / "docs").symlink_to(ROOT / "docs", target_is_directory=True)
    bigram = (ROOT / "docs" / "examples" / "bigram.py").read_text("utf-8")
    (folder / "mine.py").write_text(bigram.replace("Bigram", "Mine"), "utf-8")
    (folder / "short.toml").write_text(SHORT_RECIPE, "utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", {**SHAPES["llama-3.2-1b"], **SMALL_SHAPE})
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})  # slow
    monkeypatch.setattr(serve, "_run", lambda *_: None)  # all but listening; tests/server has real processes
    monkeypatch.setattr("forerun.server.logs.configure", lambda *_: None)  # its handler would outlive the command
    return folder


@pytest.mark.parametrize("block", SHELL, ids=named)
def test_commands(
    block: Block, run: Any, folder: Path, gguf: bytes, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if FOREIGN in block.text:
        (folder / FOREIGN).parent.mkdir(parents=True)
        other_tokens.with_unused_row(other_tokens.write_renumbered(resolve_model("mini-draft"), folder / FOREIGN))
    files = {path.name: path.read_bytes() for path in resolve_model("mini-draft").iterdir() if path.is_file()}
    quants = {name: {f"model-{quant}.gguf": gguf} for name, quant in HUB_GGUF.items()}
    with pretended(FakeHub({**dict.fromkeys(HUB, files), **quants}), tmp_path / "hub"):
        for line in block.commands():
            if script := re.match(r"python lab/(\w+)\.py ", line):
                cuts = CUTS.get(("lab", script[1]), ())
                run_script(script[1], *shlex.split(line, comments=True)[2:], *cuts)
                continue
            path, command, words = command_of([PLACEHOLDERS.get(word, word) for word in words_of(line)])
            if line in NOT_RUN:
                check_options(path, command, words)
                continue
            if path == ("bench", "serve"):
                words = [request.getfixturevalue("server"), *(word for word in words if "://" not in word)]
            if path == ("bench", "drafters") and "--drafters" not in words:
                words += ["--drafters", "ngram,suffix"]  # not all there are
            result = run(*path, *words, *CUTS.get(path, ()), stdin=typed(line, path, words))
            assert "Traceback" not in result.output


def typed(line: str, path: tuple[str, ...], words: list[str]) -> str:
    """What waits on standard input."""
    piped = re.match(r'echo "(.*)" \|', line)
    return piped[1] if piped else "Hello\n" if path[0] in TALKS and len(words) == 1 else ""


@pytest.mark.parametrize("block", PYTHON, ids=named)
def test_python(block: Block, folder: Path, request: pytest.FixtureRequest) -> None:
    source = block.text
    if "http://127.0.0.1:8000" in source:
        source = source.replace("http://127.0.0.1:8000", request.getfixturevalue("server"))
    exec(compile(source, named(block), "exec"), {"__name__": "documented"})


def check_options(path: tuple[str, ...], command: Any, words: list[str]) -> None:
    """Raise click's error for an option that the command does not have."""
    command.make_parser(command.context_class(command, info_name=" ".join(path))).parse_args(list(words))


@pytest.mark.parametrize("page", SPOKEN, ids=lambda page: page.name)
def test_commands_within_sentences_have_the_options_they_name(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(r"`(forerun [^`]+)`", re.sub(r"\s+", " ", text)):
        for words in alternatives(shlex.split(found)[1:]):
            path, command, rest = command_of(words)
            if rest:
                check_options(path, command, rest)


def alternatives(words: list[str]) -> list[list[str]]:
    """`train medusa|mtp` are two commands."""
    several = next((index for index, word in enumerate(words) if "|" in word), None)
    if several is None:
        return [words]
    return [[*words[:several], word, *words[several + 1 :]] for word in words[several].split("|")]


@pytest.mark.parametrize("page", SPOKEN, ids=lambda page: page.name)
def test_tests_that_pages_name_exist(page: Path) -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text("utf-8")):
        source = (ROOT / path).read_text("utf-8")
        assert re.search(rf"^ *(async )?def {name}\(", source, re.MULTILINE), f"{path} has no {name}"


@pytest.mark.parametrize(("option", "styles"), [("tool_parser", tools.STYLES), ("reasoning_parser", reasoning.STYLES)])
def test_help_names_every_parser(option: str, styles: dict[str, Any]) -> None:
    """Which it cannot take from these tables: `--help` imports nothing of the server."""
    [text] = [each.help for each in forerun().commands["serve"].params if each.name == option]
    assert not [style for style in styles if not re.search(rf"\b{style}\b", text)]


def test_messages_of_troubleshooting_are_real() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src" / "forerun").rglob("*.py"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"^\| (?:\d{3} \| )?`([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 30
    assert not [part for message in messages for part in message.split(" ... ") if part not in source]


def test_what_is_not_run_is_still_there() -> None:
    lines = [line for block in SHELL for line in block.commands()]
    assert set(NOT_RUN) <= set(lines) and len(lines) > 30
