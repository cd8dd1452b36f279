"""Sequences to learn from: prompts with the target's answers, or rows of a token file.

Knows token ids, where each answer begins, which sequences are held out, and the order of the others. Knows
nothing of text or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import DataError

TOKEN_TYPE = np.uint16  # of token files
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Sequences stored one after the other: number i is `tokens[starts[i] :][: lens[i]]`, its answer from prompts[i].

    answered: bool, one per token: whether it is part of an answer.
    """

    tokens: NDArray[np.generic]
    answered: NDArray[np.bool_]
    starts: Numbers
    lens: Numbers
    prompts: Numbers

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> Rows:
        """Lays sequences out."""
        lens = np.array([len(ids) for ids in sequences], dtype=np.int64)
        prompts = np.array(prompt_lens, dtype=np.int64)
        flat = np.array([token for ids in sequences for token in ids], dtype=np.int64)
        starts = np.cumsum(lens) - lens
        places = np.arange(len(flat)) - np.repeat(starts, lens)  # of each token in its sequence
        return cls(flat, places >= np.repeat(prompts, lens), starts, lens, prompts)

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """The sequences of several `Rows`, in order."""
        shifts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        return cls(
            np.concatenate([part.tokens.astype(np.int64) for part in parts]),
            np.concatenate([part.answered for part in parts]),
            np.concatenate([part.starts + shift for part, shift in zip(parts, shifts, strict=False)]),
            np.concatenate([part.lens for part in parts]),
            np.concatenate([part.prompts for part in parts]),
        )

    def packed(self, row_len: int) -> Rows:
        """Neighbouring sequences joined into rows of at most `row_len` tokens, so that a batch holds less padding.

        A row's later sequences see its earlier ones, as in the windows a language model is trained on.
        """
        firsts: list[int] = []
        lens: list[int] = []
        for number, (start, length) in enumerate(zip(self.starts.tolist(), self.lens.tolist(), strict=True)):
            follows = firsts and self.starts[firsts[-1]] + lens[-1] == start
            if follows and lens[-1] + length <= row_len:
                lens[-1] += length
            else:
                firsts.append(number)
                lens.append(length)
        first = np.array(firsts, dtype=np.int64)
        return Rows(self.tokens, self.answered, self.starts[first], np.array(lens, dtype=np.int64), self.prompts[first])

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lens.sum())

    @property
    def num_answered(self) -> int:
        """Tokens of all sequences that are learned from."""
        return sum(
            int(self.answered[start:][:length].sum()) for start, length in zip(self.starts, self.lens, strict=True)
        )

    def take(self, numbers: Numbers) -> Rows:
        """Some of the sequences; the tokens are not copied."""
        return Rows(self.tokens, self.answered, self.starts[numbers], self.lens[numbers], self.prompts[numbers])

    def sequence(self, number: int) -> Numbers:
        """The token ids of one sequence."""
        start = int(self.starts[number])
        return self.tokens[start : start + int(self.lens[number])].astype(np.int64)

    def batch(self, numbers: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
        """Sequences padded with zeros to `seq_len` -> ids [batch, T] and which of them are answer, bool [batch, T]."""
        ids = np.zeros((len(numbers), seq_len), dtype=np.int64)
        answer = np.zeros((len(numbers), seq_len), dtype=bool)
        for place, number in enumerate(numbers):
            sequence = self.sequence(number)[:seq_len]
            ids[place, : len(sequence)] = sequence
            answer[place, : len(sequence)] = self.answered[self.starts[number] :][: len(sequence)]
        return torch.from_numpy(ids), torch.from_numpy(answer)

    def counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs in an answer, [vocab]."""
        found = np.zeros(vocab_size, dtype=np.int64)
        for number in range(len(self)):
            sequence, start = self.sequence(number), int(self.starts[number])
            found += np.bincount(sequence[self.answered[start : start + len(sequence)]], minlength=vocab_size)
        return torch.from_numpy(found)


def token_file_rows(path: Path, row_len: int, vocab_size: int, max_tokens: int) -> Rows:
    """The rows of a file of uint16 token ids; all of a row is learned from. max_tokens 0 takes the whole file.

    Raises DataError for a file without a row or with ids outside the vocabulary.
    """
    if not path.is_file():
        raise DataError(f"no token file {path}; give an existing file of uint16 token ids")
    num_rows = path.stat().st_size // TOKEN_TYPE().itemsize // row_len
    if max_tokens:
        num_rows = min(num_rows, max_tokens // row_len)
    if num_rows == 0:
        raise DataError(f"{path} holds no row of {row_len} tokens; lower schedule.seq_len or raise --data-tokens")
    tokens = np.memmap(path, dtype=TOKEN_TYPE, mode="r")[: num_rows * row_len]
    highest = int(tokens.max())
    if highest >= vocab_size:
        raise DataError(f"{path} holds token id {highest}, the target knows 0 to {vocab_size - 1}: was it made for it?")
    starts = np.arange(num_rows, dtype=np.int64) * row_len
    answered = np.ones(len(tokens), dtype=bool)
    return Rows(
        tokens, answered, starts, np.full(num_rows, row_len, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    )


def hold_out(num_rows: int, num_heldout: int) -> tuple[Numbers, Numbers]:
    """Numbers of the rows to train on and of those held out, these evenly spread. Raises DataError if too few."""
    if num_rows < 2 * num_heldout:
        raise DataError(
            f"{num_rows} sequences are too few to hold out {num_heldout}, which takes {2 * num_heldout}: give more, "
            "or lower heldout_prompts under [data] of a recipe (--recipe)"
        )
    held = np.arange(num_heldout, dtype=np.int64) * (num_rows // num_heldout)
    return np.setdiff1d(np.arange(num_rows, dtype=np.int64), held), held


class Order:
    """The order of sequences: reshuffled every epoch; a function of the seed and the position only."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows, self.seed = num_rows, seed
        self.epoch = -1
        self.shuffled: Numbers = np.zeros(0, dtype=np.int64)

    def number(self, place: int) -> int:
        """The sequence at position `place` of the whole training."""
        epoch, index = divmod(place, self.num_rows)
        if epoch != self.epoch:
            self.shuffled, self.epoch = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows), epoch
        return int(self.shuffled[index])

    def numbers(self, first: int, count: int) -> list[int]:
        """The sequences at `count` positions from `first` on."""
        return [self.number(place) for place in range(first, first + count)]
