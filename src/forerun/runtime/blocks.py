"""Drafts of networks that guess a whole block in one pass: what such a pass computes, and trees of its logits.

Knows: which rows are read before or beside, which slots a block has, what each sees. Does not know: what the passes
compute, how the pass over slots is executed (`runtime.bind`), trees of its logits (`runtime.depths`).

Slot 0 is the root, the others hold no token yet. Their KV lies in the rows behind the root, where nobody finds it: rows
of known tokens are written over it once these are known. All logits of a depth are the same whatever was drafted
before, so that trees are grown as those of heads beside the output layer; or the head beside them says how they follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from forerun.kernels.device import to_device
from forerun.kernels.ops import LayerKV
from forerun.models.base import BlockPasses, GuessedBlocks, PassOutput, SlotOrder
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime.depths import SlotPairs, draw_depths, draw_in_order
from forerun.runtime.runner import Runner
from forerun.speculation.drawn import Drawn, DrawnTree
from forerun.speculation.growth import TreeNoise


class BlockRunner:
    """Implements `runtime.runner.Runner`; `blocks` executes the passes over slots."""

    def __init__(self, passes: BlockPasses, blocks: Runner, kvs: Sequence[LayerKV], block_size: int) -> None:
        self.replays = blocks.replays
        self._passes = passes
        self._blocks = blocks
        self._kvs = kvs
        self._block_size = block_size  # of the pool

    @torch.no_grad()
    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """Read known tokens, and the target's states [M, W] beside them if the passes do; there are no logits."""
        if self._passes.read is None:
            return self._blocks.run(batch, features)
        assert features is not None
        self._passes.read(batch, features, self._kvs)
        return PassOutput(features.new_empty(0, self._passes.block.vocab_size))

    @torch.no_grad()
    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """See `Runner`; features are those of the known tokens, and of the roots where blocks read them, too."""
        if self._passes.order is not None:
            return self._draw_in_order(roots, features, noise, width, self._passes.order)
        logits, states = self.guess(roots, features, noise.sizes)
        scores = self._passes.pairs
        if scores is None or states is None:
            return draw_depths(noise, logits, width)
        tokens = _tokens([rows.tree_tokens[0] for rows in roots], logits.device)
        return draw_depths(noise, logits, width, SlotPairs(scores, states, tokens))

    def _draw_in_order(
        self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int, order: SlotOrder
    ) -> list[DrawnTree]:  # fmt: skip
        """Trees of blocks in which slots look at what is drafted before, as many slots at a time."""
        slots, drawn, first = self._slots(noise.sizes), list[DrawnTree](), self._passes.shape.first_slot
        out, done = self._pass(roots, features, slots), 0
        [states] = out.hidden.values()
        for num, group in groupby(range(len(roots)), slots.__getitem__):
            chosen = list(group)
            rows = slice(done, done := done + num * len(chosen))
            blocks = GuessedBlocks(
                out.logits[rows].view(len(chosen), num, -1)[:, first:],
                states[rows].view(len(chosen), num, -1),
                _tokens([roots[index].tree_tokens[0] for index in chosen], states.device),
                *(self._before(roots, chosen, features) if order.reads_before else ()),
            )
            drawn += draw_in_order(noise.of(chosen), blocks, order, width)
        return drawn

    def _before(
        self, roots: Sequence[SequenceRows], chosen: Sequence[int], features: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The known tokens before some roots [n] and the target's states of these [n, W]."""
        assert features is not None
        ends = list(accumulate(len(rows.span) for rows in roots))
        last = torch.tensor([ends[index] - 1 for index in chosen])
        tokens = _tokens([roots[index].span[-1] for index in chosen], features.device)
        return tokens, features.index_select(0, to_device(last, features.device))

    def _slots(self, sizes: Sequence[int]) -> list[int]:
        """How many slots the blocks of trees of these sizes have, the root's among them."""
        shape = self._passes.shape
        return [min(shape.num_depths, size) + shape.first_slot for size in sizes]

    def guess(
        self, roots: Sequence[SequenceRows], features: Tensor | None, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Logits [R, depths, V] of the drafts behind each root, for trees of these sizes, the largest first, and the
        hidden states they are made of [R, depths, H], if the passes give these.

        A tree has rows for as many slots as it may have nodes: logits of depths beyond are -inf, states 0.
        """
        slots = self._slots(sizes)
        depths = [num - self._passes.shape.first_slot for num in slots]
        out = self._pass(roots, features, slots)
        states = [self._of_drafts(states, depths, 0.0) for states in out.hidden.values()]
        return self._of_drafts(out.logits, depths, -torch.inf), states[0] if states else None

    def _of_drafts(self, rows: Tensor, depths: Sequence[int], missing: float) -> Tensor:
        """Rows [all slots, N] of blocks one behind the other -> [R, most depths, N] without those of other slots."""
        first = self._passes.shape.first_slot
        if depths[-1] == depths[0]:
            return rows.view(len(depths), depths[0] + first, -1)[:, first:].contiguous()
        even = rows.new_full((len(depths), depths[0], rows.shape[1]), missing)
        for index, of_block in enumerate(rows.split_with_sizes([depth + first for depth in depths])):
            even[index, : depths[index]] = of_block[first:]
        return even

    def _pass(self, roots: Sequence[SequenceRows], features: Tensor | None, slots: Sequence[int]) -> PassOutput:
        """The pass over so many slots behind each root, after the tokens before the roots were read."""
        blocks = [self._block(rows, num) for rows, num in zip(roots, slots, strict=True)]
        if self._passes.read is None:
            return self._blocks.run(self._batch(blocks), self._with_blanks(blocks, features))
        spans = [_span(rows) for rows in roots if rows.span]
        if spans:
            self.run(self._batch(spans), features)
        return self._blocks.run(self._batch([_tree(rows) for rows in blocks]))

    def _batch(self, rows: Sequence[SequenceRows]) -> ForwardBatch:
        return ForwardBatch.build(rows, self._block_size, self._passes.block.shift)

    def _with_blanks(self, blocks: Sequence[SequenceRows], features: Tensor | None) -> Tensor | None:
        """Features of known tokens and roots, and of the slots behind each root -> [M, W]; None if none are read."""
        if features is None or self._passes.blank is None:
            return None
        known = features.split_with_sizes([len(rows.span) + 1 for rows in blocks])
        blanks = [self._passes.blank.expand(len(rows.tree_rows) - 1, -1) for rows in blocks]
        return torch.cat([part for pair in zip(known, blanks, strict=True) for part in pair])

    def _block(self, root: SequenceRows, num_slots: int) -> SequenceRows:
        """The known tokens before a root, and the rows of its block."""
        slots, shape = range(num_slots), self._passes.shape
        return root._replace(
            tree_tokens=[*root.tree_tokens, *[shape.mask_token_id] * (num_slots - 1)],
            tree_rows=slots,
            tree_masks=[(2 << slot) - 1 if shape.is_causal else (1 << num_slots) - 1 for slot in slots],
            tree_depths=slots,
        )


def _tokens(token_ids: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(token_ids), device)


def _span(rows: SequenceRows) -> SequenceRows:
    """The known tokens alone."""
    return rows._replace(tree_tokens=(), tree_rows=(), tree_masks=(), tree_depths=())


def _tree(rows: SequenceRows) -> SequenceRows:
    """The tree alone."""
    return rows._replace(start=rows.tree_start, span=())
