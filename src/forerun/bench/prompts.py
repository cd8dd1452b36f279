"""Prompt files: Spec-Bench (`turns`, `category`), HumanEval (`prompt`) and plain lines of either kind.

Knows: the formats and how to say what is wrong with a line. Does not know: models, tokens, templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import DataError

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
NO_CATEGORY = "other"
_WANTED = 'each line must be a JSON object with "turns" (a list of texts) or "prompt" (a text)'


@dataclass(frozen=True, slots=True)
class PromptCase:
    """One line of a prompt file.

    `turns` of a chat are answered one after the other, each with the model's own earlier answers before it; a text
    that is not a chat is continued as it is.
    """

    turns: tuple[str, ...]
    is_chat: bool
    category: str
    place: str  # file:line, for messages


def read_prompts(path: Path | None, limit: int | None = None) -> list[PromptCase]:
    """The cases of a file (None: the prompts shipped with forerun), `limit` of them spread evenly over it.

    Raises DataError naming file and line.
    """
    cases = list(_cases(path or OWN_PROMPTS))
    if not cases:
        raise DataError(f"{path} holds no prompt: {_WANTED}")
    return cases if limit is None else spread(cases, limit)


def spread(cases: Sequence[PromptCase], limit: int) -> list[PromptCase]:
    """At most `limit` cases at even distances, so that a file sorted by category is covered."""
    if limit < 1:
        raise DataError(f"the limit must be 1 or more, got {limit}")
    if limit >= len(cases):
        return list(cases)
    return [cases[i * len(cases) // limit] for i in range(limit)]


def _cases(path: Path) -> Iterator[PromptCase]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _case(line, f"{path}:{number}")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8-sig").split("\n")  # not at U+2028 and the like, which JSON may hold
    except OSError as error:
        raise DataError(f"cannot read the prompt file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): give a .jsonl file; {_WANTED}") from error


def _case(line: str, place: str) -> PromptCase:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno}); {_WANTED}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: a {type(record).__name__}, not an object; {_WANTED}")
    category = record.get("category") or NO_CATEGORY
    return PromptCase(_turns(record, place), "turns" in record, str(category), place)


def _turns(record: dict[str, Any], place: str) -> tuple[str, ...]:
    if "turns" not in record and "prompt" not in record:
        raise DataError(f"{place}: neither turns nor prompt, but {', '.join(record) or 'nothing'}; {_WANTED}")
    turns = record["turns"] if "turns" in record else [record["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(text, str) and text.strip() for text in turns):
        field = "turns" if "turns" in record else "prompt"
        raise DataError(f"{place}: {field} is empty or not text; {_WANTED}")
    return tuple(turns)
