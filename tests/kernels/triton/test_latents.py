"""Attention over latents in Triton: against softmax in float64, and the same bits in every batch, tree and layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.kernels.cases import attention_case, rms_error, visible_logical
from tests.kernels.triton.support import moved
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import AttentionRows, HeadLayout, LatentLayout, LayerKV

SMALL = LatentLayout(6, 20, 8, True)
SCALE = 0.2


@dataclass(frozen=True)
class LatentCase:
    """A pool of latents, and rows that look at it."""

    layout: LatentLayout
    kv: LayerKV
    rows: AttentionRows
    queries: Tensor

    def run(self, kernels: Any) -> Tensor:
        case = moved(self, kernels.device)
        return kernels.latent_attention(case.queries, case.layout, case.kv, case.rows, SCALE).cpu()

    def pick(self, order: list[int]) -> LatentCase:
        rows = replace(
            self.rows,
            seq_ids=self.rows.seq_ids[order],
            prefix_lens=self.rows.prefix_lens[order],
            tree_masks=self.rows.tree_masks[order],
        )
        return replace(self, rows=rows, queries=self.queries[order])

    def vectors(self, row: int) -> Tensor:
        logical = torch.tensor(visible_logical(self, row))  # type: ignore[arg-type]
        table = self.rows.block_tables[int(self.rows.seq_ids[row])].long()
        return self.kv.values[table[logical // self.kv.block_size], 0, logical % self.kv.block_size]

    def truth(self, dtype: torch.dtype) -> Tensor:
        """Softmax attention row by row in `dtype`."""
        outs = []
        for row in range(len(self.queries)):
            vectors = self.vectors(row).to(dtype)  # [L, key_dim]
            query = self.queries[row].view(self.layout.num_heads, -1).to(dtype)
            outs.append((torch.softmax(query @ vectors.T * SCALE, -1) @ vectors[:, : self.layout.rank]).view(-1))
        return torch.stack(outs).double()


def latent_case(
    prefixes: list[int], num_nodes: int, layout: LatentLayout, dtype: torch.dtype, block_size: int = 16
) -> LatentCase:  # fmt: skip
    plain = attention_case(prefixes, num_nodes, HeadLayout(1, 1, 8, 8), block_size)
    generator = torch.Generator().manual_seed(5)
    kv = LayerKV.zeros(plain.kv.values.shape[0], 1, layout.key_dim, block_size, dtype, latent=True)
    kv.values.copy_(torch.randn(kv.values.shape, generator=generator))
    queries = torch.randn(len(plain.qkv), layout.num_heads * layout.key_dim, generator=generator)
    return LatentCase(layout, kv, plain.rows, queries / layout.key_dim**0.25)


@pytest.mark.parametrize(
    ("layout", "dtype", "block_size"),
    [
        (SMALL, torch.float32, 4),
        (SMALL._replace(num_heads=19), torch.bfloat16, 16),
        (LatentLayout(2, 96, 32, True), torch.bfloat16, 12),
        (LatentLayout(16, 512, 64, True), torch.bfloat16, 16),  # the published sizes, of fewer heads
    ],
)
def test_error_is_at_most_twice_torchs(
    kernels: Any, layout: LatentLayout, dtype: torch.dtype, block_size: int
) -> None:  # fmt: skip
    case = latent_case([45, 258], 2, layout, dtype, block_size).pick([1, 3])
    truth = case.truth(torch.float64)
    assert rms_error(case.run(kernels), truth) <= 2 * rms_error(case.truth(torch.float32), truth) + 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(kernels: Any, dtype: torch.dtype) -> None:
    case = latent_case([33, 255], 2, SMALL, dtype)
    whole = case.run(kernels)
    for order in ([3], [2, 0]):
        assert torch.equal(case.pick(order).run(kernels), whole[order])


def test_a_tree_path_has_the_bits_of_the_same_tokens_in_a_row(kernels: Any) -> None:
    case = latent_case([20, 250], 9, SMALL, torch.bfloat16, 4)
    chosen = [8, 17]
    out = case.pick(chosen).run(kernels)
    for index, row in enumerate(chosen):
        vectors = case.vectors(row)
        num, width = len(vectors), -(-len(vectors) // 8)
        kv = LayerKV.zeros(width, 1, SMALL.key_dim, 8, torch.bfloat16, latent=True)
        kv.values.view(-1, SMALL.key_dim)[:num] = vectors
        rows = AttentionRows(
            seq_ids=torch.zeros(1, dtype=torch.int32),
            prefix_lens=torch.tensor([num], dtype=torch.int32),
            tree_masks=torch.zeros(1, dtype=torch.int64),
            tree_starts=torch.tensor([num], dtype=torch.int32),
            block_tables=torch.arange(width, dtype=torch.int32)[None],
            max_visible=num,
        )
        assert torch.equal(LatentCase(SMALL, kv, rows, case.queries[row : row + 1]).run(kernels)[0], out[index])


def test_nan_reaches_the_rows_that_see_it_and_no_other(kernels: Any) -> None:
    case = latent_case([40], 4, SMALL, torch.float32)
    case = replace(case, rows=replace(case.rows, tree_masks=torch.tensor([1, 3, 7, 15])))
    clean = case.run(kernels)
    block, offset = divmod(42, 16)  # node 2
    case.kv.values[case.rows.block_tables[0, block], :, offset] = torch.nan
    dirty = case.run(kernels)
    assert dirty[2:].isnan().all()
    assert torch.equal(dirty[:2], clean[:2])


def test_a_pool_of_keys_and_values_is_refused(kernels: Any) -> None:
    case = latent_case([4], 1, SMALL, torch.float32)
    with pytest.raises(KernelError, match="pool of keys and values"):
        replace(case, kv=LayerKV.zeros(4, 1, 28, 16, torch.float32)).run(kernels)
