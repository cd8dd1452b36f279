"""WeightArena: packed weights one after the other in large pieces of memory.

Knows: alignment and huge pages. Does not know: layouts. A matrix alone is often smaller than a huge page; packed
behind its predecessor it shares one, and a forward pass reads memory in order.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from forerun.kernels.cpu import _native

_PIECE_BYTES = 64 << 20  # untouched memory costs nothing
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class WeightArena:
    """Hands out memory; a piece is freed when the last tensor in it is."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._one_taker = Lock()

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory -> [num_elements] of `dtype`, on a cache line of its own."""
        num_bytes = num_elements * dtype.itemsize
        with self._one_taker:  # engines on the same kernels may load their drafters on threads of their own
            if self._used + num_bytes > len(self._piece):
                self._start_piece(max(_PIECE_BYTES, num_bytes + _HUGE_PAGE))
            begin = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._piece[begin : begin + num_bytes].view(dtype)

    def _start_piece(self, num_bytes: int) -> None:
        self._piece = torch.empty(num_bytes, dtype=torch.uint8)
        address = self._piece.data_ptr()
        _native.prefer_huge_pages(address, num_bytes)
        self._used = -address % _HUGE_PAGE
