"""Rotation, cache and moved rows in Triton: against the reference, to the bit where nothing is rounded twice."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from tests.kernels.cases import KV_DTYPES, pool_of, tensors_of
from tests.kernels.triton.support import moved
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import HeadLayout, LatentLayout, LayerKV
from forerun.kernels.reference import ReferenceKernels

HEADS = (HeadLayout(6, 2, 16, 16), HeadLayout(3, 1, 40, 20), HeadLayout(2, 2, 24, 0), HeadLayout(2, 1, 24, 12, True))
REFERENCE = ReferenceKernels()
CPU = torch.device("cpu")


def rotated(
    kernels: Any, device: torch.device, heads: HeadLayout, dtype: torch.dtype, block_size: int, order: Tensor,
    norms: bool,
) -> list[Tensor]:  # fmt: skip
    """Rows `order` of a fixed problem -> q after the op, then keys, values and scales found at the rows' slots."""
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(6, heads.row_size, generator=generator)[order]
    angles = torch.randn(100, heads.rotary_dim // 2, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randperm(100, generator=generator)[:6].int()[order]
    slots = torch.randperm(5 * block_size, generator=generator)[:6].int()[order]
    weights = torch.randn(2, heads.head_dim, generator=generator)
    kv = moved(LayerKV.zeros(5, heads.num_kv, heads.head_dim, block_size, dtype), device)
    qkv, table, positions, slots, q_norm, k_norm = (
        tensor.to(device) for tensor in (qkv, table, positions, slots, weights[0].clone(), weights[1].clone())
    )
    weights_given = (q_norm, k_norm) if norms else (None, None)
    kernels.rope_and_cache(qkv, heads, table, positions, slots, kv, *weights_given, 1e-6)
    blocks, offsets = slots.long() // block_size, slots.long() % block_size
    found = [qkv[:, : heads.num_q * heads.head_dim], kv.keys[blocks, :, :, offsets], kv.values[blocks, :, offsets]]
    found += [scale[blocks, :, offsets] for scale in (kv.key_scales, kv.value_scales) if scale is not None]
    return [tensor.float().cpu() for tensor in found]


@pytest.mark.parametrize(
    ("heads", "dtype", "norms"),
    [
        (HEADS[0], torch.float32, True),
        (HEADS[1], torch.bfloat16, False),
        (HEADS[2], torch.bfloat16, True),
        (HEADS[0], torch.int8, False),
        (HEADS[1], torch.int8, True),
    ],
)
def test_rope_against_the_reference(kernels: Any, heads: HeadLayout, dtype: torch.dtype, norms: bool) -> None:
    everything = torch.arange(4)
    block_size = 4 if norms else 16
    ours = rotated(kernels, kernels.device, heads, dtype, block_size, everything, norms)
    reference = rotated(REFERENCE, CPU, heads, dtype, block_size, everything, norms)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.int8: 1.0}[dtype]  # int8: one code
    assert torch.allclose(ours[0], reference[0], rtol=2e-6, atol=2e-6)
    assert torch.allclose(ours[1], reference[1], rtol=tolerance, atol=tolerance)
    assert torch.equal(ours[2], reference[2]) and torch.equal(ours[-1], reference[-1])  # roundings included
    assert len(ours) == (5 if dtype is torch.int8 else 3)
    assert all(torch.allclose(a, b, rtol=2e-6) for a, b in zip(ours[3:], reference[3:], strict=True))
    part = torch.tensor([3])
    few = rotated(kernels, kernels.device, heads, dtype, block_size, part, norms)
    assert all(torch.equal(a, b[part]) for a, b in zip(few, ours, strict=True))


EDGES = {
    "zeros": torch.zeros(40),
    "ties": torch.tensor([127.0, 0.5, -0.5, 1.5, 2.5, -2.5, 126.5]),
    "subnormal": torch.tensor([1e-40, -3e-41, 0.0]),
    "below a scale": torch.tensor([2e-45, -1e-45]),
    "a scale of one place": torch.tensor([2.7e-43, -2.6e-43, 1e-44]),
    "large": torch.tensor([3e38, -3e38, 1e36]),
    "ordinary": torch.randn(40, generator=torch.Generator().manual_seed(0)),
}


def stored_value(kernels: Any, vector: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor | None]:
    """What a vector is in a pool, and its scale in an int8 pool."""
    size = len(vector)
    heads, kv = HeadLayout(1, 1, size, 0), moved(LayerKV.zeros(2, 1, size, 4, dtype), kernels.device)
    qkv = torch.cat([torch.zeros(2 * size), vector])[None].to(kernels.device)
    nothing = torch.zeros(1, dtype=torch.int32, device=kernels.device)
    kernels.rope_and_cache(qkv, heads, torch.zeros(1, 0, device=kernels.device), nothing, nothing + 6, kv)
    return kv.values[1, 0, 2].cpu(), None if kv.value_scales is None else kv.value_scales[1, 0, 2].cpu()


