"""Corpora that lookups draft from: texts as token ids and the order of their suffixes, in a file that is mapped.

Knows: the file, how suffixes are sorted, which tokenizer the ids belong to. Does not know: drafters, whose texts.

A file is MAGIC, the header's length (uint32), the header (JSON), zeros up to ALIGN bytes, then two columns of
little-endian int32: the token ids, END_MARK behind each text, and the places of all suffixes in ascending order.
Sorting doubles the length of the sorted beginnings in each round (Manber and Myers, 1993), up to SORTED tokens: lookups
are for shorter texts.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from forerun.errors import ConfigError, DataError, VocabularyError
from forerun.weights.tokenizer import Tokenizer

MAGIC: Final = b"forerun corpus\n\0"
VERSION: Final = 1
ALIGN: Final = 4096
END_MARK: Final = -1
SORTED: Final = 64
BYTES_PER_TOKEN: Final = 8
_DTYPE: Final = np.dtype("<i4")


class Corpus(NamedTuple):
    """A corpus in a mapped file: two columns [num_tokens] int32."""

    tokens: Any
    order: Any


class CorpusSize(NamedTuple):
    """What was written."""

    num_texts: int
    num_tokens: int  # end marks included
    num_left_out: int  # texts that did not fit, or of which only the beginning did
    num_bytes: int


def write_corpus(
    path: Path, texts: Iterable[Sequence[int]], tokenizer: Tokenizer, model: str, max_bytes: int
) -> CorpusSize:
    """Write the first of `texts` that fit into `max_bytes`. Raises DataError if there is no room, or no text."""
    ids, num_texts, num_left_out = array("i"), 0, 0
    room = min((max_bytes - ALIGN) // BYTES_PER_TOKEN, 2**31 - 1)
    for text in texts:
        left = room - len(ids) - 1
        num_left_out += len(text) > max(left, 0)
        if text and left > 0:
            ids.extend(text[:left])
            ids.append(END_MARK)
            num_texts += 1
    if not ids:
        raise DataError(f"no text for a corpus of at most {max_bytes} bytes: give longer texts, or a larger --max-size")
    tokens = np.frombuffer(ids, dtype=np.intc).astype(_DTYPE)
    about = {"version": VERSION, "num_tokens": len(tokens), "model": model, "vocabulary": fingerprint(tokenizer)}
    header = json.dumps(about).encode()
    start = MAGIC + len(header).to_bytes(4, "little") + header
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # others may write the same corpus
    try:
        try:
            with part.open("wb") as file:
                file.write(start.ljust(ALIGN, b"\0"))
                file.write(tokens.tobytes())
                file.write(suffix_order(tokens).astype(_DTYPE).tobytes())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    return CorpusSize(num_texts, len(tokens), num_left_out, ALIGN + BYTES_PER_TOKEN * len(tokens))


def open_corpus(name: str, tokenizer: Tokenizer) -> Corpus:
    """Map a corpus. Raises ConfigError for a file that is none, VocabularyError for one of another tokenizer."""
    path = Path(name)
    try:
        with path.open("rb") as file:
            about = _header(file.read(ALIGN))
        num, size = int(about["num_tokens"]), path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read the corpus {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no corpus of this version ({error}): write one with `forerun train corpus`"
        ) from error
    if num < 1 or size != ALIGN + BYTES_PER_TOKEN * num:
        raise ConfigError(
            f"the corpus {path} has {size} bytes instead of {ALIGN + BYTES_PER_TOKEN * num}: write it anew"
        )
    if about.get("vocabulary") != fingerprint(tokenizer):
        raise VocabularyError(
            f"the corpus {path} has the tokens of another tokenizer, that of {about.get('model')}: write one for this "
            "model with `forerun train corpus --target`"
        )
    columns = np.memmap(path, _DTYPE, "r", ALIGN, (2, num))
    return Corpus(columns[0], columns[1])


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of which id is which token."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.vocabulary().items())).encode()).hexdigest()


def suffix_order(tokens: Any) -> Any:
    """Where the suffixes of tokens [num] begin, in the order of their first SORTED tokens -> [num] int64.

    Takes about 40 bytes a token meanwhile.
    """
    num, depth = len(tokens), 1
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    while True:
        keys = ranks * (num + 1)
        keys[: num - depth] += ranks[depth:] + 1  # the end comes before every token
        order = np.argsort(keys, kind="stable")
        depth *= 2
        if depth >= SORTED:
            return order
        keys = keys[order]
        ranks[order] = np.concatenate([[0], np.cumsum(keys[1:] != keys[:-1])])
        if ranks[order[-1]] == num - 1 or depth >= num:
            return order


def _header(raw: bytes) -> Any:
    if not raw.startswith(MAGIC):
        raise ValueError("it does not begin as one")
    start = len(MAGIC) + 4
    about = json.loads(raw[start : start + int.from_bytes(raw[len(MAGIC) : start], "little")])
    if about["version"] != VERSION:
        raise ValueError(f"version {about['version']}")
    return about
