"""Tokenizers for tests: byte-level and sentencepiece, small ones from scratch and real ones from ../shared."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from forerun.weights.sentencepiece import PieceType, PieceVocabulary, build_tokenizer
from forerun.weights.tokenizer import Tokenizer

TEXTS = ["Once upon a time there was a café.", "the theme of the other mother: über 10 000 € 日本語 😀!", "  a  b\n\tc"]


def byte_level() -> Tokenizer:
    """A byte-level BPE trained on TEXTS, with a special and an added token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.add_tokens(["<tool call>", "ĠĠ€"])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": {"content": "</s>"}})


def sentencepiece() -> Tokenizer:
    """A sentencepiece BPE with byte fallback."""
    words = ["▁t", "he", "▁the", "er", "th", "▁a", "▁b", "ca", "▁▁", "ee"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.:!", "é"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    kinds = [PieceType.UNKNOWN, PieceType.CONTROL, PieceType.CONTROL, *[PieceType.BYTE] * 256]
    kinds += [PieceType.NORMAL] * (len(names) - len(kinds))
    scores = tuple(-float(index) for index in range(len(names)))
    vocabulary = PieceVocabulary(pieces=tuple(names), scores=scores, types=tuple(kinds))
    return Tokenizer(build_tokenizer(vocabulary, "<s>"), {"bos_token": "<s>", "eos_token": "</s>"})


def wordpiece() -> Tokenizer:
    """A tokenizer whose text depends on neighbouring tokens."""
    names = ["[UNK]", "[CLS]", "the", "##re", "there", "a", "##b", "'", "s", "."]
    backend = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[CLS]"])
    return Tokenizer(backend, {"bos_token": "[CLS]"})


def save(tokenizer: Tokenizer, folder: Path, **settings: object) -> Path:
    """Write a folder as a checkpoint has it."""
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
