"""Layers of DFlash-2: a short convolution inside the block before and behind attention and feed-forward.

Knows: the arithmetic. Does not know: files, what the rows stand for but how far each is behind its block's root.

y_i = sum over taps t of (base_t + d_it) * x_{i-t}, where slot i - t is in the same block; d_it, one number for each
group of neighbouring entries, is a projection of what enters attention (feed-forward), for both of its convolutions.
Source: z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forerun.layers.linear import Linear
from forerun.models.batch import ForwardBatch
from forerun.models.decoder import DecoderLayer, LayerCache, add_norm, pooled_in


@dataclass(frozen=True, slots=True)
class BlockConvolution:
    """The two convolutions around attention, or around the feed-forward part."""

    base: Tensor  # [2, taps, H] float32: before and behind
    projection: Linear  # [2 * taps * groups, H]

    def enter(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, H], slots [M] -> what goes in [M, H], and the other convolution's numbers [M, taps, groups]."""
        changing = self.projection(x).view(len(x), 2, self.base.shape[1], -1)  # [M, 2, taps, groups]
        return _convolved(x, self.base[0], changing[:, 0], slots), changing[:, 1]

    def leave(self, x: Tensor, changing: Tensor, slots: Tensor) -> Tensor:
        """What came out, x [M, H] -> [M, H]."""
        return _convolved(x, self.base[1], changing, slots)


def _convolved(x: Tensor, base: Tensor, changing: Tensor, slots: Tensor) -> Tensor:
    """x [M, H] with base [taps, H], changing [M, taps, groups] and slots [M] -> [M, H]."""
    found = torch.zeros_like(x)
    for tap in range(len(base)):
        before = torch.nn.functional.pad(x, (0, 0, tap, 0))[: len(x)]
        factors = base[tap] + changing[:, tap].repeat_interleave(x.shape[1] // changing.shape[2], dim=1)
        found += (before * factors).masked_fill(slots[:, None] < tap, 0.0)
    return found


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Those of one layer."""

    attention: BlockConvolution
    mlp: BlockConvolution


@dataclass(frozen=True, slots=True)
class ConvolvedLayer(DecoderLayer):
    """A layer of attention and a feed-forward part with convolutions around both."""

    mixes_rows: ClassVar[bool] = True

    around: Convolutions | None = None  # which it always has

    def __call__(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, kv: LayerCache, wanted: Tensor | None = None,
        parts: Sequence[Tensor] = (), held: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `DecoderLayer`; all rows are those of whole blocks."""
        assert self.around is not None and self.mlp is not None
        slots = batch.positions - batch.rows.prefix_lens  # behind the root; a block's rows lie at their positions
        entered, changing = self.around.attention.enter(x, slots)
        mixed = self.attending(entered, pooled_in(kv), batch.positions, batch.slots, batch.rows, None)
        normed = add_norm(self.mlp_norm, self.around.attention.leave(mixed, changing, slots), residual)
        entered, changing = self.around.mlp.enter(normed, slots)
        made = self.around.mlp.leave(self.mlp(entered), changing, slots)
        return (made, residual) if wanted is None else (made[wanted], residual[wanted])
