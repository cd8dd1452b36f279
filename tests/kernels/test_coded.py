"""Matrices of codes: the product is that of the float32 matrix they stand for, to the bit, on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.cases import ISAS, kernels_named, rms_error
from tests.kernels.test_grouped import COUNTING_CASES, TILE_CASES, Case
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.coded import CodedMatrix, fit, stacked
from forerun.kernels.ops import Kernels
from forerun.kernels.select import select_kernels

SHAPES = [(40, 300), (16, 128), (5, 64), (150, 512)]
KINDS = ("float8", "float8 bytes", "table", "table counted")
INTEGERS = [
    *COUNTING_CASES,
    *TILE_CASES,
    Case(bits=4, order=True, offsets=True, half=False),
    Case(bits=4, num_inputs=7, group_size=7),  # no pairs
    Case(bits=8, num_inputs=100, group_size=100, order=True),
]


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


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_of_codes(kind: str) -> None:
    kernels, matrix = kernels_named(ISAS[0]), coded_matrix(kind, 37, 300)
    ids = torch.tensor([36, 0, 17, 17])
    assert torch.equal(kernels.embedding(ids, kernels.pack_coded(matrix)), matrix.dequantize()[ids])


def float_kernels(name: str) -> Kernels:
    """Kernels that do not round activations."""
    chosen = name if name == "reference" else f"cpu:{kernels_named(name).describe()['linear']}"
    return select_kernels(chosen, activations="float32")


@pytest.mark.parametrize("isa", ISAS)
def test_integers_taken_as_floats(isa: str) -> None:
    torch.manual_seed(0)
    kernels = float_kernels(isa)
    for case in INTEGERS:
        matrix = case.matrix()
        dense, packed = matrix.dequantize(), kernels.pack_grouped(matrix)
        order = torch.arange(case.num_inputs) if matrix.input_order is None else matrix.input_order
        plain = kernels.pack_linear(dense[:, order].contiguous())
        for num_rows in (1, 5, 29, 100):
            x = torch.randn(num_rows, case.num_inputs)
            expected = kernels.linear(x[:, order].contiguous(), plain)
            assert torch.equal(kernels.linear(x, packed), expected), (case, num_rows)
        assert torch.equal(kernels.embedding(torch.arange(case.num_outputs), packed), dense), case


@pytest.mark.parametrize("name", [ISAS[0], "reference"])
def test_integers_taken_as_floats_are_off_by_what_torch_is(name: str) -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(8, 2048), Case(64, 2048, 4, 128, offsets=True, order=True).matrix()
    exact = x.double() @ matrix.dequantize().double().T
    usual = rms_error(x @ matrix.dequantize().T, exact)
    errors = [
        rms_error(kernels.linear(x, kernels.pack_grouped(matrix)), exact)
        for kernels in (float_kernels(name), kernels_named(name))
    ]
    assert errors[0] <= 2 * usual < errors[1] / 100


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
