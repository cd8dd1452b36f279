"""Trees of drafts grown on a GPU: all levels enqueued at once, nothing read before the last of them.

Knows: where the rows of every level lie, how drawn tokens become the next level's rows. Does not know: what a pass
computes, which nodes are expanded (`kernels.tree_growth`), how work is captured, requests.

The host copies the roots' rows and what is known of every tree over in one piece, and reads tokens, parents and chances
once: at the end, or after a pass of the target that took them from the device. Trees equal those drawn level by level
with reads in between, up to the number of levels asked for: the host continues while a level has leaves that are worth
a pass, but a graph has a fixed length and skips nothing. A chain is a tree of width 1.

**Filling up.** Sizes are fixed. An unused tree repeats the first tree, with the same noise, in the same
rows: it computes the very numbers of the first (row invariance). For unused leaves see `kernels.tree_growth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.draws import ChainTensors
from forerun.kernels.ops import AttentionRows, Kernels, LayerKV, NoiseKeys
from forerun.kernels.tree_growth import NodeRows, TreeRoom, new_trees
from forerun.kernels.triton.graphs import Capture, GraphSize
from forerun.models.base import Passes, PassOutput
from forerun.models.batch import ForwardBatch
from forerun.runtime.programs import Programs, batch_size, levels_for, room_for
from forerun.runtime.static import StaticColumns, fill_features, padded_tables, repeated, table_width
from forerun.speculation.drawn import DrawnTree, PendingTrees, trees_of

MOST_LEVELS = 8  # of trees: as deep as EAGLE-2 and -3 draw theirs (depth 5 to 8 in their repository)


class TreeSize(NamedTuple):
    """What trees are captured for."""

    batch: GraphSize
    num_nodes: int  # of the largest tree that fits
    num_levels: int  # a tree that has no more leaves goes on idly
    width: int
    keeps_logits: bool


class _Wide(NamedTuple):
    """Columns of 64 bits, of M rows of the roots' pass and R trees."""

    token_ids: Tensor  # [M]
    tree_masks: Tensor  # [M]
    logit_rows: Tensor  # [R]: the roots among the M rows
    temperatures: Tensor  # [R], float64 by their bits
    seeds: Tensor  # [R]
    streams: Tensor  # [R]
    noise_positions: Tensor  # [levels * R]
    budgets: Tensor  # [R]


class _Narrow(NamedTuple):
    """Columns of 32 bits."""

    positions: Tensor  # [M]
    slots: Tensor  # [M]
    seq_ids: Tensor  # [M]
    prefix_lens: Tensor  # [M]
    tree_starts: Tensor  # [R], for every level
    tables: Tensor  # [R * blocks], for every level


class DeviceTrees:
    """Grows trees by programs that are captured, one for every size, when first met."""

    def __init__(self, passes: Passes, kvs: Sequence[LayerKV], kernels: Kernels, capture: Capture) -> None:
        self._vocab_size = passes.vocab_size
        self._programs = Programs(partial(_TreeProgram, passes, kvs, kernels), capture)

    def enqueue(self, batch: ForwardBatch, features: Tensor | None, noise: ChainTensors, width: int) -> PendingTrees:
        """A tree below each of the batch's logit rows, which are one root a sequence, the largest tree first.

        `noise`: of chains as long as the trees may have nodes, whose positions are those of the levels. `features`
        [M, width of the features] on the device.
        """
        return self._program(batch, features, noise, width, False).drafts(noise.positions.shape[1])

    def draw_chains(
        self, batch: ForwardBatch, features: Tensor | None, noise: ChainTensors
    ) -> tuple[list[DrawnTree], Tensor]:
        """Trees of width 1, and the logits they were drawn from [steps, R, V], which lie where the next call's will.

        Here the host waits.
        """
        program = self._program(batch, features, noise, 1, True)
        num_steps, num = noise.positions.shape
        return program.drafts(num).read(), program.logits[:num_steps, :num]

    def _program(
        self, batch: ForwardBatch, features: Tensor | None, noise: ChainTensors, width: int, keeps_logits: bool
    ) -> _TreeProgram:
        """That of the fitting size, which was given its work."""
        num_nodes = noise.positions.shape[0]
        assert width <= self._vocab_size
        fixed, is_usual = batch_size(batch, noise)
        num_levels = levels_for(num_nodes) if width == 1 else min(levels_for(num_nodes), MOST_LEVELS)
        size = TreeSize(fixed, room_for(num_nodes), num_levels, width, keeps_logits)
        return self._programs.run(size, lambda program: program.fill(batch, features, noise), is_usual)


