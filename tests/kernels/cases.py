"""What the kernel tests share: the backends of this machine, and random caches with draft trees on top."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from forerun.kernels.attention import quantize_vectors
from forerun.kernels.ops import AttentionRows, HeadLayout, Kernels, LayerKV
from forerun.kernels.reference import ReferenceKernels

IS_ARM = platform.machine() in ("aarch64", "arm64")
# Of this architecture, the fastest first; the second ones multiply bytes in a way of their own.
ISAS = ("neon", "portable") if IS_ARM else ("avx512", "avx2", "portable")
BYTE_ISAS = (
    ("neoni8mm", "neondot", "neon", "portable")
    if IS_ARM
    else ("avx512amx", "avx512vnni", "avx512", "avx2vnni", "avx2", "portable")
)


@cache
def cpu_kernels(isa: str | None = None, threads: int = 2) -> Kernels:
    """The C++ kernels, or a skip where this machine has no such thing."""
    native = pytest.importorskip("forerun.kernels.cpu._native")
    if isa is not None and isa not in native.available_isas():
        pytest.skip(f"this CPU has no {isa}")
    from forerun.kernels.cpu.backend import CpuKernels

    return CpuKernels(threads, isa)


def kernels_named(name: str) -> Kernels:
    """ "reference" or an instruction set of the C++ kernels."""
    return ReferenceKernels() if name == "reference" else cpu_kernels(name)


def rms_error(value: Tensor, truth: Tensor) -> float:
    """Root mean square of the difference."""
    return float((value.double() - truth.double()).square().mean().sqrt())


def clipped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of gpt-oss's experts, as transformers writes it."""
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def bounded_swiglu(gate: Tensor, up: Tensor, bound: float) -> Tensor:
    """The gate of some of Step-3.5's layers, as transformers writes it."""
    return torch.nn.functional.silu(gate).clamp(max=bound) * up.clamp(min=-bound, max=bound)


KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def pool_of(keys: Tensor, values: Tensor, dtype: torch.dtype) -> LayerKV:
    """A pool of `dtype` holding float32 keys [num_blocks, G, D, B] and values [num_blocks, G, B, D]."""
    if dtype is not torch.int8:
        return LayerKV(keys.to(dtype), values.to(dtype))
    key_codes, key_scales = quantize_vectors(keys.transpose(2, 3))
    value_codes, value_scales = quantize_vectors(values)
    return LayerKV(key_codes.transpose(2, 3).contiguous(), value_codes, key_scales, value_scales)


def spoil(kv: LayerKV, where: Tensor) -> None:
    """NaN in the slots of `where` [num_blocks, B], for every head."""
    if kv.key_scales is not None and kv.value_scales is not None:
        kv.key_scales.masked_fill_(where[:, None], torch.nan)
        kv.value_scales.masked_fill_(where[:, None], torch.nan)
    else:
        kv.keys.transpose(2, 3).masked_fill_(where[:, None, :, None], torch.nan)
        kv.values.masked_fill_(where[:, None, :, None], torch.nan)


def tensors_of(kv: LayerKV) -> list[Tensor]:
    """Everything a pool keeps."""
    tensors = (kv.keys, kv.values, kv.key_scales, kv.value_scales)
    return [tensor for tensor in tensors if tensor is not None]


def copy_slot(source: LayerKV, block: int, offset: int, target: LayerKV, to_block: int, to_offset: int) -> None:
    """One position's key and value, from one pool to another."""
    target.keys[to_block, :, :, to_offset] = source.keys[block, :, :, offset]
    target.values[to_block, :, to_offset] = source.values[block, :, offset]
    for mine, theirs in ((target.key_scales, source.key_scales), (target.value_scales, source.value_scales)):
        if mine is not None and theirs is not None:
            mine[to_block, :, to_offset] = theirs[block, :, offset]


DEFAULT_HEADS = HeadLayout(6, 2, 64, 64)


@dataclass(frozen=True)
class AttentionCase:
    """A cache holding sequences in scattered blocks, and rows that look at it."""

    heads: HeadLayout
    kv: LayerKV
    rows: AttentionRows
    qkv: Tensor
    chunk: int = 0
    sinks: Tensor | None = None  # [Q]
    cap: float = 0.0  # of scores

    def row(self, index: int) -> AttentionCase:
        """The same with one row only."""
        return self.pick(torch.tensor([index]))

    def pick(self, order: Tensor) -> AttentionCase:
        """The same with other rows in another order."""
        rows = replace(
            self.rows,
            seq_ids=self.rows.seq_ids[order],
            prefix_lens=self.rows.prefix_lens[order],
            tree_masks=self.rows.tree_masks[order],
        )
        return replace(self, rows=rows, qkv=self.qkv[order])

    def run(self, kernels: Kernels, scale: float = 0.125, window: int = 0) -> Tensor:
        """The op."""
        seen = self.rows, scale, window, self.chunk, self.sinks, self.cap
        return kernels.attention(self.qkv, self.heads, self.kv, *seen)


