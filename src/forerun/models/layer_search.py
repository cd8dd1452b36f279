"""Which layers of a decoder matter least for a text: found on its last known tokens.

Knows: the layers, and a few free rows of the pool to compute in. Does not know: drafting.

Dynamic programming as in CLaSp (arXiv 2505.24196, section 3.3): g(i, j) approximates the state after i layers of
which j were left out. It is the better of layer i applied to g(i-1, j), and g(i-1, j-1) passed on, by cosine with
the true state after i layers, which is g(i, 0). Here the cosine is the mean over several tokens, so that what is
left out suits the text and not one word. Every state is a row that sees the true keys and values of the tokens
before it, and its own, which lie in a free row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.ops import AttentionRows, LayerKV
from forerun.models.batch import ForwardBatch
from forerun.models.decoder import Decoder, DecoderLayer


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens to look at: `token_ids` at positions first, first + 1, ..., whose KV the pool holds.

    The `num_free` logical rows from `free_row` on belong to the sequence and may be overwritten.
    """

    token_ids: Sequence[int]
    first: int
    block_table: Sequence[int]
    free_row: int
    num_free: int
    block_size: int


class _Path(NamedTuple):
    """The best choice so far for one number of layers left out."""

    state: Tensor  # [num_tokens, H]
    left_out: tuple[int, ...]


@torch.no_grad()
def find_layers(model: Decoder, kvs: Sequence[LayerKV], sample: Sample, num_kept: int) -> tuple[int, ...]:
    """The `num_kept` layers, ascending, that together keep the states of the sample closest to the true ones.

    `kvs` are the layers' own, in their order. Costs about as much as (num_left_out + 1) passes over the sample.
    """
    num_layers = len(model.parts.layers)
    num_left_out = num_layers - num_kept
    assert 0 < num_kept < num_layers and sample.token_ids and sample.num_free > 0
    token_ids = torch.tensor(sample.token_ids, device=model.device)  # [num_tokens]
    paths = {0: _Path(model.parts.embedding(token_ids), ())}
    for index, layer in enumerate(model.parts.layers):
        fewest = max(0, num_left_out - (num_layers - index - 1))  # else num_left_out is out of reach
        paths = _extend(paths, index, _apply(layer, kvs[index], paths, sample), fewest, num_left_out)
    left_out = paths[num_left_out].left_out
    return tuple(index for index in range(num_layers) if index not in left_out)


def _extend(
    paths: dict[int, _Path], index: int, applied: dict[int, Tensor], fewest: int, most: int
) -> dict[int, _Path]:
    """The best path for each number of layers left out, after layer `index`; path 0 leaves none out: the truth."""
    truth = applied[0]
    found = {0: _Path(truth, ())}
    for count in range(max(1, fewest), min(index + 1, most) + 1):
        candidates = []
        if count - 1 in paths:
            candidates.append(_Path(paths[count - 1].state, (*paths[count - 1].left_out, index)))
        if count in applied:
            candidates.append(_Path(applied[count], paths[count].left_out))
        if candidates:
            found[count] = max(candidates, key=lambda path: _likeness(path.state, truth))
    return found


def _likeness(state: Tensor, truth: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(state, truth, dim=1).mean())


def _apply(layer: DecoderLayer, kv: LayerKV, paths: dict[int, _Path], sample: Sample) -> dict[int, Tensor]:
    """The layer on the states of all paths, as many rows at a time as there are free ones."""
    states = torch.cat([path.state for path in paths.values()])  # [num_paths * num_tokens, H]
    num_tokens = len(sample.token_ids)
    positions = [sample.first + row % num_tokens for row in range(len(states))]
    done = []
    for start in range(0, len(states), sample.num_free):
        end = min(start + sample.num_free, len(states))
        residual = states[start:end].clone()
        batch = _batch(sample, positions[start:end]).on(states.device)
        last, residual = layer(layer.enter(residual), residual, batch, kv)
        done.append(residual + last)
    return dict(zip(paths, torch.split(torch.cat(done), num_tokens), strict=True))


def _batch(sample: Sample, positions: Sequence[int]) -> ForwardBatch:
    """Rows that each see the known tokens before their position, and themselves in the free rows."""
    free = [divmod(sample.free_row + row, sample.block_size) for row in range(len(positions))]
    prefix_lens = torch.tensor(positions, dtype=torch.int32)  # [M]
    rows = AttentionRows(
        seq_ids=torch.zeros(len(positions), dtype=torch.int32),  # [M]
        prefix_lens=prefix_lens,
        tree_masks=torch.tensor([_bit(row) for row in range(len(positions))]),  # [M]
        tree_starts=torch.tensor([sample.free_row], dtype=torch.int32),  # [1]
        block_tables=torch.tensor([list(sample.block_table)], dtype=torch.int32),  # [1, max_blocks]
        max_visible=max(positions) + 1,
    )
    slots = [sample.block_table[block] * sample.block_size + offset for block, offset in free]
    no_rows = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        token_ids=no_rows,
        positions=prefix_lens,
        slots=torch.tensor(slots, dtype=torch.int32),  # [M]
        rows=rows,
        logit_rows=no_rows,
        sequences=(),
        all_logits=False,
    )


def _bit(row: int) -> int:
    """A mask of this tree row alone, as a signed 64-bit word."""
    return 1 << row if row < 63 else -(1 << 63)
