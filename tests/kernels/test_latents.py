"""Attention over latents: against plain attention in float64, and the same bits in every batch, tree and layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tests.kernels.cases import ISAS, attention_case, cpu_kernels, kernels_named, rms_error, visible_logical
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import AttentionRows, HeadLayout, Kernels, LatentLayout, LayerKV

BACKENDS = ("reference", *ISAS)
DTYPES = (torch.float32, torch.bfloat16)
SMALL = LatentLayout(6, 20, 8, True)
PUBLISHED = LatentLayout(128, 512, 64, True)  # DeepSeek-V3's
SCALE = 0.2


@dataclass(frozen=True)
class LatentCase:
    """A pool of latents, and rows that look at it."""

    layout: LatentLayout
    kv: LayerKV
    rows: AttentionRows
    queries: Tensor

    def run(self, kernels: Kernels) -> Tensor:
        return kernels.latent_attention(self.queries, self.layout, self.kv, self.rows, SCALE)

    def pick(self, order: Tensor) -> LatentCase:
        rows = replace(
            self.rows,
            seq_ids=self.rows.seq_ids[order],
            prefix_lens=self.rows.prefix_lens[order],
            tree_masks=self.rows.tree_masks[order],
        )
        return replace(self, rows=rows, queries=self.queries[order])

    def truth(self, dtype: torch.dtype) -> Tensor:
        """Softmax attention row by row in `dtype`."""
        outs = []
        for row in range(len(self.queries)):
            vectors = self.vectors(row).to(dtype)  # [L, key_dim]
            query = self.queries[row].view(self.layout.num_heads, -1).to(dtype)
            outs.append((torch.softmax(query @ vectors.T * SCALE, -1) @ vectors[:, : self.layout.rank]).view(-1))
        return torch.stack(outs).double()

    def vectors(self, row: int) -> Tensor:
        logical = torch.tensor(self.visible(row))
        table = self.rows.block_tables[int(self.rows.seq_ids[row])].long()
        return self.kv.values[table[logical // self.kv.block_size], 0, logical % self.kv.block_size]

    def visible(self, row: int) -> list[int]:
        return visible_logical(self, row)  # type: ignore[arg-type]


def latent_case(
    prefixes: list[int], num_nodes: int, layout: LatentLayout, dtype: torch.dtype, block_size: int = 16
) -> LatentCase:  # fmt: skip
    plain = attention_case(prefixes, num_nodes, HeadLayout(1, 1, 8, 8), block_size)
    generator = torch.Generator().manual_seed(5)
    num_blocks = plain.kv.values.shape[0]
    kv = LayerKV.zeros(num_blocks, 1, layout.key_dim, block_size, dtype, latent=True)
    kv.values.copy_(torch.randn(kv.values.shape, generator=generator))
    queries = torch.randn(len(plain.qkv), layout.num_heads * layout.key_dim, generator=generator)
    return LatentCase(layout, kv, plain.rows, queries / layout.key_dim**0.25)


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 12, 16, 32])
def test_error_is_at_most_twice_torchs(isa: str, dtype: torch.dtype, block_size: int) -> None:
    case = latent_case([3, 250, 530], 5, SMALL, dtype, block_size)
    truth = case.truth(torch.float64)
    assert rms_error(case.run(kernels_named(isa)), truth) <= 2 * rms_error(case.truth(torch.float32), truth) + 1e-8


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
@pytest.mark.parametrize("num_heads", [128, 67])
def test_the_published_sizes(isa: str, num_heads: int) -> None:
    case = latent_case([280], 3, PUBLISHED._replace(num_heads=num_heads), torch.bfloat16)
    truth = case.truth(torch.float64)
    found = case.run(cpu_kernels(isa, 1))
    assert rms_error(found, truth) <= 2 * rms_error(case.truth(torch.float32), truth) + 1e-8
    assert torch.equal(case.run(cpu_kernels(isa, 3)), found)


@pytest.mark.parametrize("isa", ("reference", "avx512", "avx2"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(isa: str, dtype: torch.dtype) -> None:
    kernels, case = kernels_named(isa), latent_case([5, 120, 255, 600], 6, SMALL, dtype)
    alone = torch.cat([case.pick(torch.tensor([row])).run(kernels) for row in range(24)])
    for num_rows in (1, 2, 5, 16, 24):
        order = torch.randperm(24)[:num_rows]
        assert torch.equal(case.pick(order).run(kernels), alone[order])


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_tree_path_has_the_bits_of_the_same_tokens_in_a_row(isa: str, block_size: int) -> None:
    kernels, case = kernels_named(isa), latent_case([1, 250], 20, SMALL, torch.bfloat16, block_size)
    out = case.run(kernels)
    for row in range(0, 40, 3):
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
        assert torch.equal(LatentCase(SMALL, kv, rows, case.queries[row : row + 1]).run(kernels)[0], out[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_and_thread_counts_agree_bit_by_bit(isa: str, dtype: torch.dtype) -> None:
    case = latent_case([2, 700], 4, SMALL, dtype)
    expected = case.run(cpu_kernels("portable", 1))
    for threads in (1, 2, 5):
        assert torch.equal(case.run(cpu_kernels(isa, threads)), expected)


def rotated(tail: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pairs turned as complex numbers; the two halves of the result."""
    half = tail.shape[-1] // 2
    first, second = (tail[..., 0::2], tail[..., 1::2]) if interleaved else (tail[..., :half], tail[..., half:])
    turned = torch.complex(first.double(), second.double()) * torch.complex(
        angles[:half].double(), angles[half:].double()
    )
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_norm_and_cache(isa: str, dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(2)
    layout, norm = SMALL._replace(interleaved=interleaved), torch.rand(SMALL.rank) + 0.5
    queries, latents = torch.randn(5, 6 * 28), torch.randn(5, 28)
    table, kv = torch.randn(50, 8), LayerKV.zeros(3, 1, 28, 4, dtype, latent=True)
    positions, slots = torch.tensor([3, 0, 49, 3, 7]).int(), torch.tensor([11, 0, 5, 6, 2]).int()
    wanted_q, wanted_l = queries.double().view(5, 6, 28), latents.double()
    for row, angles in enumerate(table[positions.long()]):
        wanted_q[row, :, 20:] = rotated(queries[row].view(6, 28)[:, 20:], angles, interleaved)
        wanted_l[row, 20:] = rotated(latents[row, 20:], angles, interleaved)
    wanted_l[:, :20] *= norm / (latents[:, :20].double().square().mean(1, keepdim=True) + 1e-6).sqrt()
    kernels_named(isa).latent_rope_and_cache(queries, latents, layout, table, positions, slots, kv, norm, 1e-6)
    assert rms_error(queries.view(5, 6, 28), wanted_q) < 1e-6 and rms_error(latents, wanted_l) < 1e-6
    stored = kv.values.view(12, 28)
    assert torch.equal(stored[slots.long()], latents.to(dtype))
    assert int((stored != 0).any(1).sum()) == 5


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16))
@pytest.mark.parametrize("sizes", [(6, 20, 12, 8), (3, 16, 33, 0), (1, 5, 4, 1)])
def test_linear_heads(isa: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(1)
    (num_heads, num_out, num_in, passed), kernels = sizes, kernels_named(isa)
    weight, x = torch.randn(num_heads, num_out, num_in).to(dtype), torch.randn(9, num_heads * (num_in + passed))
    heads, packed = x.view(9, num_heads, -1), kernels.pack_heads(weight)
    products = [
        torch.einsum("qnk,mqk->mqn", weight.to(d), heads[:, :, :num_in].to(d)) for d in (torch.float64, torch.float32)
    ]
    truth, torchs = (torch.cat([p, heads[:, :, num_in:].to(p.dtype)], -1).view(9, -1) for p in products)
    found = kernels.linear_heads(x, packed)
    assert packed.shape == (num_heads, num_out, num_in)
    assert rms_error(found, truth) <= 2 * rms_error(torchs, truth) + 1e-7
    assert torch.equal(found, torch.cat([kernels.linear_heads(row[None].clone(), packed) for row in x]))
    assert torch.equal(found[[7, 2]], kernels.linear_heads(x[[7, 2]], packed))


@pytest.mark.parametrize("isa", ISAS)
def test_linear_heads_on_every_instruction_set_and_thread_count(isa: str) -> None:
    weight, x = torch.randn(24, 70, 50).bfloat16(), torch.randn(7, 24 * 58)
    one = cpu_kernels("portable", 1)
    expected = one.linear_heads(x, one.pack_heads(weight))
    for threads in (1, 3):
        kernels = cpu_kernels(isa, threads)
        assert torch.equal(kernels.linear_heads(x, kernels.pack_heads(weight)), expected)


@pytest.mark.parametrize("isa", ("reference", "avx512"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_rows(isa: str, dtype: torch.dtype) -> None:
    kv = LayerKV.zeros(3, 1, 28, 4, dtype, latent=True)
    kv.values.normal_()
    before = kv.values.clone().view(12, 28)
    kernels_named(isa).move_rows([kv], torch.tensor([7, 9]).int(), torch.tensor([2, 7]).int())
    after = kv.values.view(12, 28)
    assert torch.equal(after[[2, 7]], before[[7, 9]])
    rest = [slot for slot in range(12) if slot not in (2, 7)]
    assert torch.equal(after[rest], before[rest])


def test_wrong_pools_and_sizes_are_refused() -> None:
    with pytest.raises(KernelError, match="float32 or bfloat16"):
        LayerKV.zeros(2, 1, 28, 4, torch.int8, latent=True)
    with pytest.raises(KernelError, match="has one head"):
        LayerKV.zeros(2, 2, 28, 4, torch.float32, latent=True)
    kernels, case = cpu_kernels(), latent_case([4], 2, SMALL, torch.float32)
    with pytest.raises(KernelError, match="pool of keys and values"):
        replace(case, kv=LayerKV.zeros(4, 1, 28, 16, torch.float32)).run(kernels)
    with pytest.raises(KernelError, match="more than the C\\+\\+ kernels take"):
        replace(case, layout=LatentLayout(1, 600, 64, True)).run(kernels)
    with pytest.raises(KernelError, match="linear_heads"):
        kernels.linear_heads(torch.ones(1, 11), kernels.pack_heads(torch.ones(3, 4, 4)))
