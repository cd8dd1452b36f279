"""Drawing batches: which window of which source comes next.

Knows the mix and the order of windows; both follow from a seed and a few counters, so a resumed run draws exactly
the batches an uninterrupted one would. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import DataError
from forerun.training.data import Tokens


def window_starts(tokens: Tokens, seq_len: int, end_of_text: int | None) -> NDArray[np.int64]:
    """Places where windows of `seq_len + 1` tokens begin.

    With `end_of_text`, a document that the end of a window cuts begins the next window, unless it began the one that
    cut it. So an answer is read without its question only in a document longer than a window.
    """
    last = len(tokens) - seq_len - 1
    if end_of_text is None:
        return np.arange(0, last + 1, seq_len, dtype=np.int64)
    documents = np.concatenate(([0], np.flatnonzero(tokens == end_of_text) + 1))
    starts, start = list[int](), 0
    while start <= last:
        starts.append(start)
        begun = int(documents[np.searchsorted(documents, start + seq_len, side="right") - 1])
        start = begun if begun > start else start + seq_len
    return np.array(starts, dtype=np.int64)


class MixtureStream:
    """The windows of one source in a shuffled order that differs from epoch to epoch."""

    def __init__(self, tokens: Tokens, seq_len: int, seed: tuple[int, ...], end_of_text: int | None) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.seed = seed
        self.starts = window_starts(tokens, seq_len, end_of_text)
        self.num_windows = len(self.starts)
        self.epoch = -1
        self.order = np.zeros(0, dtype=np.int64)

    def window(self, index: int) -> Tokens:
        """Returns window number `index` [seq_len + 1]; numbers beyond the last window begin a new epoch."""
        epoch, place = divmod(index, self.num_windows)
        if epoch != self.epoch:
            self.order = np.random.default_rng((*self.seed, epoch)).permutation(self.num_windows)
            self.epoch = epoch
        start = int(self.starts[self.order[place]])
        return self.tokens[start : start + self.seq_len + 1]


class Mixture:
    """Draws windows from many sources in proportion to their weights.

    The next source is always the one furthest behind its share, so every stretch of data has the same mix. With
    `end_of_text`, the token that closes a document, windows begin with documents where they can.
    """

    def __init__(
        self,
        sources: Mapping[str, Tokens],
        weights: Mapping[str, float],
        seq_len: int,
        seed: int,
        end_of_text: int | None = None,
    ) -> None:
        self.names = sorted(weights)
        total = sum(weights.values())
        self.shares = {name: weights[name] / total for name in self.names}
        self.counts = dict.fromkeys(self.names, 0)
        self.streams: dict[str, MixtureStream] = {}
        for number, name in enumerate(self.names):
            self.streams[name] = MixtureStream(sources[name], seq_len, (seed, seq_len, number), end_of_text)
            if self.streams[name].num_windows < 1:
                raise DataError(f"source {name} has {len(sources[name])} tokens, fewer than one window of {seq_len}")

    def next_source(self) -> str:
        """Chooses the source that is furthest behind its share."""
        drawn = sum(self.counts.values()) + 1
        return max(self.names, key=lambda name: self.shares[name] * drawn - self.counts[name])

    def next_batch(self, num_windows: int) -> Tensor:
        """Draws the next windows, [num_windows, seq_len + 1] int64."""
        windows = []
        for _ in range(num_windows):
            name = self.next_source()
            windows.append(self.streams[name].window(self.counts[name]))
            self.counts[name] += 1
        return torch.from_numpy(np.stack(windows).astype(np.int64))
