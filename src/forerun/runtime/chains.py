"""Chains of drafts drawn on a card: all passes enqueued at once, nothing read before the last of them.

Knows: where the rows of every level lie, how a drawn token becomes the next level's row. Does not know: what a pass
computes, how work is captured (`kernels.triton.graphs`), requests.

The host lays all levels out and copies them over in one piece; a level's tokens and features are gathered on the
device from what the level above drew; tokens and chances come back in one piece. Tokens, features and bits are those
of one pass a level, drawn in between: each row's inputs are the same, and a row's result depends on nothing else.

**Filling up.** Sizes are fixed, so a chain that has ended, or was never there, repeats what the longest chain, which is
the first, does at that level: it writes the very numbers of that row to the very slots (row invariance). Levels below
the end of the longest chain, where no row has a place, repeat the last level above them, fed as that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.config import MAX_TREE_NODES
from forerun.kernels.device import to_host
from forerun.kernels.ops import ChainNoise, Chains, Kernels, LayerKV, NoiseKeys
from forerun.kernels.triton.graphs import Capture, GraphSize
from forerun.models.base import Passes
from forerun.models.batch import ForwardBatch
from forerun.runtime.drawn import EnqueuedDrafts, GrownTrees
from forerun.runtime.programs import DraftProgram, Programs, batch_size, levels_for
from forerun.runtime.static import padded, padded_tables, repeated


class ChainSize(NamedTuple):
    """What chains are captured for."""

    batch: GraphSize
    num_steps: int  # of the longest there is room for
    keeps_logits: bool
    is_judged: bool


class _Wide(NamedTuple):
    """Columns of 64 bits behind those of the roots."""

    noise_positions: Tensor  # [steps * R]
    active: Tensor  # [steps * R]: 1 where a chain has that many tokens
    chains_below: Tensor  # [(steps - 1) * R]: whose row is computed, by levels below the first
    masks_below: Tensor  # likewise
    idle_below: Tensor  # likewise: 1 where a level repeats the one above


class DeviceChains:
    """Draws chains by programs that are captured, one for every size, when first met."""

    def __init__(self, passes: Passes, kvs: Sequence[LayerKV], kernels: Kernels, capture: Capture) -> None:
        self._programs = Programs(partial(_Program, passes, kvs, kernels), capture)

    def draw(
        self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise, keep_logits: bool, judged: bool
    ) -> tuple[Chains, Tensor | None]:
        """A chain below each of the batch's logit rows, which are one root a sequence, the longest chain first.

        `features` [M, width] on the device. With `judged` also the log chance of each token [steps, R] float64, see
        `Kernels.gumbel_chances`. Tokens and chances are on the host; logits lie where the next call writes its own.
        """
        return self._program(batch, features, noise, keep_logits, judged).result(*noise.positions.shape)

    def enqueue(self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise) -> EnqueuedDrafts:
        """The same, judged and not read."""
        return self._program(batch, features, noise, False, True).drafts(noise.positions.shape[1], noise.num_active)

    def _program(
        self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise, keep_logits: bool, judged: bool
    ) -> _Program:
        """That of the fitting size, which was given its work."""
        fixed, is_usual = batch_size(batch, noise)
        size = ChainSize(fixed, levels_for(noise.positions.shape[0]), keep_logits, judged)
        return self._programs.run(size, lambda program: program.fill(batch, features, noise), is_usual)


class _Program(DraftProgram):
    """All levels of chains of one size."""

    def __init__(self, passes: Passes, kvs: Sequence[LayerKV], kernels: Kernels, size: ChainSize) -> None:
        chains, steps = size.batch.num_sequences, size.num_steps
        levels, below = steps * chains, (steps - 1) * chains
        super().__init__(passes, kvs, kernels, size.batch, [levels] * 2 + [below] * 3, [below] * 4)
        self._first_idle = next(n for n in range(1, steps + 1) if levels_for(n) == steps)  # level that may be idle
        self._size, self._of_levels = size, _Wide(*self._wide_below)
        device = kernels.device
        self._out = torch.zeros(1 + size.is_judged, steps, chains, dtype=torch.int64, device=device)
        self._every = torch.arange(chains, device=device)
        kept = (steps, chains, passes.vocab_size) if size.keeps_logits else (0,)
        self._logits = torch.empty(kept, device=device)

    # -- before ------------------------------------------------------------------------------------------------

    def fill(self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise) -> None:
        """Copy a batch and the layout of all levels below it over; the host does not wait."""
        rows, num_chains = batch.rows, self._size.batch.num_sequences
        active, *below = _below_roots(batch, noise, self._size, self._passes.shift, self._block_size)
        wide = [
            repeated(batch.logit_rows, num_chains),
            *(padded(column, num_chains) for column in (noise.temperatures.view(torch.int64), *noise[1:3])),
            _padded_levels(noise.positions, self._size.num_steps, num_chains),
            active,
            *below[:3],
        ]
        tables = padded_tables(rows.block_tables, num_chains, self._table_width)
        self._fill(batch, features, wide, [padded(rows.tree_starts, num_chains), tables, *below[3:]])

    # -- on the device -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Every pass and every draw; asks the device nothing."""
        out = self._run_roots()
        self._draw(0, out.logits)
        tokens = fed = None
        for step in range(1, self._size.num_steps):
            chains = self._by_level(self._of_levels.chains_below)[step - 1]  # [R]
            drawn = self._out[0, step - 1].index_select(0, chains).clamp_(min=0)  # a chain without an answer idles
            tokens = self._unless_idle(step, drawn, tokens)
            fed = None if out.features is None else self._unless_idle(step, out.features.index_select(0, chains), fed)
            out = self._passes.below(self._below(step, tokens), fed, self._kvs)
            self._draw(step, out.logits)

    def _unless_idle(self, step: int, given: Tensor, above: Tensor | None) -> Tensor:
        """What a level's rows [R, ...] are given, or again what those of the level above were."""
        if step < self._first_idle or above is None:
            return given
        idle = self._by_level(self._of_levels.idle_below)[step - 1] > 0  # [R]
        return torch.where(idle.view(-1, *[1] * (given.dim() - 1)), above, given)

    def _draw(self, step: int, logits: Tensor) -> None:
        """Tokens from logits [R, V] into the output: -1 where a chain has ended or has no answer."""
        keys = NoiseKeys(self._wide.seeds, self._by_level(self._of_levels.noise_positions)[step], self._wide.streams)
        heat = self._wide.temperatures.view(torch.float64)  # [R]
        draw = self._kernels.gumbel_chances if self._size.is_judged else self._kernels.gumbel_topk
        best, chances = draw(logits, heat, keys, 1)  # each [R, 1]
        drawn = best[:, 0]
        alive = self._by_level(self._of_levels.active)[step] > 0
        if step:
            alive &= self._out[0, step - 1] >= 0
        self._out[0, step] = drawn.masked_fill(~alive, -1)
        if self._size.is_judged:
            self._out[1, step] = chances[:, 0].contiguous().view(torch.int64)
        if self._size.keeps_logits:
            self._logits[step].copy_(logits)

    def _by_level(self, column: Tensor) -> Tensor:
        """[levels * R] -> [levels, R]."""
        return column.view(-1, self._size.batch.num_sequences)

    def _below(self, step: int, token_ids: Tensor) -> ForwardBatch:
        """One row a chain, token_ids [R]."""
        positions, slots, seq_ids, prefix_lens = (self._by_level(column)[step - 1] for column in self._narrow_below)
        rows = self._attention(seq_ids, prefix_lens, self._by_level(self._of_levels.masks_below)[step - 1])
        return ForwardBatch(token_ids, positions, slots, rows, self._every, sequences=(), all_logits=True)

    # -- after -------------------------------------------------------------------------------------------------

    def result(self, num_steps: int, num_chains: int) -> tuple[Chains, Tensor | None]:
        """What was drawn for the first chains; here the host waits."""
        out = to_host(self._out)[:, :num_steps, :num_chains]
        logits = self._logits[:num_steps, :num_chains] if self._size.keeps_logits else None
        return Chains(out[0], logits), out[1].contiguous().view(torch.float64) if self._size.is_judged else None

    def drafts(self, num_chains: int, num_active: Tensor) -> EnqueuedDrafts:
        """What will have been drawn for the first chains; num_active [steps]: chains that have that many tokens."""
        out = self._out[:, : len(num_active), :num_chains]
        return EnqueuedDrafts(out, out[0].T, partial(_as_trees, num_active))


