"""Norms, activations, embedding, rope and the cache: against torch in float64, row by row, instruction set by set."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from tests.kernels.cases import (
    ISAS,
    KV_DTYPES,
    bounded_swiglu,
    clipped_swiglu,
    cpu_kernels,
    kernels_named,
    pool_of,
    rms_error,
    tensors_of,
)
from torch import Tensor
from torch.nn import functional

from forerun.errors import KernelError
from forerun.kernels.ops import HeadLayout, Kernels, LayerKV

WIDTHS = (1, 7, 16, 100, 384, 1000)
Op = Callable[[Kernels, Tensor], Tensor]


def _ops(width: int) -> dict[str, tuple[Op, Callable[[Tensor], Tensor]]]:
    """Name -> (the op, its definition in the dtype of its argument)."""
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(width, generator=generator)
    up = 9 * torch.randn(1, width, generator=generator)

    def rms(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.to(x.dtype)

    def layer(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (width,), weight.to(x.dtype), eps=1e-5)

    def gated(act: str) -> Op:
        return lambda k, x: k.gated_act(torch.cat([x, up.expand_as(x)], 1).contiguous(), act)

    return {
        "rms_norm": (lambda k, x: k.rms_norm(x, weight, 1e-5), rms),
        "add_rms_norm": (lambda k, x: k.add_rms_norm(x, x * 3, weight, 1e-5), lambda x: rms(x + x * 3)),
        "layer_norm": (lambda k, x: k.rms_norm(x, weight, 1e-5, centered=True), layer),
        "add_layer_norm": (lambda k, x: k.add_rms_norm(x, x * 3, weight, 1e-5, True), lambda x: layer(x + x * 3)),
        "scaled": (lambda k, x: k.scaled(x, 1.3), lambda x: x * 1.3),
        "capped": (lambda k, x: k.scaled(x, 0.1, 3.0), lambda x: torch.tanh(x * 0.1 / 3) * 3),
        "silu": (gated("silu"), lambda x: functional.silu(x) * up.to(x.dtype)),
        "sigmoid": (gated("sigmoid"), lambda x: torch.sigmoid(x) * up.to(x.dtype)),
        "gelu_tanh": (gated("gelu_tanh"), lambda x: functional.gelu(x, approximate="tanh") * up.to(x.dtype)),
        "clipped_swiglu": (gated("clipped_swiglu"), lambda x: clipped_swiglu(x, up.to(x.dtype))),
        "silu_within_7": (gated("silu_within_7"), lambda x: bounded_swiglu(x, up.to(x.dtype), 7.0)),
        "silu_within_16": (gated("silu_within_16"), lambda x: bounded_swiglu(x, up.to(x.dtype), 16.0)),
        "squared_relu": (lambda k, x: k.gated_act(x, "squared_relu"), lambda x: functional.relu(x).square()),
    }


@pytest.mark.parametrize("isa", ("reference", *ISAS))
@pytest.mark.parametrize("width", WIDTHS)
def test_error_is_at_most_twice_torchs(isa: str, width: int) -> None:
    kernels = kernels_named(isa)
    x = torch.randn(50, width, generator=torch.Generator().manual_seed(1)) * 4
    for name, (op, definition) in _ops(width).items():
        truth = definition(x.double())
        floor = 1e-7 * float(truth.abs().mean() + 1e-3)
        assert rms_error(op(kernels, x), truth) <= 2 * rms_error(definition(x), truth) + floor, name


@pytest.mark.parametrize("isa", ("reference", "avx512", "avx2"))
@pytest.mark.parametrize("width", (7, 384))
def test_a_row_has_the_same_bits_in_every_batch(isa: str, width: int) -> None:
    kernels = kernels_named(isa)
    x = torch.randn(40, width)
    for name, (op, _) in _ops(width).items():
        alone = torch.cat([op(kernels, row[None].clone()) for row in x])
        for num_rows in range(1, 41):
            order = torch.randperm(40)[:num_rows]
            assert torch.equal(op(kernels, x[:num_rows].clone()), alone[:num_rows]), name
            assert torch.equal(op(kernels, x[order]), alone[order]), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_instruction_sets_agree_bit_by_bit(isa: str, width: int) -> None:
    x = torch.cat([torch.randn(30, width) * 10.0**exponent for exponent in (-20, -3, 0, 1, 2, 20)])
    for name, (op, _) in _ops(width).items():
        ours, portable = op(cpu_kernels(isa), x), op(cpu_kernels("portable", 1), x)
        assert torch.equal(ours.nan_to_num(), portable.nan_to_num()), name
        assert torch.equal(ours.isnan(), portable.isnan()), name


@pytest.mark.parametrize("isa", ("reference", *ISAS))
def test_a_clipped_gate_lets_nothing_but_numbers_be_clipped(isa: str) -> None:
    gate = torch.tensor([[7.5, 1e30, torch.inf, -1e30, torch.nan, 1.0, 1.0, 1.0]])
    up = torch.tensor([[1.0, -9.0, 9.0, 1.0, 1.0, torch.inf, -torch.inf, torch.nan]])
    kernels, both = kernels_named(isa), torch.cat([gate, up], 1)
    out = kernels.gated_act(both, "clipped_swiglu")
    assert torch.allclose(out, clipped_swiglu(gate, up), rtol=1e-6, atol=1e-30, equal_nan=True)
    for bound in (7, 16):
        out = kernels.gated_act(both, f"silu_within_{bound}")
        assert torch.allclose(out, bounded_swiglu(gate, up, bound), rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
def test_activations_at_the_edges(isa: str) -> None:
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 87.0, -87.0, 104.0, -104.0, 1e30, -1e30, torch.inf, torch.nan]])
    out = cpu_kernels(isa).gated_act(torch.cat([x, torch.ones_like(x)], 1), "silu")
    expected = functional.silu(x.double()).float()
    assert torch.allclose(out, expected, rtol=3e-7, atol=1e-38, equal_nan=True)


@pytest.mark.parametrize("isa", ("reference", *ISAS))
def test_a_squared_relu_is_that_of_torch_to_the_bit(isa: str) -> None:
    x = torch.cat([torch.tensor([0.0, -0.0, 1e-30, -1e30, 1e30, torch.inf, -torch.inf, torch.nan]), torch.randn(999)])
    found = kernels_named(isa).gated_act(x[None], "squared_relu")[0]
    assert torch.equal(found.nan_to_num(), functional.relu(x).square().nan_to_num())
    assert torch.equal(found.isnan(), x.isnan())


@pytest.mark.parametrize("isa", ("reference", *ISAS))
def test_soft_caps_at_the_edges(isa: str) -> None:
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-6, 1e-3, 0.3, -0.6, 40.0, -800.0, 1e30, -torch.inf, torch.inf, torch.nan]])
    expected = (torch.tanh(x.double() / 30) * 30).float()
    assert torch.allclose(kernels_named(isa).scaled(x, 1.0, 30.0), expected, rtol=4e-7, atol=1e-38, equal_nan=True)


def test_the_residual_is_updated_in_place() -> None:
    for kernels in (kernels_named("reference"), cpu_kernels()):
        x, residual, weight = torch.randn(3, 20), torch.randn(3, 20), torch.ones(20)
        expected = residual + x
        out = kernels.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(residual, expected)
        assert torch.equal(out, kernels.rms_norm(expected, weight, 1e-6))


@pytest.mark.parametrize("isa", ("reference", *ISAS))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_embedding_is_exact_and_checks_its_ids(isa: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(isa)
    table = torch.randn(50, 37).to(dtype)
    ids = torch.randint(50, (9,))
    assert torch.equal(kernels.embedding(ids, table), table[ids].float())
    packed = kernels.pack_linear(table)  # an output layer that is also the table
    assert torch.equal(kernels.embedding(ids, packed), table[ids].float())
    for wrong in (50, -51):
        with pytest.raises(IndexError):
            kernels.embedding(torch.tensor([1, wrong]), table)


def test_unknown_names_and_places_are_refused() -> None:
    for kernels in (kernels_named("reference"), cpu_kernels()):
        with pytest.raises(KernelError, match="activation"):
            kernels.gated_act(torch.randn(1, 4), "relu")
    heads, table = HeadLayout(1, 1, 8, 8), torch.randn(4, 8)
    kv = LayerKV(torch.zeros(2, 1, 8, 4), torch.zeros(2, 1, 4, 8))
    for position, slot in ((4, 0), (-1, 0), (0, 8), (0, -1)):
        places = (torch.tensor([position]).int(), torch.tensor([slot]).int())
        with pytest.raises(IndexError):
            cpu_kernels().rope_and_cache(torch.randn(1, 24), heads, table, *places, kv)


HEADS = (
    HeadLayout(6, 2, 64, 64),
    HeadLayout(4, 4, 8, 8),
    HeadLayout(3, 1, 40, 20),
    HeadLayout(2, 2, 48, 24),
    HeadLayout(4, 2, 40, 20, True),
    HeadLayout(1, 1, 592, 592, True),  # wider than what C++ turns on its stack
)


def _rope(
    kernels: Kernels, heads: HeadLayout, dtype: torch.dtype, block_size: int, order: Tensor, norms: bool
) -> list[Tensor]:
    """Rows `order` of a fixed problem -> q after the op, and what is found at the rows' slots.

    That is: keys, values (codes in an int8 pool), then their scales (1 in other pools).
    """
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(40, heads.row_size, generator=generator)[order]
    angles = torch.randn(100, heads.rotary_dim // 2, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randperm(100, generator=generator)[:40].int()[order]
    slots = torch.randperm(20 * block_size, generator=generator)[:40].int()[order]
    weights = torch.randn(2, heads.head_dim, generator=generator)
    kv = LayerKV.zeros(20, heads.num_kv, heads.head_dim, block_size, dtype)
    q_norm, k_norm = (weights[0].clone(), weights[1].clone()) if norms else (None, None)
    kernels.rope_and_cache(qkv, heads, table, positions, slots, kv, q_norm, k_norm, 1e-6)
    blocks, offsets = slots.long() // block_size, slots.long() % block_size
    queries = qkv[:, : heads.num_q * heads.head_dim]
    scales = [
        torch.ones(1, 1) if scale is None else scale[blocks, :, offsets] for scale in (kv.key_scales, kv.value_scales)
    ]
    return [queries, kv.keys[blocks, :, :, offsets].float(), kv.values[blocks, :, offsets].float(), *scales]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("norms", (False, True))
def test_rope_against_the_reference(isa: str, heads: HeadLayout, dtype: torch.dtype, norms: bool) -> None:
    everything = torch.arange(40)
    for block_size in (4, 16):
        ours = _rope(cpu_kernels(isa), heads, dtype, block_size, everything, norms)
        reference = _rope(kernels_named("reference"), heads, dtype, block_size, everything, norms)
        portable = _rope(cpu_kernels("portable", 1), heads, dtype, block_size, everything, norms)
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.int8: 1.0}[dtype]  # int8: one code
        assert torch.allclose(ours[0], reference[0], rtol=2e-6, atol=2e-6)
        assert torch.allclose(ours[1], reference[1], rtol=tolerance, atol=tolerance)
        assert torch.equal(ours[2], reference[2]) and torch.equal(ours[4], reference[4])  # roundings included
        assert torch.allclose(ours[3], reference[3], rtol=2e-6)
        assert all(torch.equal(a, b) for a, b in zip(ours, portable, strict=True))


@pytest.mark.parametrize("isa", ("reference", *ISAS))
def test_queries_alone_have_the_same_bits_and_write_nothing(isa: str) -> None:
    heads, order = HeadLayout(4, 2, 24, 24), torch.arange(40)
    kernels, generator = kernels_named(isa), torch.Generator().manual_seed(3)
    qkv = torch.randn(40, heads.row_size, generator=generator)
    angles, norm = torch.randn(40, 12, generator=generator), torch.randn(24, generator=generator)
    table, places, kv = (
        torch.cat([angles.cos(), angles.sin()], 1),
        order.int(),
        LayerKV.zeros(5, 2, 24, 8, torch.float32),
    )
    queries = qkv[:, : 4 * 24].clone()
    kernels.rope_and_cache(queries, heads._replace(num_kv=0), table, places, places, kv, norm, None, 1e-6)
    assert not kv.keys.any() and not kv.values.any()
    kernels.rope_and_cache(qkv, heads, table, places, places, kv, norm, norm, 1e-6)
    assert torch.equal(queries, qkv[:, : 4 * 24]) and kv.keys.any()


@pytest.mark.parametrize("isa", ("reference", "avx512", "avx2"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.int8))
def test_rope_rows_have_the_same_bits_in_every_batch(isa: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(isa)
    whole = _rope(kernels, HEADS[0], dtype, 16, torch.arange(40), True)
    for num_rows in (1, 2, 3, 7, 33):
        order = torch.randperm(40)[:num_rows]
        part = _rope(kernels, HEADS[0], dtype, 16, order, True)
        assert all(torch.equal(a, b[order] if len(b) == 40 else b) for a, b in zip(part, whole, strict=True))


EDGES = {
    "zeros": (torch.zeros(40), 0.0),
    "ties": (torch.tensor([127.0, 0.5, -0.5, 1.5, 2.5, -2.5, 126.5]), 1.0),
    "subnormal": (torch.tensor([1e-40, -3e-41, 0.0]), None),
    "below a scale": (torch.tensor([2e-45, -1e-45]), 0.0),
    "a scale of one place": (torch.tensor([2.7e-43, -2.6e-43, 1e-44]), None),
    "large": (torch.tensor([3e38, -3e38, 1e36]), None),
    "ordinary": (torch.randn(40, generator=torch.Generator().manual_seed(0)), None),
}


def _stored_value(kernels: Kernels, vector: Tensor) -> tuple[Tensor, Tensor]:
    """A vector's codes and scale after a trip through an int8 pool."""
    size = len(vector)
    heads, kv = HeadLayout(1, 1, size, 0), LayerKV.zeros(2, 1, size, 4, torch.int8)
    qkv = torch.cat([torch.zeros(2 * size), vector])[None]
    nothing = torch.zeros(1, dtype=torch.int32)
    kernels.rope_and_cache(qkv, heads, torch.zeros(1, 0), nothing, nothing + 6, kv)
    assert kv.value_scales is not None and int(kv.values.count_nonzero()) == int(kv.values[1, 0, 2].count_nonzero())
    return kv.values[1, 0, 2].long(), kv.value_scales[1, 0, 2]


