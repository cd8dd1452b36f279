"""The reference of attention over the paged pool, a row at a time.

Knows: rotations, what a row sees and where it lies, the softmax split by split, how an int8 pool stores vectors. Does
not know: ops over whole batches (`forerun.kernels.reference`), layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.ops import ATTENTION_SPLIT, AttentionRows, LayerKV


def rotate(head: Tensor, angles: Tensor, rotary_dim: int) -> Tensor:
    """A head [D] whose first rotary_dim entries are turned, entry i with entry i + rotary_dim / 2."""
    half = rotary_dim // 2
    first, second = head[:half], head[half:rotary_dim]
    cos, sin = angles[:half], angles[half:rotary_dim]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, head[rotary_dim:]])


def rotate_tail(tail: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """The rotated part of a head, left in two halves."""
    halves = torch.cat([tail[0::2], tail[1::2]]) if interleaved else tail.clone()
    return rotate(halves, angles, len(halves))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """x bounded softly by -cap and cap."""
    return torch.tanh(x / cap) * cap


def places(rows: AttentionRows, row: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks and offsets of what row `row` sees, in the order of the visible index -> ([L], [L]) int64."""
    logical = visible(rows, row)  # [L]
    table = rows.block_tables[int(rows.seq_ids[row])].long()
    return table[logical // block_size], logical % block_size


def visible(rows: AttentionRows, row: int) -> Tensor:
    """Logical rows that row `row` sees, in the order of their visible index -> [L] int64."""
    mask = int(rows.tree_masks[row])
    start = int(rows.tree_starts[int(rows.seq_ids[row])])
    ancestors = [start + bit for bit in range(64) if mask >> bit & 1]
    return torch.cat([torch.arange(int(rows.prefix_lens[row])), torch.tensor(ancestors, dtype=torch.int64)])


def stored(vectors: Tensor, scales: Tensor | None, block: int, offset: int, kv: LayerKV) -> Tensor:
    """Vectors [G, D] in the pool's dtype; their scales, where it has some, are written to it."""
    if scales is None:
        return vectors.to(kv.keys.dtype)
    codes, scales[block, :, offset] = quantize_vectors(vectors)
    return codes


def quantize_vectors(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., D] as an int8 pool stores them (see `LayerKV`) -> codes of the same shape, scales [...]."""
    scales = vectors.abs().amax(dim=-1) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)  # amax passes NaN on
    codes = (vectors / scales[..., None]).round().clamp(-127, 127)  # torch rounds halves to even
    return torch.where(scales[..., None] > 0, codes, 0).to(torch.int8), scales


class Seen(NamedTuple):
    """What a row sees of one KV head, in the order of the visible index."""

    keys: Tensor  # [L, D] float32, int8 codes widened
    values: Tensor  # [L, D] likewise
    key_scales: Tensor  # [L]
    value_scales: Tensor  # [L]


def first_counted(num_visible: int, window: int, chunk: int) -> int:
    """The first visible index that counts for a row that sees so many keys."""
    if chunk > 0:
        return (num_visible - 1) // chunk * chunk
    return max(0, num_visible - window) if window > 0 else min(-window, num_visible - 1)


def attend(
    query: Tensor, seen: Seen, scale: float, first: int, sinks: Tensor | None = None, cap: float = 0.0
) -> Tensor:
    """Attention of the heads of one group [Hg, D] over what they see, split by split -> [Hg, D]; sinks [Hg, 1]."""
    top = torch.full((query.shape[0], 1), -torch.inf)
    total = torch.zeros(query.shape[0], 1)
    out = torch.zeros(query.shape[0], seen.values.shape[1])
    for start in range(first - first % ATTENTION_SPLIT, len(seen.keys), ATTENTION_SPLIT):
        part = slice(max(first, start), start + ATTENTION_SPLIT)
        scores = (query @ seen.keys[part].clone().T) * seen.key_scales[part] * scale  # [Hg, n]
        scores = scores if cap == 0 else soft_cap(scores, cap)
        new_top = torch.maximum(top, scores.amax(dim=1, keepdim=True))
        weights = torch.exp(scores - new_top)
        shrink = torch.exp(top - new_top)
        total = total * shrink + weights.sum(dim=1, keepdim=True)
        out = out * shrink + (weights * seen.value_scales[part]) @ seen.values[part].clone()
        top = new_top
    return out / (total if sinks is None else total + torch.exp(sinks - top))