def _as_trees(num_active: Tensor, out: Tensor) -> GrownTrees:
    """Chains on the host, judged [2, steps, R], as trees. A row is computed where another token is drawn after it."""
    tokens, chances = out[0].T, out[1].contiguous().view(torch.float64).T  # each [R, steps]
    num_chains, num_steps = tokens.shape
    nodes = torch.arange(1, num_steps + 1).expand(num_chains, -1)
    lengths = (num_active[:, None] > torch.arange(num_chains)).sum(0)  # [R]
    survival = torch.stack(list(accumulate(chances.clamp(max=0.0).unbind(1))), dim=1)  # summed as on the host
    return GrownTrees(tokens, nodes - 1, survival, nodes.masked_fill(nodes >= lengths[:, None], -1))


def _below_roots(batch: ForwardBatch, noise: ChainNoise, size: ChainSize, shift: int, block_size: int) -> list[Tensor]:
    """Which chains are drawn at each level, then of the levels below the roots: whose row is computed (a chain that has
    ended repeats the first, which is the longest), masks, whether the level is idle and repeats the last that is not,
    positions, slots, sequences, known tokens seen."""
    own, num_real = np.arange(size.batch.num_sequences)[None], len(noise.num_active)
    active = np.zeros((size.num_steps, own.size), dtype=bool)
    active[:num_real] = own < noise.num_active.numpy()[:, None]  # [steps, R]
    level = np.arange(1, size.num_steps)[:, None]
    depth = np.minimum(level, num_real - 1)
    chain = np.where(active[depth[:, 0]], own, 0)  # [steps - 1, R]
    roots, table = batch.rows.tree_starts.numpy()[chain], batch.rows.block_tables.numpy()
    logical = roots + depth
    assert not logical.size or logical.max() // block_size < table.shape[1], "a chain outgrew its blocks"
    slots = table[chain, logical // block_size] * block_size + logical % block_size
    masks = np.array([(2 << d) - 1 if d < MAX_TREE_NODES - 1 else -1 for d in depth[:, 0].tolist()], dtype=np.int64)
    wide = (active, chain, *(np.broadcast_to(column, chain.shape) for column in (masks[:, None], level > depth)))
    narrow = (logical + shift, slots, chain, roots)
    return [*(_as(np.int64, column) for column in wide), *(_as(np.int32, column) for column in narrow)]


def _padded_levels(positions: Tensor, num_levels: int, num: int) -> Tensor:
    """[steps, chains], and zeros for levels and chains that are not there -> [num_levels, num]."""
    return torch.nn.functional.pad(positions, (0, num - positions.shape[1], 0, num_levels - positions.shape[0]))


def _as(dtype: Any, values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype, order="C"))
