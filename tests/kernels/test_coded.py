"""Matrices of codes: the product is that of the float32 matrix they stand for, to the bit, on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.cases import ISAS, kernels_named
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.coded import CodedMatrix, fit, stacked
from forerun.kernels.ops import Kernels

SHAPES = [(40, 300), (16, 128), (5, 64), (150, 512)]
KINDS = ("float8", "float8 bytes", "table", "table counted")


def coded_matrix(kind: str, rows: int, columns: int, group_size: int = 32) -> CodedMatrix:
    """Random codes but NaN; counted: scales are bytes with as many groups to a unit as fit."""
    groups = -(-columns // group_size)
    codes = torch.randint(0, 16 if "table" in kind else 127, (rows, columns)).byte()
    values = torch.randn(16) if "table" in kind else None
    if values is None:
        codes |= torch.randint(0, 2, (rows, columns)).byte() << 7
    if kind in ("float8", "table"):
        return CodedMatrix(codes, torch.rand(rows, groups) + 0.5, group_size, values)
    scales, scale_values = torch.randint(0, 256, (rows, groups)).byte(), torch.rand(256)
    if kind == "float8 bytes":
        return CodedMatrix(codes, scales, group_size, None, scale_values)
    num_units = groups // math.gcd(groups, 2)
    units, shifts = torch.rand(rows, num_units), torch.rand(rows)
    return CodedMatrix(codes, scales, group_size, values, scale_values, units, shifts)


def products(kernels: Kernels, matrix: CodedMatrix, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """With the codes, and with the floats they stand for."""
    dense = kernels.pack_linear(matrix.dequantize())
    return kernels.linear(x, kernels.pack_coded(matrix), bias), kernels.linear(x, dense, bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_those_of_the_floats(rows: int, columns: int, kind: str, isa: str) -> None:
    torch.manual_seed(rows)
    kernels, matrix = kernels_named(isa), coded_matrix(kind, rows, columns)
    for num_rows in (*range(1, 10), 29, 100):
        found, expected = products(kernels, matrix, torch.randn(num_rows, columns), torch.randn(rows))
        assert torch.equal(found, expected), num_rows


@pytest.mark.parametrize("group_size", [2, 64, 100, 300])
def test_group_sizes(group_size: int) -> None:
    torch.manual_seed(0)
    for kind in KINDS:
        matrix = coded_matrix(kind, 20, 300, group_size)
        assert torch.equal(*products(kernels_named(ISAS[0]), matrix, torch.randn(3, 300)))


def test_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(0)
    kernels, x = kernels_named(ISAS[0]), torch.randn(40, 300)
    packed = kernels.pack_coded(coded_matrix("float8", 70, 300))
    together, order = kernels.linear(x, packed), torch.randperm(40)
    assert torch.equal(kernels.linear(x[order].contiguous(), packed), together[order])
    alone = [kernels.linear(x[row : row + 1], packed) for row in range(40)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("isa", ISAS)
def test_every_float_of_8_bits(isa: str) -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    matrix = CodedMatrix(codes[:, None].repeat(1, 2), torch.ones(len(codes), 1), 2)
    found, expected = products(kernels_named(isa), matrix, torch.tensor([[1.0, 0.0]]))
    assert torch.equal(found, expected) and torch.equal(found[0], codes.view(torch.float8_e4m3fn).float() + 0)


def test_bytes_held() -> None:
    kernels = kernels_named(ISAS[0])
    assert kernels.pack_coded(coded_matrix("float8", 64, 2048, 128)).nbytes <= 1.05 * 64 * 2048
    assert kernels.pack_coded(coded_matrix("table", 64, 2048, 64)).nbytes == 64 * 2048 * 4.5 / 8


def test_experts_take_codes() -> None:
    torch.manual_seed(0)
    kernels, x, chosen = kernels_named(ISAS[0]), torch.randn(5, 64), torch.rand(5, 2)
    up, down = ([coded_matrix("float8", *shape) for _ in range(2)] for shape in ((96, 64), (64, 48)))
    coded = kernels.pack_experts([kernels.pack_coded(m) for m in up], [kernels.pack_coded(m) for m in down], "silu")
    dense = kernels.pack_experts(
        [kernels.pack_linear(m.dequantize()) for m in up], [kernels.pack_linear(m.dequantize()) for m in down], "silu"
    )
    assert torch.equal(kernels.experts(x, chosen, coded), kernels.experts(x, chosen, dense))


def test_an_embedding_of_codes_is_refused() -> None:
    kernels = kernels_named(ISAS[0])
    with pytest.raises(KernelError, match="embedding table"):
        kernels.embedding(torch.tensor([0]), kernels.pack_coded(coded_matrix("float8", 16, 64)))


def test_matrices_that_fit_are_stacked() -> None:
    one = coded_matrix("table counted", 20, 64)
    assert torch.equal(stacked([one, one]).dequantize(), torch.cat([one.dequantize()] * 2))
    assert fit(one, one) and not fit(one, coded_matrix("table counted", 20, 64))  # other values
    assert not fit(one, coded_matrix("float8", 20, 64))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scales": torch.ones(4, 3)}, r"scales are .* \[4, 3\], not .* \[4, 2\]"),
        ({"scales": torch.ones(4, 2).double()}, "scales are torch.float64"),
        ({"codes": torch.zeros(4, 64)}, "codes are torch.float32"),
        ({"values": torch.zeros(8)}, "values are"),
        ({"units": torch.ones(4, 1)}, "units need scales that are bytes"),
    ],
)
def test_tensors_of_other_shapes_are_refused(change: dict[str, Tensor], said: str) -> None:
    given = {"codes": torch.zeros(4, 64).byte(), "scales": torch.ones(4, 2), "group_size": 32}
    with pytest.raises(KernelError, match=said):
        CodedMatrix(**{**given, **change})  # type: ignore[arg-type]


def test_pairs_of_codes_need_even_groups() -> None:
    with pytest.raises(KernelError, match="lie in pairs"):
        CodedMatrix(torch.zeros(4, 6).byte(), torch.ones(4, 2), 3, torch.zeros(16))
