"""Preparing training data: reading sources, holding text out, dropping benchmark overlap, storing tokens.

Knows files and splits. A prepared folder holds, per source, `NAME.train.bin` and `NAME.heldout.bin` (uint16 token
ids, documents separated by the end-of-text token) and one `manifest.json`. Knows nothing of models or batches.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from forerun.errors import DataError
from forerun.training.chat import END_OF_TEXT
from forerun.training.sources import SOURCES

Tokens = NDArray[np.uint16]

HELDOUT_EVERY = 50
GRAM_WORDS = 13
WORD = re.compile(r"\w+")
ENCODE_CHUNK = 512


@dataclass(frozen=True)
class SourceCounts:
    """What preparing one source gave: documents kept, held out and dropped, and tokens of both splits."""

    documents: int
    heldout_documents: int
    leaked_documents: int
    train_tokens: int
    heldout_tokens: int


@dataclass
class DataSplit:
    """The documents of one source."""

    train: list[str]
    heldout: list[str]
    num_leaked: int = 0


def read_records(data_dir: Path, name: str) -> Iterator[dict[str, Any]]:
    """Reads the records of source `name`; raises DataError if its file is missing or damaged."""
    path = data_dir / f"{SOURCES[name].file or name}.jsonl.xz"
    if not path.is_file():
        raise DataError(f"training source {name} not found: no file {path}; pass the right folder with --data")
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise DataError(f"training source {path} is damaged: {error}") from error


def grams(text: str) -> Iterator[int]:
    """Hashes every run of `GRAM_WORDS` lower-case words of a text."""
    words = WORD.findall(text.lower())
    for start in range(len(words) - GRAM_WORDS + 1):
        yield hash(tuple(words[start : start + GRAM_WORDS]))


def benchmark_grams(bench_dir: Path | None) -> frozenset[int]:
    """Collects the word 13-grams of all `.json` and `.jsonl` files under a benchmark folder, if there is one."""
    if bench_dir is None:
        return frozenset()
    files = sorted(path for path in bench_dir.rglob("*.json*") if path.is_file())
    if not files:
        raise DataError(
            f"no benchmark files (.json, .jsonl) under {bench_dir}: let the recipe's data.bench_dir "
            "name the right folder, or leave it out if there is none"
        )
    return frozenset(gram for path in files for text in strings_of(path) for gram in grams(text))


def strings_of(path: Path) -> Iterator[str]:
    """Yields every string in a `.json` or `.jsonl` file."""
    text = path.read_text(encoding="utf-8")
    parts = text.split("\n") if path.suffix == ".jsonl" else [text]
    for part in parts:
        if part.strip():
            yield from strings_in(json.loads(part))


def strings_in(value: Any) -> Iterator[str]:
    """Yields every string inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_in(item)


def split_source(data_dir: Path, name: str, leaks: frozenset[int], seed: int) -> DataSplit:
    """Reads one source into shuffled training documents and held-out ones (one record in fifty)."""
    rng = random.Random(f"{seed}/{name}")
    split = DataSplit([], [])
    for index, record in enumerate(read_records(data_dir, name)):
        documents = [text for text in SOURCES[name].read(record, rng) if text.strip()]
        clean = [text for text in documents if leaks.isdisjoint(grams(text))] if leaks else documents
        split.num_leaked += len(documents) - len(clean)
        (split.heldout if index % HELDOUT_EVERY == 0 else split.train).extend(clean)
    rng.shuffle(split.train)
    rng.shuffle(split.heldout)
    return split


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> Tokens:
    """Encodes documents into one run of ids, each closed by the end-of-text token."""
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype=np.uint16)
    parts: list[Tokens] = []
    for start in range(0, len(documents), ENCODE_CHUNK):
        for encoding in tokenizer.encode_batch_fast(list(documents[start : start + ENCODE_CHUNK])):
            parts += [np.array(encoding.ids, dtype=np.uint16), end]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


def tokenizer_sample(splits: Iterable[tuple[DataSplit, float]], max_chars: int) -> Iterator[str]:
    """Yields training documents of each source up to its share of `max_chars`."""
    for split, share in splits:
        left = int(max_chars * share)
        for text in split.train:
            if left <= 0:
                break
            left -= len(text)
            yield text


def store(out_dir: Path, name: str, split: DataSplit, tokenizer: Tokenizer) -> SourceCounts:
    """Writes the token files of one source."""
    train, heldout = encode(tokenizer, split.train), encode(tokenizer, split.heldout)
    train.tofile(token_path(out_dir, name, "train"))
    heldout.tofile(token_path(out_dir, name, "heldout"))
    return SourceCounts(len(split.train), len(split.heldout), split.num_leaked, len(train), len(heldout))


def token_path(folder: Path, name: str, split: str) -> Path:
    """Names the token file of a source; `split` is "train" or "heldout"."""
    return folder / f"{name}.{split}.bin"


def load_tokens(folder: Path, name: str, split: str) -> Tokens:
    """Maps a token file; raises DataError if it is missing."""
    path = token_path(folder, name, split)
    if not path.is_file():
        raise DataError(f"no prepared tokens {path}; delete {folder} and start again")
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=np.uint16)
    return np.memmap(path, dtype=np.uint16, mode="r")


def write_manifest(folder: Path, counts: dict[str, SourceCounts]) -> None:
    """Writes what was prepared; its presence marks the folder as complete."""
    text = json.dumps({name: asdict(count) for name, count in counts.items()}, indent=2)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, SourceCounts] | None:
    """Reads the manifest of a prepared folder, or None if the folder is not complete."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    return {name: SourceCounts(**counts) for name, counts in json.loads(path.read_text(encoding="utf-8")).items()}