class _TreeProgram:
    """The tensors of one size of trees, which stay where they are, and the work of all levels between them."""

    def __init__(self, passes: Passes, kvs: Sequence[LayerKV], kernels: Kernels, size: TreeSize) -> None:
        self._passes, self._kvs, self._kernels, self._size = passes, kvs, kernels, size
        (rows, trees, visible), device = size.batch, kernels.device
        self._block_size = kvs[0].block_size
        self._table_width = table_width(visible, self._block_size)
        wide = [rows] * 2 + [trees] * 4 + [size.num_levels * trees, trees]
        self._columns = StaticColumns(wide, [rows] * 4 + [trees, trees * self._table_width], device)
        self._wide, self._narrow = _Wide(*self._columns.wide), _Narrow(*self._columns.narrow)
        self._features = torch.zeros(rows, passes.feature_size, device=device) if passes.feature_size else None
        self._every = torch.arange(trees * size.width, device=device)
        self._out = torch.zeros(6, trees, size.num_nodes, dtype=torch.int64, device=device)
        kept = (size.num_levels, trees, passes.vocab_size) if size.keeps_logits else (0,)
        self.logits = torch.empty(kept, device=device)  # of every level, if they are kept

    # -- before ------------------------------------------------------------------------------------------------

    def fill(self, batch: ForwardBatch, features: Tensor | None, noise: ChainTensors) -> None:
        """Copy a batch and what is known of its trees over; the host does not wait."""
        rows, (num_rows, num_trees, _) = batch.rows, self._size.batch
        budgets = (noise.num_active[:, None] > torch.arange(noise.positions.shape[1])).sum(0)  # [R]
        of_trees = (batch.logit_rows, noise.temperatures.view(torch.int64), *noise[1:3])
        levels = repeated(noise.positions, max(self._size.num_levels, len(noise.positions)))[: self._size.num_levels]
        positions = torch.cat([_with_first(level, num_trees) for level in levels])  # [levels * R]
        tables = padded_tables(rows.block_tables, len(rows.block_tables), self._table_width)
        narrow = (batch.positions, batch.slots, rows.seq_ids, rows.prefix_lens)
        self._columns.fill(
            [
                *(repeated(column, num_rows) for column in (batch.token_ids, rows.tree_masks)),
                *(_with_first(column, num_trees) for column in of_trees),
                positions,
                _with_first(budgets, num_trees),
            ],
            [
                *(repeated(column, num_rows) for column in narrow),
                *(_with_first(column, num_trees) for column in (rows.tree_starts, tables)),
            ],
        )
        fill_features(self._features, features)

    # -- on the device -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Every pass and every draw; asks the device nothing."""
        kernels, size, budgets = self._kernels, self._size, self._wide.budgets
        room = TreeRoom(self._narrow.tree_starts, self._tables, self._block_size, self._passes.shift)
        nodes, rows, given = new_trees(size.batch.num_sequences, kernels.device), None, None
        out = self._run_roots()
        noise, noise_below = self._noise()
        for level in range(size.num_levels - 1):
            ids, chances = self._draw(level, out.logits, noise_below[level] if level else noise[level])
            nodes, rows = kernels.grow_trees(nodes, budgets, ids, chances, room, rows)
            given = _gathered(given, out.features, rows)
            out = self._passes.below(self._below(rows), given, self._kvs)
        last = size.num_levels - 1
        ids, chances = self._draw(last, out.logits, noise_below[last] if last else noise[last])
        self._out.copy_(kernels.keep_trees(nodes, budgets, ids, chances, size.num_nodes))

    def _run_roots(self) -> PassOutput:
        """The pass over known tokens that are still to be read, and the roots."""
        wide, narrow = self._wide, self._narrow
        rows = self._attention(narrow.seq_ids, narrow.prefix_lens, wide.tree_masks)
        batch = ForwardBatch(
            wide.token_ids, narrow.positions, narrow.slots, rows, wide.logit_rows, sequences=(), all_logits=False
        )
        return self._passes.first(batch, self._features, self._kvs)

    def _noise(self) -> tuple[Tensor, Tensor]:
        """What the draws of every level are keyed by: temperatures by their bits, seeds, positions, streams.

        Those of roots [levels, 4, R], and of `width` leaves a tree [levels, 4, R * width].
        """
        wide, (_, num_trees, _) = self._wide, self._size.batch
        positions = wide.noise_positions.view(-1, num_trees)  # [levels, R]
        columns = (wide.temperatures, wide.seeds, positions, wide.streams)
        noise = torch.stack([column.expand_as(positions) for column in columns], dim=1)
        return noise, noise.repeat_interleave(self._size.width, dim=2)

    def _draw(self, level: int, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens after every leaf, from logits [R * leaves, V], and log chances: [R, leaves, width]."""
        if self._size.keeps_logits:
            self.logits[level].copy_(logits)
        heat, *keys = noise.unbind(0)
        width = self._size.width
        ids, chances = self._kernels.gumbel_chances(logits, heat.view(torch.float64), NoiseKeys(*keys), width)
        shape = (self._size.batch.num_sequences, -1, width)
        return ids.reshape(shape), chances.reshape(shape)

    def _below(self, rows: NodeRows) -> ForwardBatch:
        """One level's leaves, one row each."""
        return ForwardBatch(
            token_ids=rows.token_ids,
            positions=rows.positions,
            slots=rows.slots,
            rows=self._attention(rows.seq_ids, rows.prefix_lens, rows.tree_masks),
            logit_rows=self._every,
            sequences=(),
            all_logits=True,
        )

    @property
    def _tables(self) -> Tensor:
        """[R, blocks]."""
        return self._narrow.tables.view(-1, self._table_width)

    def _attention(self, seq_ids: Tensor, prefix_lens: Tensor, tree_masks: Tensor) -> AttentionRows:
        visible = self._size.batch.max_visible
        return AttentionRows(seq_ids, prefix_lens, tree_masks, self._narrow.tree_starts, self._tables, visible)

    # -- after -------------------------------------------------------------------------------------------------

    def drafts(self, num_trees: int) -> PendingTrees:
        """What will have been kept of the first trees."""
        out = self._out[:, :num_trees]
        return PendingTrees(out[:4], out[0], out[4], out[5], lambda read: trees_of(*read))


def _gathered(given: Tensor | None, made: Tensor | None, rows: NodeRows) -> Tensor | None:
    """The features for a level's rows, from the last level's inputs, then its outputs."""
    if made is None:
        return None
    known = made if given is None else torch.cat([given, made])
    return known.index_select(0, rows.sources)


def _with_first(column: Tensor, num: int) -> Tensor:
    """A column [R, ...] and its first entry again -> [num, ...]."""
    return torch.cat([column, column[:1].expand(num - len(column), *column.shape[1:])])
