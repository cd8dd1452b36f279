"""Grouped matrices in Triton: the very bits the specification gives, in every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.cases import kernels_named
from tests.kernels.test_grouped import COUNTING_CASES, Case
from tests.quant.test_gguf_blocks import valid_blocks
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.grouped import GroupedMatrix
from forerun.quant.gguf_decode import BLOCK_TYPES, decode_rows

LAYOUTS = [  # an interpreted kernel costs by its programs: one of 16 outputs unless more are the point
    Case(num_outputs=17, num_inputs=300, group_size=128, offsets=True, order=True),  # a last group that is short
    Case(num_outputs=16, num_inputs=144, group_size=32),  # an odd number of blocks
    Case(num_outputs=16, bits=2, num_inputs=112, group_size=16),  # two groups a block, the last one alone
    Case(num_outputs=16, bits=6, num_inputs=128, group_size=16, offsets=True, half=False),
    Case(num_outputs=16, bits=3, num_inputs=192, group_size=48, order=True),
    Case(num_outputs=16, bits=8, num_inputs=264, group_size=264),  # whole rows, in three steps
    Case(num_outputs=5, bits=8, num_inputs=7, group_size=7, offsets=True),
    Case(num_outputs=16, bits=5, num_inputs=128, group_size=64),
    Case(num_outputs=16, bits=7, num_inputs=100, group_size=100, half=False),
]
COUNTING = [replace(case, num_outputs=16) for case in COUNTING_CASES]


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal numbers, NaN where NaN is."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(0), expected.nan_to_num(0))


def linear(kernels: Any, x: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor:
    return kernels.linear(x.to(kernels.device), packed, None if bias is None else bias.to(kernels.device)).cpu()


@pytest.mark.parametrize("case", [*LAYOUTS, *COUNTING], ids=lambda case: f"{case.bits}-{case.group_size}")
def test_gives_the_bits_of_the_specification(kernels: Any, case: Case) -> None:
    torch.manual_seed(case.bits)
    matrix, reference = case.matrix(), kernels_named("reference")
    x, bias = torch.randn(5, case.num_inputs) * torch.rand(5, 1).exp2(), torch.randn(case.num_outputs)
    x[1] = 0.0
    x[2] *= 1e-42  # the inverse of the scale is not finite
    x[3, 2], x[4, 1] = torch.nan, -torch.inf
    packed = kernels.pack_grouped(matrix)
    found = linear(kernels, x, packed, bias)
    assert packed.shape == matrix.shape
    assert same(found, reference.linear(x, reference.pack_grouped(matrix), bias))
    assert found[3:].isnan().all() and not found[:3].isnan().any()


@pytest.mark.parametrize("case", LAYOUTS[::2], ids=lambda case: f"{case.bits}-{case.group_size}")
def test_rows_read_back_are_what_the_matrix_stands_for(kernels: Any, case: Case) -> None:
    matrix, ids = case.matrix(), torch.tensor([3, 0, case.num_outputs - 1, 3, case.num_outputs, -1])
    found = kernels.embedding(ids, kernels.pack_grouped(matrix)).cpu()
    assert torch.equal(found[:4], matrix.dequantize()[ids[:4]]) and found[4:].isnan().all()
    assert kernels.embedding(ids[:0], kernels.pack_grouped(matrix)).shape == (0, case.num_inputs)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_type_of_file_is_read_as_it_is_stored(kernels: Any, name: str) -> None:
    """Codes, points, signs and scales of every value, in products and as rows."""
    matrix, reference = decode_rows(name, valid_blocks(name, shape=(16, 256))), kernels_named("reference")
    packed, x = kernels.pack_grouped(matrix), torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    assert torch.equal(kernels.embedding(torch.arange(16), packed).cpu(), matrix.dequantize())
    assert same(linear(kernels, x, packed), reference.linear(x, reference.pack_grouped(matrix)))


def test_every_scale_of_a_byte_is_the_one_it_stands_for(kernels: Any) -> None:
    for name, num, scales in (("MXFP4", 256, 1), ("NVFP4", 128, 4)):
        kind = BLOCK_TYPES[name]
        rows = torch.randint(0, 256, (num, kind.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
        rows[:, :scales] = torch.arange(num)[:, None]
        matrix = decode_rows(name, rows)
        packed = kernels.pack_grouped(matrix)
        assert packed.layout.scales in ("powers", "float8")
        assert torch.equal(kernels.embedding(torch.arange(num), packed).cpu(), matrix.dequantize())


@pytest.mark.parametrize("case", LAYOUTS[0:3:2], ids=lambda case: f"{case.bits}-{case.group_size}")
def test_a_row_has_the_same_bits_in_every_batch(kernels: Any, case: Case) -> None:
    packed, x = kernels.pack_grouped(case.matrix()), torch.randn(66, case.num_inputs)
    alone = torch.cat([linear(kernels, row[None].clone(), packed) for row in x[:3]])
    for num_rows in (17, 66):  # a wider tile, and two programs
        order = torch.randperm(num_rows)
        assert torch.equal(linear(kernels, x[:num_rows][order], packed)[order.argsort()][:3], alone)


def test_codes_take_their_own_bits(kernels: Any) -> None:
    for bits in range(2, 9):
        packed = kernels.pack_grouped(Case(64, 1024, bits, 128).matrix())
        assert packed.nbytes == 64 * 1024 * bits // 8 + 64 * (1024 // 128) * 2
        ordered = kernels.pack_grouped(Case(64, 1024, bits, 128, order=True).matrix())
        assert ordered.nbytes == packed.nbytes + 4 * 1024


def test_experts_of_zeros_are_stored_as_the_others() -> None:
    pytest.importorskip("triton")
    from forerun.kernels.triton.grouped_layout import pack_grouped

    for name in ("Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"):
        rows = valid_blocks(name, shape=(16, 512))
        if name == "NVFP4":
            rows = rows & 0x3F  # no scale byte of 127, which is no number of e4m3 and in no file
        layouts = [pack_grouped(decode_rows(name, part), torch.device("cpu")).layout for part in (rows, 0 * rows)]
        assert layouts[0] == layouts[1], name


def test_misfits_are_refused(kernels: Any) -> None:
    codes, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1)
    with pytest.raises(KernelError, match="permutation"):
        order = torch.zeros(32, dtype=torch.int64)
        kernels.pack_grouped(GroupedMatrix(codes, scales, 4, 8, 32, None, order))
    with pytest.raises(KernelError, match="uint8"):
        kernels.pack_grouped(GroupedMatrix(codes.int(), scales, 4, 8, 32))
    with pytest.raises(KernelError, match="empty"):
        kernels.pack_grouped(GroupedMatrix(codes[:0], scales[:0], 4, 8, 32))
