"""BlockHead: a small decoder that guesses a whole block of tokens in one pass, over KV made of a target's states.

Knows: how known tokens become keys and values, what the pass over a block computes. Does not know: files, layouts,
requests, how a block's rows lie in a batch (`runtime.blocks`).

A known token's keys and values are projections of the target's hidden states of that token, the same in all layers but
for the matrices: no pass over known tokens is needed. A block is the root and empty slots, all of which hold the
embedding of one mask token; every slot sees all known tokens and its block, and gives logits of one position.
Formulas: DFlash (arXiv 2602.06036), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.kernels.ops import AttentionRows, LayerKV
from forerun.layers.attention import Attention
from forerun.models.base import BlockPasses, BlockShape, PairScores, SlotOrder, passes_of
from forerun.models.batch import ForwardBatch
from forerun.models.decoder import Decoder
from forerun.models.heads.head import Fusion


class OrderedAttention(Attention):
    """Attention in which no slot sees those behind it, in a head that has other layers, too."""

    def __call__(
        self, x: Tensor, kv: LayerKV, positions: Tensor, slots: Tensor, rows: AttentionRows, wanted: Tensor | None
    ) -> Tensor:
        """See `Attention`; the rows of a block lie at their positions."""
        before = replace(rows, prefix_lens=positions + 1, tree_masks=torch.zeros_like(rows.tree_masks))
        return super().__call__(x, kv, positions, slots, before, wanted)


class BlockHead:
    """A head over the target's pool, under the target's own block tables."""

    sees_slot_zero = True  # the first token has a row like all others

    def __init__(
        self, decoder: Decoder, fuse: Fusion, shape: BlockShape, hidden_layers: tuple[int, ...], state_size: int,
        weight_bytes: int, pairs: PairScores | None = None, order: SlotOrder | None = None,
    ) -> None:  # fmt: skip
        """`decoder`: what computes a block, with the target's tables. `fuse`: see `heads.head.Fusion`.

        hidden_layers: of the target, in the order their states are laid side by side; state_size: the sum of their
        widths; weight_bytes: of tensors that are not the target's; pairs, order: how slots follow each other, if they
        do, one of the two.
        """
        self.decoder = decoder
        self.shape = shape
        self.hidden_layers = hidden_layers
        self.state_size = state_size
        self.kv_specs = decoder.kv_specs
        self.weight_bytes = weight_bytes
        self._fuse, self._pairs, self._order = fuse, pairs, order

    @torch.no_grad()
    def read(self, batch: ForwardBatch, states: Tensor, kvs: Sequence[LayerKV]) -> None:
        """Write the keys and values of known tokens, given the target's states [M, state_size] of these tokens."""
        batch = batch.on(states.device)
        context = self._fuse(states)  # [M, H]
        assert context.shape[0] == batch.num_rows, (context.shape[0], batch.num_rows)
        for layer, kv in zip(self.decoder.parts.layers, kvs, strict=True):
            layer.attending.store(context, kv, batch.positions, batch.slots)

    @property
    def passes(self) -> BlockPasses:
        """Reading known tokens, and the pass over blocks."""
        is_alone = self._pairs is None and self._order is None
        last = () if is_alone else (len(self.decoder.parts.layers) + 1,)  # the state behind the final norm
        mixes_rows = any(layer.mixes_rows for layer in self.decoder.parts.layers)
        block = replace(passes_of(self.decoder, last), mixes_rows=mixes_rows)
        return BlockPasses(block, self.shape, self.read, pairs=self._pairs, order=self._order)