def random_tree(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Ancestor masks (self included) of a random tree."""
    masks = [1]
    for node in range(1, num_nodes):
        parent = int(torch.randint(node, (1,), generator=generator))
        masks.append(masks[parent] | 1 << node)
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


def attention_case(
    prefixes: list[int],
    num_nodes: int = 6,
    heads: HeadLayout = DEFAULT_HEADS,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionCase:
    """One sequence a prefix length, each with a random tree of rows behind it."""
    generator = torch.Generator().manual_seed(seed)
    width = max(prefixes) // block_size + num_nodes // block_size + 2
    num_blocks = width * len(prefixes) + 3
    shape = (num_blocks, heads.num_kv, heads.head_dim, block_size)
    keys = torch.randn(shape, generator=generator)
    values = torch.randn(shape[0], shape[1], block_size, heads.head_dim, generator=generator)
    tables = torch.randperm(num_blocks, generator=generator)[: width * len(prefixes)].view(len(prefixes), width)
    masks = [mask for _ in prefixes for mask in random_tree(num_nodes, generator)]
    num_rows = num_nodes * len(prefixes)
    rows = AttentionRows(
        seq_ids=torch.arange(len(prefixes)).repeat_interleave(num_nodes).int(),
        prefix_lens=torch.tensor(prefixes).repeat_interleave(num_nodes).int(),
        tree_masks=torch.tensor(masks),
        tree_starts=torch.tensor(prefixes).int(),
        block_tables=tables.int().contiguous(),
        max_visible=max(prefixes) + num_nodes,
    )
    qkv = torch.randn(num_rows, heads.row_size, generator=generator)
    return AttentionCase(heads, pool_of(keys, values, dtype), rows, qkv)


def visible_logical(case: AttentionCase, row: int) -> list[int]:
    """Logical rows a row sees, in order."""
    rows = case.rows
    mask = int(rows.tree_masks[row])
    start = int(rows.tree_starts[int(rows.seq_ids[row])])
    return list(range(int(rows.prefix_lens[row]))) + [start + bit for bit in range(64) if mask >> bit & 1]


def laid_out_plainly(case: AttentionCase, row: int, block_size: int, seed: int = 1) -> AttentionCase:
    """The row's visible keys copied, in order, into a fresh cache as one plain sequence."""
    generator = torch.Generator().manual_seed(seed)
    visible = visible_logical(case, row)
    width = -(-len(visible) // block_size)
    table = torch.randperm(width + 2, generator=generator)[:width]
    _, num_kv, head_dim, _ = case.kv.keys.shape
    kv = LayerKV.zeros(width + 2, num_kv, head_dim, block_size, case.kv.keys.dtype)
    spoil(kv, torch.ones(width + 2, block_size, dtype=torch.bool))
    source_table = case.rows.block_tables[int(case.rows.seq_ids[row])]
    for index, logical in enumerate(visible):
        block, offset = int(source_table[logical // case.kv.block_size]), logical % case.kv.block_size
        copy_slot(case.kv, block, offset, kv, int(table[index // block_size]), index % block_size)
    rows = AttentionRows(
        seq_ids=torch.zeros(1, dtype=torch.int32),
        prefix_lens=torch.tensor([len(visible)], dtype=torch.int32),
        tree_masks=torch.zeros(1, dtype=torch.int64),
        tree_starts=torch.tensor([len(visible)], dtype=torch.int32),
        block_tables=table.int()[None].contiguous(),
        max_visible=len(visible),
    )
    return replace(case, kv=kv, rows=rows, qkv=case.qkv[row : row + 1])


def attention_truth(case: AttentionCase, scale: float = 0.125, window: int = 0) -> Tensor:
    """Plain softmax attention in float64, and the same in float32 by torch -> ([M, Q * D], [M, Q * D])."""
    outputs = []
    for dtype in (torch.float64, torch.float32):
        rows = [_attend_row(case, row, scale, window, dtype) for row in range(case.qkv.shape[0])]
        outputs.append(torch.stack(rows))
    return torch.stack([output.double() for output in outputs])


def _attend_row(case: AttentionCase, row: int, scale: float, window: int, dtype: torch.dtype) -> Tensor:
    logical = torch.tensor(visible_logical(case, row))
    if case.chunk:
        logical = logical[(len(logical) - 1) // case.chunk * case.chunk :]
    else:
        logical = logical[-window:] if window > 0 else logical[min(-window, len(logical) - 1) :]
    table = case.rows.block_tables[int(case.rows.seq_ids[row])].long()
    blocks, offsets = table[logical // case.kv.block_size], logical % case.kv.block_size
    keys = case.kv.keys[blocks, :, :, offsets].to(dtype)  # [L, G, D]
    values = case.kv.values[blocks, :, offsets].to(dtype)  # [L, G, D]
    if case.kv.key_scales is not None and case.kv.value_scales is not None:
        keys = keys * case.kv.key_scales[blocks, :, offsets].to(dtype)[..., None]
        values = values * case.kv.value_scales[blocks, :, offsets].to(dtype)[..., None]
    heads = case.heads
    query = case.qkv[row, : heads.num_q * heads.head_dim].view(heads.num_kv, -1, heads.head_dim).to(dtype)
    scores = torch.einsum("ghd,lgd->ghl", query, keys) * scale
    scores = torch.tanh(scores / case.cap) * case.cap if case.cap else scores
    if case.sinks is not None:  # keys without values
        scores = torch.cat([scores, case.sinks.to(dtype).view(heads.num_kv, -1, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(logical)]
    return torch.einsum("ghl,lgd->ghd", weights, values).reshape(-1)
