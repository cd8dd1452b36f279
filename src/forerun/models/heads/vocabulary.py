"""Draft vocabularies: a drafter that knows only some of the target's tokens, as a rule the most frequent ones.

Knows: which token of the target each row of the output layer is; the files that list such tokens. Does not know: heads
and draft models.

Two sources. A head that was trained so: `d2t` of its checkpoint holds *offsets*: the target's token is the draft's
index plus d2t at that index. `t2d` (whether the draft knows a token of the target) adds nothing and is not read. Or a
list of tokens that leaves a drafter some rows of its output layer (FR-Spec, arXiv 2502.14856).
Sources: SafeAILab/EAGLE eagle/model/cnets.py; SGLang's --speculative-token-map.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import CheckpointError, ConfigError, VocabularyError
from forerun.weights.torch_file import load_torch

LEAST_TOKENS = 16  # most children of a node in a draft tree
WAYS = "make one with `forerun train vocabulary`"


class IntegerSource(Protocol):
    """What is needed of a checkpoint."""

    def integers(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor of whole numbers; raises CheckpointError if it is missing or not of `shape`."""


class DraftVocabulary:
    """Tokens of the target by their index in the draft's vocabulary."""

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        """`token_ids` [draft vocabulary] int64, all different and below vocab_size."""
        self.token_ids = token_ids
        self.vocab_size = vocab_size

    def on(self, device: torch.device) -> DraftVocabulary:
        """The same for logits on `device`."""
        return DraftVocabulary(self.token_ids.to(device), self.vocab_size)

    def widen(self, logits: Tensor, missing: float = -torch.inf) -> Tensor:
        """logits [R, draft vocabulary] -> [R, V], `missing` for tokens the draft does not know."""
        wide = logits.new_full((logits.shape[0], self.vocab_size), missing)
        return wide.index_copy_(1, self.token_ids, logits)


def read_vocabulary(source: IntegerSource, size: int, vocab_size: int) -> DraftVocabulary:
    """The vocabulary of `size` tokens a checkpoint's d2t describes; raises CheckpointError."""
    offsets = source.integers("d2t", (size,)).long()  # [draft vocabulary]
    token_ids = offsets + torch.arange(size)
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if bool(outside.any()):
        index = int(outside.nonzero()[0, 0])
        raise CheckpointError(
            f"d2t maps draft token {index} to token {int(token_ids[index])}, but the target has {vocab_size} tokens; "
            "the head was trained for another target, or d2t does not hold offsets"
        )
    if len(set(token_ids.tolist())) < size:
        raise CheckpointError(
            "d2t maps several draft tokens to one token of the target; copy the checkpoint again (d2t holds offsets: "
            "token = index + d2t[index])"
        )
    return DraftVocabulary(token_ids, vocab_size)


# -- lists in files ------------------------------------------------------------------------------------------------


class TokenList(NamedTuple):
    """Tokens that a file lists; `vocab_size` is that of the tokenizer they are of, None where the file does not say."""

    path: Path
    token_ids: Tensor  # [draft vocabulary] int64, all different
    vocab_size: int | None

    def vocabulary(self, num_rows: int) -> DraftVocabulary:
        """The vocabulary for a model whose output layer has `num_rows`; raises VocabularyError."""
        largest = int(self.token_ids.max())
        if largest >= num_rows:
            raise VocabularyError(
                f"{self.path} lists token {largest}, but the model has {num_rows} tokens: the list was made for "
                f"another tokenizer; {WAYS}"
            )
        return DraftVocabulary(self.token_ids, num_rows)

    def check(self, num_rows: int | None, num_tokens: int) -> None:
        """Raise VocabularyError for a model of so many rows (None: not known) and so many tokens in its tokenizer."""
        if self.vocab_size is not None and self.vocab_size not in (num_rows, num_tokens):
            raise VocabularyError(
                f"{self.path} lists tokens of a tokenizer with {self.vocab_size} of them, and the target's has "
                f"{num_tokens}: {WAYS} for this target"
            )
        self.vocabulary(num_tokens if num_rows is None else max(num_rows, num_tokens))


def read_token_list(path: Path) -> TokenList:
    """The tokens a file lists: .json, .txt, .pt as SGLang reads it, or .safetensors with EAGLE-3's `d2t`.

    Raises ConfigError and CheckpointError for a file that is none, or lists too few tokens or one of them twice.
    """
    read = _READERS.get(path.suffix)
    if read is None:
        raise ConfigError(f"the draft vocabulary {path} has an unknown ending; known are {', '.join(_READERS)}; {WAYS}")
    try:
        listed, vocab_size = read(path)
    except OSError as error:
        raise ConfigError(f"cannot read the draft vocabulary {path}: {error.strerror or error}; {WAYS}") from error
    except (ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot read the draft vocabulary {path}: {str(error)[:200]}; {WAYS}") from error
    return TokenList(path, _checked(path, listed), vocab_size)


def _checked(path: Path, listed: Any) -> Tensor:
    """The ids as a tensor; raises ConfigError."""
    ids = listed.tolist() if isinstance(listed, Tensor) else listed
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(type(one) is int for one in ids):
        raise ConfigError(f"the draft vocabulary {path} must be a list of token ids, whole numbers; {WAYS}")
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(f"the draft vocabulary {path} lists {len(ids)} tokens; at least {LEAST_TOKENS} are needed")
    strange = next((one for one in ids if not 0 <= one < 2**31), None)
    if strange is not None:
        raise ConfigError(f"the draft vocabulary {path} lists {strange}, which is no token id; {WAYS}")
    token_id, num = Counter(ids).most_common(1)[0]
    if num > 1:
        raise ConfigError(f"the draft vocabulary {path} lists token {token_id} {num} times; list each token once")
    return torch.tensor(ids, dtype=torch.int64)


Listed = tuple[Any, int | None]  # ids, which are to be checked, and the size of their tokenizer


def _of_json(path: Path) -> Listed:
    found = json.loads(path.read_text("utf-8"))
    if not isinstance(found, Mapping):
        return found, None
    named, size = cast("Mapping[str, Any]", found), found.get("vocab_size")
    return named.get("token_ids"), size if isinstance(size, int) else None


def _of_text(path: Path) -> Listed:
    return [int(word) for word in path.read_text("utf-8").split()], None


def _of_torch(path: Path) -> Listed:
    return load_torch(path), None


def _of_safetensors(path: Path) -> Listed:
    tensors = load_file(path)
    if "d2t" not in tensors:
        raise ConfigError(f"the draft vocabulary {path} has no tensor d2t; {WAYS}")
    offsets, known = tensors["d2t"], tensors.get("t2d")
    return (offsets.long() + torch.arange(len(offsets))), None if known is None else len(known)


_READERS: dict[str, Callable[[Path], Listed]] = {
    ".json": _of_json, ".txt": _of_text, ".pt": _of_torch, ".pth": _of_torch, ".bin": _of_torch,
    ".safetensors": _of_safetensors,
}  # fmt: skip
