"""llama2.c's vocabularies: tok*.bin files, which hold the pieces and scores of a sentencepiece model.

Knows: the file layout. Does not know: models. Source: llama2.c tokenizer.py (export) and run.c (encode, decode).
"""

from __future__ import annotations

import struct
from pathlib import Path

from forerun.errors import CheckpointError
from forerun.weights.sentencepiece import PieceType, Vocabulary, read_sentencepiece

BOS_ID, EOS_ID = 1, 2
SPECIAL_NAMES = ("<unk>", "<s>", "</s>")
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def read_vocabulary(path: Path, vocab_size: int) -> Vocabulary:
    """Read `vocab_size` tokens of a tok*.bin or a sentencepiece .model; raises CheckpointError."""
    vocabulary = read_sentencepiece(path) if path.suffix == ".model" else _from_bin(path, vocab_size)
    if len(vocabulary.pieces) != vocab_size or vocabulary.pieces[:3] != SPECIAL_NAMES:
        raise CheckpointError(
            f"{path} has {len(vocabulary.pieces)} tokens beginning with {', '.join(vocabulary.pieces[:3])}; the model "
            f"has {vocab_size}, beginning with {', '.join(SPECIAL_NAMES)}; give the model's own tokenizer"
        )
    return vocabulary


def _from_bin(path: Path, vocab_size: int) -> Vocabulary:
    """Spaces are spaces here, and the names of BOS and EOS are surrounded by newlines."""
    entries = _read_entries(path, vocab_size)
    pieces = (*SPECIAL_NAMES, *(text for _, text in entries[3:]))
    has_bytes = pieces[3:259] == BYTE_NAMES
    kinds = [PieceType.UNKNOWN, PieceType.CONTROL, PieceType.CONTROL, *([PieceType.BYTE] * 256 if has_bytes else [])]
    kinds += [PieceType.NORMAL] * (vocab_size - len(kinds))
    scores = tuple(score for score, _ in entries)
    return Vocabulary(pieces=pieces[:vocab_size], scores=scores, types=tuple(kinds[:vocab_size]), space=" ")


def _read_entries(path: Path, vocab_size: int) -> list[tuple[float, str]]:
    """int32 longest length, then for each token float32 score, int32 length, bytes."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    entries: list[tuple[float, str]] = []
    position = 4
    for token_id in range(vocab_size):
        if position + 8 > len(raw):
            raise CheckpointError(f"{path} ends after {token_id} of {vocab_size} tokens; give the model's tokenizer")
        score, length = struct.unpack_from("<fi", raw, position)
        end = position + 8 + length
        if length < 0 or end > len(raw):
            raise CheckpointError(f"{path} is damaged: token {token_id} claims {length} bytes; copy the file again")
        entries.append((score, raw[position + 8 : end].decode("utf-8", "replace")))
        position = end
    return entries