@pytest.mark.parametrize("isa", ("reference", *ISAS))
@pytest.mark.parametrize("edge", EDGES)
def test_codes_are_the_nearest_halves_to_even(isa: str, edge: str) -> None:
    vector, expected_scale = EDGES[edge]
    codes, scale = _stored_value(kernels_named(isa), vector)
    assert float(scale) == (float(vector.abs().max() / 127) if expected_scale is None else expected_scale)
    shares = [Fraction(float(torch.tensor(float(x)) / scale)) if scale > 0 else 0 for x in vector]
    assert codes.tolist() == [max(-127, min(127, round(share))) for share in shares]


@pytest.mark.parametrize("isa", ("reference", *ISAS))
@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("place", (0, 15, 16, 36))
def test_a_vector_that_is_not_finite_is_nan_as_a_whole(isa: str, bad: float, place: int) -> None:
    vector = torch.randn(37)
    vector[place] = bad
    codes, scale = _stored_value(kernels_named(isa), vector)
    assert bool(scale.isnan()) and not codes.any()


@pytest.mark.parametrize("isa", ("reference", *ISAS))
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_move_rows_in_order(isa: str, dtype: torch.dtype) -> None:
    kvs = [pool_of(torch.randn(3, 2, 5, 4), torch.randn(3, 2, 4, 5), dtype) for _ in range(2)]
    before = [LayerKV(*(tensor.clone() for tensor in tensors_of(kv))) for kv in kvs]
    sources, targets = [7, 9, 11], [6, 7, 9]  # 7 and 9 are read before they are written
    kernels_named(isa).move_rows(kvs, torch.tensor(sources).int(), torch.tensor(targets).int())
    for kv, old in zip(kvs, before, strict=True):
        for source, target in zip(sources, targets, strict=True):
            new_key, old_key = kv.keys[target // 4, :, :, target % 4], old.keys[source // 4, :, :, source % 4]
            assert torch.equal(new_key, old_key)
            for new, own in zip(tensors_of(kv)[1:], tensors_of(old)[1:], strict=True):  # values, scales: [.., G, B, ..]
                assert torch.equal(new[target // 4, :, target % 4], own[source // 4, :, source % 4])
        assert all(torch.equal(new[0], own[0]) for new, own in zip(tensors_of(kv), tensors_of(old), strict=True))
        untouched = [slot for slot in range(4, 12) if slot not in targets]
        for new, own in zip(tensors_of(kv)[1:], tensors_of(old)[1:], strict=True):
            assert all(torch.equal(new[slot // 4, :, slot % 4], own[slot // 4, :, slot % 4]) for slot in untouched)


@pytest.mark.parametrize(
    ("keys", "values", "scales"),
    [
        ((2, 1, 8, 4), (2, 1, 8, 4), None),
        ((2, 1, 8, 4), (2, 1, 4, 8), None),
        ((2, 1, 8, 4), (2, 1, 4, 8), (2, 4, 1)),
    ],
)
def test_a_pool_that_does_not_fit_together_is_refused(
    keys: tuple[int, ...], values: tuple[int, ...], scales: tuple[int, ...] | None
) -> None:
    given = () if scales is None else (torch.zeros(scales), torch.zeros(scales))
    with pytest.raises(KernelError, match="pool|keys"):
        LayerKV(torch.zeros(keys, dtype=torch.int8), torch.zeros(values, dtype=torch.int8), *given)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(KernelError, match="float32, bfloat16 or int8"):
            cpu_kernels().move_rows([LayerKV.zeros(2, 1, 8, 4, dtype)], torch.zeros(1).int(), torch.ones(1).int())
