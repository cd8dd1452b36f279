"""`forerun train corpus`: which texts of which files, refusals, and that drafting from the file changes no token."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from tests.support import mini
from tests.weights import makers
from typer.testing import CliRunner

from forerun import SamplingParams
from forerun.cli.app import app
from forerun.errors import ConfigError, DataError, VocabularyError
from forerun.quantize.text import read_texts
from forerun.training.corpus import make_corpus, size_of, texts_of
from forerun.training.data import strings_of
from forerun.training.heads.prompts import records_of
from forerun.weights.corpus import open_corpus

LINES = [{"role": "user", "turns": ["The little fox ran over the hill.", "Then it slept."]}, "A line of its own here."]


def ids(text: str) -> list[int]:
    return mini.plain().tokenizer.encode(text, add_special_tokens=False)


def test_texts_of_files(tmp_path: Path) -> None:
    tokenizer, strings = mini.plain().tokenizer, [*LINES[0]["turns"], LINES[1]]  # type: ignore[index]
    jsonl = "\n".join(map(json.dumps, LINES)) + "\n\n"
    answers = '{"about": 1}\n{"prompt": [1, 2], "answer": [3]}\n'
    for name, content, expected in (
        ("a.txt", "One text\n\nof a file", [ids("One text\n\nof a file")]),
        ("b.txt", b"\xef\xbb\xbfOne text\r\n\r\nof a file", [ids("One text\n\nof a file")]),
        ("a.py", "def add(a, b):\n    return a", [ids("def add(a, b):\n    return a")]),
        ("a.jsonl", jsonl, list(map(ids, strings))),
        ("a.json", json.dumps(LINES), list(map(ids, strings))),
        ("a.jsonl.xz", lzma.compress(jsonl.encode()), list(map(ids, strings))),
        ("a.answers", answers, [[1, 2, 3]]),
    ):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert list(texts_of(path, tokenizer)) == expected, name


def test_strings_may_hold_the_line_ends_of_unicode(tmp_path: Path) -> None:
    """JSON needs no escapes for them: only line feeds end a line, wherever JSON lines are read."""
    path, said = tmp_path / "a.jsonl", "One line\u2028and one\u2029and another\u0085here"
    path.write_text(json.dumps({"text": said}, ensure_ascii=False) + "\r\n\n" + '{"text": "x"}', "utf-8")
    assert list(texts_of(path, mini.plain().tokenizer)) == [ids(said)]
    assert read_texts(path) == list(strings_of(path)) == [said, "x"]
    assert list(records_of(path.read_text("utf-8"), ".jsonl", path)) == [{"text": said}, {"text": "x"}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\xff\xfe", "cannot read text"),
        ("a.jsonl", b"{", "is not valid .jsonl"),
        ("a.answers", b"{}\n{}", "no file of answers"),
        ("a.answers", b'{}\n{"prompt": [999999], "answer": []}', "token id 999999"),
        (
            "a.answers",
            b'{"target": "x", "vocabulary": "1"}\n{"prompt": [1], "answer": [2]}',
            "answers of x, in tokens",
        ),
        ("a.xz", b"no", "cannot read text"),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        make_corpus("mini", [tmp_path / name], tmp_path / "c", "1M", lambda _: None)
    with pytest.raises(DataError, match="there is no file"):
        make_corpus("mini", [tmp_path / "none.txt"], tmp_path / "c", "1M", lambda _: None)


def test_sizes_as_they_are_written() -> None:
    assert [size_of(text) for text in ("300", "2k", "64M", "1G")] == [300, 2048, 64 << 20, 1 << 30]
    for wrong in ("", "M", "1.5G", "-3", "10 MB", "0"):
        with pytest.raises(ConfigError, match="--max-size must be"):
            size_of(wrong)


def test_drafting_from_a_corpus_is_quicker_and_changes_nothing(tmp_path: Path) -> None:
    params = [SamplingParams(max_tokens=48, temperature=t, seed=4, ignore_eos=True) for t in (0.0, 1.0)]
    truth = mini.plain().generate(mini.PROMPTS[:2], params)
    said, corpus = tmp_path / "said.txt", tmp_path / "said.corpus"
    said.write_text("".join(f"{o.prompt}{o.outputs[0].text}\n" for o in truth))
    done = CliRunner().invoke(app, ["train", "corpus", str(said), "-o", str(corpus), "--target", "mini"])
    assert done.exit_code == 0 and "finished" in done.output, done.output
    for drafter in (f"suffix={corpus}", f"portfolio=suffix={corpus}+ngram"):
        steps = []
        for name in (drafter, drafter.replace(f"={corpus}", "")):
            llm = mini.drafting(name, across_requests=False, adaptive=False)
            outs = [output.outputs[0] for output in llm.generate(mini.PROMPTS[:2], params)]
            assert [out.token_ids for out in outs] == [o.outputs[0].token_ids for o in truth]
            steps.append(sum(out.stats.num_steps for out in outs))
        assert steps[0] < 0.7 * steps[1], (drafter, steps)


def test_corpora_are_refused_where_they_cannot_be_used(tmp_path: Path) -> None:
    text, corpus = tmp_path / "a.txt", str(tmp_path / "c")
    text.write_text("Some words of a text, " * 9)
    make_corpus("mini", [text], Path(corpus), "1M", lambda _: None)
    with pytest.raises(VocabularyError, match="another tokenizer, that of mini"):
        open_corpus(corpus, makers.byte_level())
    with pytest.raises(ConfigError, match="cannot read the corpus"):
        mini.drafting(f"suffix={corpus}-none")
    with pytest.raises(ConfigError, match="a corpus was given but the drafter is 'ngram': choose one of suffix"):
        mini.drafting("ngram", corpus=corpus)
    with pytest.raises(ConfigError, match="a corpus was given, but none of ngram, recycling takes it"):
        mini.drafting("portfolio=ngram+recycling", corpus=corpus)
    members = mini.drafting("portfolio=suffix+ngram", corpus=corpus).config.drafter.members
    assert [member.corpus for member in members] == [corpus, None]
