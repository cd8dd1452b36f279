"""Calibration text: files of prompts or texts, cut into sequences of tokens, a part held out.

Knows: `.jsonl` lines ({"text"}, {"prompt"} or {"turns"}) and plain text files. Does not know: models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import DataError
from forerun.weights.tokenizer import Tokenizer

HELD_OUT_SHARE = 8  # one sequence in so many measures perplexity instead of calibrating
WANTED = 'each line must be a JSON object with "text", "prompt" or "turns"'


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Sequences of token ids: to calibrate with, and held out for measuring perplexity."""

    sequences: list[list[int]]
    held_out: list[list[int]]


def read_texts(path: Path) -> list[str]:
    """The texts of a `.jsonl` or plain text file. Raises DataError naming file and line."""
    try:
        content = path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read the text file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): give a .txt or .jsonl file") from error
    texts = list(_records(content, path)) if path.suffix == ".jsonl" else [content]
    if not any(text.strip() for text in texts):
        raise DataError(f"{path} holds no text: give a .txt file, or a .jsonl file where {WANTED}")
    return texts


def cut(texts: Sequence[str], tokenizer: Tokenizer, length: int, limit: int | None = None) -> list[list[int]]:
    """The texts' tokens one after the other in sequences of `length` (the last one may be shorter), at most `limit`."""
    ids: list[int] = []
    for text in texts:
        if limit is not None and len(ids) >= limit * length:
            break
        ids += tokenizer.encode(text)
    sequences = [ids[start : start + length] for start in range(0, len(ids), length)][:limit]
    return [sequence for sequence in sequences if len(sequence) > 1]


def with_held_out(limit: int) -> int:
    """How many sequences there must be for `limit` to be left after holding some out."""
    return limit + max(1, -(-limit // (HELD_OUT_SHARE - 1)))


def split(sequences: Sequence[Sequence[int]], limit: int) -> CalibrationText:
    """At most `limit` sequences to calibrate with; every eighth is held out. Raises DataError if there are too few."""
    if len(sequences) < 2:
        raise DataError(
            f"the calibration text is shorter than two sequences: {sum(map(len, sequences))} tokens; give more text "
            "(--calibration), or a smaller sequence length (--length)"
        )
    every = min(HELD_OUT_SHARE, len(sequences))
    held_out = [list(ids) for ids in sequences[every - 1 :: every]]
    rest = [list(ids) for index, ids in enumerate(sequences) if index % every != every - 1]
    return CalibrationText(rest[:limit], held_out)


def _records(content: str, path: Path) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _text(line, f"{path}:{number}")


def _text(line: str, place: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno}); {WANTED}") from error
    found = record if isinstance(record, dict) else {}
    parts = found.get("turns") or [found.get("text", found.get("prompt"))]
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise DataError(f"{place}: none of text, prompt and turns holds text; {WANTED}")
    return "\n\n".join(parts)
