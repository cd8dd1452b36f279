"""Prompts from files: text, JSON, JSON lines, also packed with xz.

Knows the fields in which published data sets keep a user's messages, and which records are empty or too long. Knows
nothing of answers.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import DataError
from forerun.weights.tokenizer import Tokenizer

ASKED = ("question", "instruction")  # fields with a user's message; "turns" and "messages" hold several
CONTINUED = ("prompt", "text")  # fields with a text to continue
USER = ("U", "user", "human")
SUFFIXES = (".txt", ".json", ".jsonl", ".xz")


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts, and how many records were left out or cut."""

    ids: list[list[int]]
    num_empty: int
    num_cut: int

    def summary(self) -> str:
        """One line about them."""
        return f"{len(self.ids)} prompts; {self.num_empty} empty records left out, {self.num_cut} overlong ones cut"


def read_prompts(files: Sequence[Path], tokenizer: Tokenizer, max_tokens: int, has_chat: bool) -> Prompts:
    """All prompts of some files, each at most `max_tokens` long.

    has_chat: a user's message is put into the model's chat template. If it is too long it then loses its beginning,
    since the end marks who speaks next; any other prompt loses its end. Raises DataError for files without prompts.
    """
    ids: list[list[int]] = []
    num_empty = num_cut = 0
    for turns, asked in (item for path in files for item in read_file(path)):
        text = turns[0] if turns else ""
        chat = asked and has_chat
        tokens = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
        if not text.strip() or not tokens:
            num_empty += 1
            continue
        num_cut += len(tokens) > max_tokens
        ids.append(tokens[-max_tokens:] if chat else tokens[:max_tokens])
    if not ids:
        raise DataError(f"no prompt in {', '.join(map(str, files))}: {num_empty} records, all of them empty")
    return Prompts(ids, num_empty, num_cut)


def read_file(path: Path) -> Iterator[tuple[list[str], bool]]:
    """Yields the text of every record, turn after turn, and whether a user asks it."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} has an unknown ending; known are {', '.join(SUFFIXES)}, and .bin for token ids")
    text, kind = read_whole(path, "prompts")
    if kind == ".txt":
        yield from (([part], False) for part in text.split("\n\n"))
        return
    for number, record in enumerate(records_of(text, kind, path)):
        yield words_of(record, f"record {number + 1} of {path}")


def read_whole(path: Path, wanted: str) -> tuple[str, str]:
    """The text of a file, unpacked, and the ending that tells its kind; raises DataError, which names what is wanted.

    A byte order mark is left out, and every line ends in a line feed alone.
    """
    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {wanted} from {path}: {getattr(error, 'strerror', None) or error}") from error
    return text, Path(path.stem).suffix if path.suffix == ".xz" else path.suffix


def records_of(text: str, kind: str, path: Path) -> Iterator[Any]:
    """The records of a JSON array or of JSON lines; blank lines do not count."""
    try:
        if kind == ".json":
            table = json.loads(text)
            yield from table if isinstance(table, list) else [table]
        else:
            yield from (json.loads(line) for line in text.split("\n") if line.strip())
    except ValueError as error:
        raise DataError(f"{path} is not valid {kind}: {error}; repair the file") from error


def words_of(record: Any, where: str) -> tuple[list[str], bool]:
    """The text of a record, and whether a user asks it; for a conversation, all the user's messages in order."""
    if isinstance(record, str):
        return [record], False
    if isinstance(record, dict):
        for name in ("turns", "messages", "conversations"):
            if isinstance(record.get(name), list):
                return [words for words in map(spoken, record[name]) if words is not None], True
        for name in (*ASKED, *CONTINUED):
            if isinstance(record.get(name), str):
                return [record[name]], name in ASKED
    raise DataError(
        f"{where} has no prompt; known are a string, or an object with one of turns, messages, conversations, "
        f"{', '.join((*ASKED, *CONTINUED))}"
    )


def spoken(turn: Any) -> str | None:
    """The user's text of one turn (a string, a pair of speaker and text, or a message); None for other speakers."""
    if isinstance(turn, str):
        return turn
    if isinstance(turn, dict):
        turn = (turn.get("role", turn.get("from")), turn.get("content", turn.get("value")))
    return turn[1] if len(turn) == 2 and turn[0] in USER and isinstance(turn[1], str) else None