@pytest.mark.parametrize("edge", EDGES)
def test_codes_are_the_nearest_halves_to_even(kernels: Any, edge: str) -> None:
    vector = EDGES[edge]
    codes, scale = stored_value(kernels, vector)
    assert scale is not None and float(scale) == float(vector.abs().max() / 127)
    shares = [Fraction(float(torch.tensor(float(x)) / scale)) if scale > 0 else 0 for x in vector]
    assert codes.tolist() == [max(-127, min(127, round(share))) for share in shares]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 36])
def test_a_vector_that_is_not_finite_is_nan_as_a_whole(kernels: Any, bad: float, place: int) -> None:
    vector = torch.randn(37)
    vector[place] = bad
    codes, scale = stored_value(kernels, vector)
    assert scale is not None and bool(scale.isnan()) and not codes.any()


def test_bfloat16_is_rounded_to_nearest_even(kernels: Any) -> None:
    """Every pattern of the 16 bits that are rounded away, on numbers of every size, and what is not finite."""
    bits = torch.arange(1 << 16).view(64, 1024)[:, ::61].flatten() | torch.arange(1088) * 3947 << 16
    numbers = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    assert torch.equal(
        stored_value(kernels, numbers, torch.bfloat16)[0].view(torch.int16)[~numbers.isnan()],
        numbers.bfloat16().view(torch.int16)[~numbers.isnan()],
    )
    assert bool(stored_value(kernels, numbers, torch.bfloat16)[0][numbers.isnan()].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_latents_against_the_reference(kernels: Any, dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(2)
    layout, norm = LatentLayout(3, 20, 8, interleaved), torch.rand(20) + 0.5
    queries, latents, table = torch.randn(5, 3 * 28), torch.randn(5, 28), torch.randn(50, 8)
    kv = LayerKV.zeros(3, 1, 28, 4, dtype, latent=True)
    positions, slots = torch.tensor([3, 0, 49, 3, 7]).int(), torch.tensor([11, 0, 5, 6, 2]).int()
    problem = (queries, latents, table, positions, slots, kv, norm)
    results = []
    for table_of_ops, device in ((kernels, kernels.device), (REFERENCE, CPU)):
        q, x, angles, *places, pool, weight = (moved(value, device) for value in problem)
        table_of_ops.latent_rope_and_cache(q, x, layout, angles, *places, pool, weight, 1e-6)
        results.append((q.cpu(), x.cpu(), pool.values.cpu()))
    ours, reference = results
    assert torch.allclose(ours[0], reference[0], rtol=2e-6, atol=2e-6)
    assert torch.allclose(ours[1], reference[1], rtol=2e-6, atol=2e-6)
    assert torch.equal(ours[2].view(12, 28)[slots.long()], ours[1].to(dtype))
    assert int((ours[2].view(12, 28) != 0).any(1).sum()) == 5


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_move_rows_in_order(kernels: Any, dtype: torch.dtype) -> None:
    """Pools of two shapes; sources 7 and 9 are read before they are written, and the second 9 counts."""
    shapes = [(2, 5), (2, 5), (1, 8)]
    kvs = [pool_of(torch.randn(3, g, d, 4), torch.randn(3, g, 4, d), dtype) for g, d in shapes]
    sources, targets = torch.tensor([7, 9, 10, 11]).int(), torch.tensor([6, 7, 9, 9]).int()
    ours = [moved(kv, kernels.device) for kv in kvs]
    kernels.move_rows(ours, sources.to(kernels.device), targets.to(kernels.device))
    REFERENCE.move_rows(kvs, sources, targets)
    for mine, expected in zip(ours, kvs, strict=True):
        for a, b in zip(tensors_of(mine), tensors_of(expected), strict=True):
            assert torch.equal(a.cpu(), b)


def test_moved_latents(kernels: Any) -> None:
    kv = LayerKV.zeros(3, 1, 28, 4, torch.bfloat16, latent=True)
    kv.values.normal_()
    ours, places = moved(kv, kernels.device), (torch.tensor([7, 9]).int(), torch.tensor([2, 7]).int())
    kernels.move_rows([ours], *(place.to(kernels.device) for place in places))
    REFERENCE.move_rows([kv], *places)
    assert torch.equal(ours.values.cpu(), kv.values)


def test_a_pool_of_float16_is_refused(kernels: Any) -> None:
    heads, kv = HeadLayout(1, 1, 8, 8), moved(LayerKV.zeros(2, 1, 8, 4, torch.float16), kernels.device)
    zero = torch.zeros(1, dtype=torch.int32, device=kernels.device)
    with pytest.raises(KernelError, match="float32, bfloat16 or int8"):
        kernels.rope_and_cache(
            torch.zeros(1, 24, device=kernels.device), heads, torch.zeros(1, 8, device=kernels.device), zero, zero, kv
        )
