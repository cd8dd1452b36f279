"""The tokenizer of the `mini` family: byte-level BPE, trained here and saved in Hugging Face layout.

Knows the split pattern, the special tokens and the files of a tokenizer folder. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from forerun.training.chat import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# GPT-4's split: contractions, words with their leading space, digits in groups of one to three, runs of marks.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of at most `vocab_size` tokens; special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def token_lens_bytes(tokenizer: Tokenizer) -> list[int]:
    """Counts the bytes of text behind each token id; special tokens stand for none."""
    lens = [0] * tokenizer.get_vocab_size()
    for token, token_id in tokenizer.get_vocab().items():
        lens[token_id] = 0 if token in SPECIAL_TOKENS else len(token)  # in byte-level BPE one character is one byte
    return lens
