"""Corpora for the drafter `suffix`: texts from files, as tokens of a model's tokenizer.

Knows: which files hold texts, and how. Does not know: how a corpus is stored (`weights.corpus`) or searched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, DataError
from forerun.models.overview import look_at
from forerun.training.data import strings_in
from forerun.training.heads.answers import check_vocabulary
from forerun.training.heads.prompts import read_whole
from forerun.weights.corpus import CorpusSize, fingerprint, write_corpus
from forerun.weights.tokenizer import Tokenizer

ANSWERS = ".answers"
RECORDS = (".json", ".jsonl")
LEAST = 4  # tokens of a text that anything can be copied from; roles and names in records are shorter
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Report = Callable[[str], None]


def make_corpus(model: str, files: Sequence[Path], out: Path, max_size: str, report: Report) -> CorpusSize:
    """Write a corpus of some files for a model. Raises DataError, ConfigError, and what loading a tokenizer raises."""
    max_bytes = size_of(max_size)
    for path in files:
        if not path.is_file():
            raise DataError(f"there is no file {path}: give text files, .jsonl, .json or .answers")
    tokenizer = look_at(model).tokenizer

    def texts() -> Iterator[list[int]]:
        for path in files:
            report(f"reading {path}")
            yield from texts_of(path, tokenizer)

    return write_corpus(out, texts(), tokenizer, model, max_bytes)


def texts_of(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The token ids of each text in a file: the whole file, every string of a record, or a prompt with its answer."""
    text, kind = read_whole(path, "text")
    if kind == ANSWERS:
        yield from _answers(text, path, tokenizer)
        return
    for each in strings_in(_records(text, kind, path)) if kind in RECORDS else (text,):
        ids = tokenizer.encode(each, add_special_tokens=False)
        if len(ids) >= LEAST:
            yield ids


def size_of(text: str) -> int:
    """Bytes as they are written: 300000, 64M, 2G. Raises ConfigError."""
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        raise ConfigError(f"--max-size must be a number of bytes, such as 64M or 2G; got {text!r}")
    return int(number) * unit


def _records(text: str, kind: str, path: Path) -> Any:
    try:
        return json.loads(text) if kind == ".json" else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid {kind}: {error}; repair the file") from error


def _answers(text: str, path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    vocab_size = tokenizer.vocab_size
    try:
        about, *lines = [json.loads(line) for line in text.splitlines()]
        texts = [[int(token) for token in (*line["prompt"], *line["answer"])] for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of answers: {error}; write one with `forerun train answers`") from error
    check_vocabulary(path, about, fingerprint(tokenizer))
    strange = [token for ids in texts for token in ids if not 0 <= token < vocab_size]
    if strange:
        raise DataError(f"{path} holds token id {strange[0]}, the tokenizer knows 0 to {vocab_size - 1}")
    yield from texts
