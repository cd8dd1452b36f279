"""Lists of the tokens that drafters may propose, counted in texts.

Knows: which files hold texts and which hold answers, and how lists are written (`models.heads.vocabulary` reads them).
Does not know: drafters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ConfigError, DataError
from forerun.models.heads.vocabulary import LEAST_TOKENS
from forerun.models.loader import load_tokenizer
from forerun.training.heads.answers import answer_file_rows
from forerun.training.heads.prompts import read_file
from forerun.training.heads.rows import token_file_rows
from forerun.training.heads.vocabulary import frequent_tokens
from forerun.weights.corpus import fingerprint


def count_texts(files: Sequence[Path], model: str) -> Tensor:
    """How often each token of the model's tokenizer occurs in texts, in .answers files in the answers alone, [vocab].

    Raises DataError for files that are neither, or hold no token.
    """
    tokenizer = load_tokenizer(model)
    counts = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
    for path in files:
        if path.suffix == ".answers":
            rows = answer_file_rows(path, len(counts), vocabulary=fingerprint(tokenizer))
            counts += rows.counts(len(counts))
        elif path.suffix == ".bin":
            row_len = max(path.stat().st_size // 2, 1) if path.is_file() else 1  # one row: all of it counts
            counts += token_file_rows(path, row_len, len(counts), 0).counts(len(counts))
        else:
            for turns, _ in read_file(path):
                ids = [token for text in turns for token in tokenizer.encode(text, add_special_tokens=False)]
                counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=len(counts))
    if not int(counts.sum()):
        raise DataError(f"no token in {', '.join(map(str, files))}: all texts are empty")
    return counts


def write_list(path: Path, counts: Tensor, size: int) -> float:
    """Write the `size` most frequent tokens by `counts` [vocab] -> their share of all that were counted.

    FILE.json also says how many tokens the tokenizer has; FILE.pt is a list as SGLang reads it. Raises ConfigError.
    """
    if not LEAST_TOKENS <= size <= len(counts):
        raise ConfigError(f"--size must be from {LEAST_TOKENS} to {len(counts)}, the target's tokens; got {size}")
    if path.suffix not in (".json", ".pt"):
        raise ConfigError(f"the list is written to FILE.json or FILE.pt; got {path}")
    token_ids = frequent_tokens(counts, size).token_ids.tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pt":
        torch.save(token_ids, path)
    else:
        path.write_text(json.dumps({"vocab_size": len(counts), "token_ids": token_ids}) + "\n", encoding="utf-8")
    return float(counts[token_ids].sum() / counts.sum())
