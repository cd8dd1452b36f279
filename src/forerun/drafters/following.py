"""How far a head follows a request, the target's states it has still to read, and whether that is worth its time.

Knows: positions, states, seconds. Does not know: heads, batches, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.device import indices_on


class Piece(NamedTuple):
    """States as a step left them: some rows of several tensors [M, H], one for each layer that is read."""

    layers: Sequence[Tensor]
    rows: Sequence[int]  # ascending

    def joined(self) -> Tensor:
        """Layers side by side -> [len(rows), sum of the widths]; a view where it can be one."""
        first, num = self.rows[0], len(self.rows)
        if self.rows[-1] - first == num - 1:
            parts = [states[first : first + num] for states in self.layers]
        else:
            rows = indices_on(self.rows, self.layers[0].device)
            parts = [states.index_select(0, rows) for states in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Follow:
    """Rows below `num_ready` are computed from true states.

    The states, each [W], are the target's, of the tokens from position `first` up to `end`; the row of position j needs
    that of j - 1. They begin later than needed where somebody else computed the tokens between; then there is nothing
    to do. They are joined only when they are read: while nobody drafts, following must cost next to nothing.
    """

    __slots__ = ("_pieces", "_states", "end", "first", "num_idle", "num_ready")

    def __init__(self, num_ready: int, first: int, states: Tensor) -> None:
        """`states` [n, W], of the tokens from position `first` on."""
        self.num_ready = num_ready
        self.first, self.end = first, first + len(states)
        self._states = states  # the first of them, joined
        self._pieces: list[Piece] = []
        self.num_idle = 0  # steps since drafts were wanted

    def add(self, start: int, piece: Piece) -> None:
        """States of the tokens from position `start` on; what was known from there on is replaced."""
        if not self.first <= start <= self.end or self.first == self.end:
            self.first, self._states, self._pieces = start, piece.joined(), []
        elif start < self.end:
            self._states, self._pieces = self._joined()[: start - self.first], [piece]
        else:
            self._pieces.append(piece)
        self.end = start + len(piece.rows)

    def reaches(self, end: int) -> bool:
        """Whether all rows from `num_ready`, or from the last, up to `end` can be computed."""
        return min(self.num_ready, end - 1) - 1 >= self.first and end - 1 <= self.end

    def is_broken(self, num_computed: int) -> bool:
        """Others computed tokens whose states are not known: the rows behind `num_ready` will never be computed."""
        return self.num_ready - 1 < self.first and self.num_ready <= num_computed

    def take(self, start: int, end: int) -> Tensor:
        """The states the rows start .. end-1 need -> [end - start, W]."""
        return self._joined()[start - 1 - self.first : end - 1 - self.first]

    def advance(self, end: int) -> None:
        """Rows below `end` are computed; only what the last of them read may be needed again."""
        self.num_ready = end
        done = end - 2 - self.first
        if done > 0:
            self._states = self._joined()[done:].clone()  # the steps' whole states need not stay
            self.first += done

    def _joined(self) -> Tensor:
        if self._pieces:
            self._states = torch.cat([self._states, *(piece.joined() for piece in self._pieces)])
            self._pieces = []
        return self._states


_RECENT = 1 / 64  # what the newest step counts for in the share of steps with drafts
_WANTED = 0.05  # share of steps with drafts from which following needs no other reason
_TRUSTED = 0.1  # that share as it is taken to be at first
_AFFORDED = 0.01  # share of the time that following may take while nobody wants drafts
_PATIENCE = 48  # steps after which a request nobody drafts for may be left
_LONGEST_STEP_S = 1.0  # above it there was nothing to do


class Thrift:
    """Bounds what following costs where no drafts are wanted, as when a policy found them not worth their time.

    A head that lags too far behind cannot draft: whether drafts will be wanted must be guessed. As long as they are
    wanted now and then, or reading takes next to none of the time, everything is followed. Else requests are left, and
    what was read in vain is a debt that a small share of the time pays off; once it is paid, the next requests are
    followed from their beginning.
    """

    def __init__(self) -> None:
        self._wanted = _TRUSTED
        self._debt_s = 0.0
        self._began: float | None = None

    def learn(self, wanted: bool, began: float, reading_s: float) -> None:
        """A step is over that was asked for drafts or not; it was observed from `began` on, which took `reading_s`."""
        self._wanted += _RECENT * (wanted - self._wanted)
        step_s = began - self._began if self._began is not None else 0.0
        paid_s = _AFFORDED * step_s if step_s < _LONGEST_STEP_S else 0.0
        self._debt_s = max(self._debt_s - paid_s, 0.0) + (0.0 if self._is_wanted else reading_s)
        self._began = began

    @property
    def _is_wanted(self) -> bool:
        return self._wanted > _WANTED

    @property
    def allows(self) -> bool:
        """Whether to follow requests whose drafts may never be wanted."""
        return self._is_wanted or self._debt_s <= _AFFORDED * _LONGEST_STEP_S

    def leaves(self, follow: Follow) -> bool:
        """Whether to follow a request no longer."""
        return follow.num_idle >= _PATIENCE and not self.allows
