"""Grouped matrices: the reference's numbers, exact where they can be, the same bits for a row in any company."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tests.kernels.cases import BYTE_ISAS, cpu_kernels, kernels_named
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.grouped import GroupedMatrix, PointGrid, quantize_row, steps_of
from forerun.kernels.ops import Kernels
from forerun.kernels.select import recording, select_kernels
from forerun.models.batch import ForwardBatch, SequenceRows

BITS = (2, 3, 4, 5, 6, 7, 8)
GROUP_SIZES = (16, 32, 48, 64, 128, 192, 256)


@dataclass(frozen=True)
class Case:
    """How a random matrix is made."""

    num_outputs: int = 37
    num_inputs: int = 272
    bits: int = 4
    group_size: int = 32
    offsets: bool = False
    order: bool = False
    half: bool = True
    groups_a_unit: int = 1  # more: scales are whole numbers below `most`
    most: int = 64
    tabled: bool = False  # codes of 4 bits
    run: int = 0  # of the points of a grid
    signs: int = 0

    def matrix(self, seed: int = 0) -> GroupedMatrix:
        """Codes of every value, scales that float16 can hold or not."""
        generator = torch.Generator().manual_seed(seed)
        n, k = self.num_outputs, self.num_inputs
        num_groups = -(-k // self.group_size)

        def numbers(size: float) -> Tensor:
            values = (torch.rand(n, num_groups, generator=generator) + 0.1) * size
            return values.half().float() if self.half else values

        codes = torch.randint(0, 1 << self.bits, (n, k), generator=generator, dtype=torch.uint8)
        codes[0, 0] = (1 << self.bits) - 1
        zero = int(torch.randint(0, 1 << self.bits, (), generator=generator))
        offsets = numbers(0.05) if self.offsets else None
        order = torch.randperm(k, generator=generator) if self.order else None
        table = torch.randint(0, 256, (16,), generator=generator, dtype=torch.uint8) if self.tabled else None
        plain = GroupedMatrix(codes, numbers(0.01), self.bits, zero, self.group_size, offsets, order, table=table)
        plain = plain if self.groups_a_unit == 1 else self._counting(plain, generator)
        return self._on_grid(plain, generator) if self.run else plain

    def _on_grid(self, matrix: GroupedMatrix, generator: torch.Generator) -> GroupedMatrix:
        """Codes of random points, the last ones too, with signs; scales that count are odd."""
        rows, columns = matrix.shape
        count = {32: 200, 64: 400}.get(self.group_size, 600)
        values = torch.randint(0, 32 // self.run, (count, self.run), generator=generator, dtype=torch.uint8)
        grid = PointGrid(values, self.signs)
        points = torch.randint(0, count, (rows, columns // self.run), generator=generator, dtype=torch.int16)
        signs = torch.randint(0, 2, (rows, columns // 8, 8), generator=generator, dtype=torch.uint8)
        signs[:, :, self.signs :] = signs[:, :, : self.signs].sum(dim=2, keepdim=True) % 2
        codes = grid.points[points.int()].view(rows, columns) | signs.view(rows, columns) << 3
        scales = matrix.scales if matrix.units is None else (matrix.scales & 15) * 2 + 1
        return replace(matrix, codes=codes, points=points, grid=grid, scales=scales, unit_scale=0.125)

    def _counting(self, matrix: GroupedMatrix, generator: torch.Generator) -> GroupedMatrix:
        """The same codes with scales and offsets that count units; scales below 0 too, unless a byte holds both."""
        shape, small = matrix.scales.shape, self.offsets and self.most <= 16

        def counts() -> Tensor:
            return torch.randint(0 if small else -self.most, self.most, shape, generator=generator, dtype=torch.int8)

        def units() -> Tensor:
            return (torch.randn(shape[0], shape[1] // self.groups_a_unit, generator=generator) / 500).half()

        offsets, offset_units = (counts(), units()) if self.offsets else (None, None)
        return replace(matrix, scales=counts(), offsets=offsets, units=units(), offset_units=offset_units)


COUNTING_CASES = [
    Case(bits=4, group_size=32, num_inputs=512, offsets=True, groups_a_unit=8),
    Case(bits=5, group_size=32, num_inputs=512, offsets=True, groups_a_unit=8),
    Case(bits=6, group_size=16, num_inputs=768, groups_a_unit=16, most=127),
    Case(bits=3, group_size=16, num_inputs=256, groups_a_unit=16, most=32),
    Case(bits=2, group_size=16, num_inputs=512, offsets=True, groups_a_unit=16, most=16),
    Case(bits=4, group_size=32, num_inputs=512, groups_a_unit=8, tabled=True),
    Case(bits=4, group_size=32, num_inputs=480, tabled=True),
    Case(bits=4, group_size=16, num_inputs=640, groups_a_unit=4, tabled=True, run=8, signs=7),
    Case(bits=4, group_size=32, num_inputs=1152, groups_a_unit=2, tabled=True, run=4, signs=8, order=True),
    Case(bits=4, group_size=64, num_inputs=384, tabled=True, run=8, signs=8),
    Case(bits=4, group_size=32, num_inputs=256, tabled=True, run=8, signs=1),
    Case(bits=4, group_size=32, num_inputs=480, groups_a_unit=5, tabled=True, run=4, signs=7),  # no whole stretches
    Case(bits=2, group_size=128, num_inputs=640, offsets=True, run=8),
    Case(bits=7, group_size=48, num_inputs=288, offsets=True, groups_a_unit=3, order=True),
    Case(bits=6, group_size=192, num_inputs=768, offsets=True, groups_a_unit=2),
]


# Sizes that the kernels for tiles of bytes take, given rows enough.
TILE_CASES = [
    Case(bits=bits, group_size=size, num_inputs=416 if size == 32 else 448, offsets=bits % 2 == 0, order=bits == 5)
    for bits, size in ((4, 32), (8, 128), (2, 32), (3, 64), (5, 192), (6, 448), (4, 256), (8, 32))
]


def _run(kernels: Kernels, matrix: GroupedMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return kernels.linear(x, kernels.pack_grouped(matrix), bias)


def _cases() -> list[Case]:
    """Every width with every group size, half of them with offsets, a permutation, float32 scales."""
    cases = [Case(bits=bits, group_size=size) for bits in BITS for size in GROUP_SIZES]
    cases += [Case(bits=bits, group_size=size, num_inputs=size) for bits in (3, 4, 8) for size in (1, 7, 100, 200, 272)]
    cases = [replace(case, offsets=i % 2 == 0, order=i % 3 == 0, half=i % 5 != 0) for i, case in enumerate(cases)]
    return cases + COUNTING_CASES


@pytest.mark.parametrize("isa", BYTE_ISAS)
def test_agrees_with_the_reference(isa: str) -> None:
    kernels, reference = cpu_kernels(isa), kernels_named("reference")
    generator = torch.Generator().manual_seed(1)
    for case in _cases():
        matrix = case.matrix()
        x, bias = torch.randn(3, case.num_inputs, generator=generator), torch.randn(37, generator=generator)
        expected = _run(reference, matrix, x, bias)
        allowed = 1e-6 * float(expected.abs().max() + matrix.dequantize().abs().max())
        assert float((_run(kernels, matrix, x, bias) - expected).abs().max()) <= allowed, case


@pytest.mark.parametrize("isa", BYTE_ISAS)
def test_counted_scales_and_looked_up_codes_have_the_bits_of_plain_ones(isa: str) -> None:
    kernels = cpu_kernels(isa)
    for case in COUNTING_CASES:
        matrix = case.matrix()
        assert torch.equal(matrix.dequantize(), matrix.plain().dequantize())
        for num_rows in (1, 5, 14, 33):
            x = torch.randn(num_rows, case.num_inputs)
            assert torch.equal(_run(kernels, matrix, x), _run(kernels, matrix.plain(), x)), case


def test_rows_read_back_are_what_the_matrix_stands_for() -> None:
    kernels, reference, ids = cpu_kernels(), kernels_named("reference"), torch.tensor([5, 0, 36, 5])
    for case in _cases():
        matrix = case.matrix()
        expected = matrix.dequantize()[ids]
        assert torch.equal(kernels.embedding(ids, kernels.pack_grouped(matrix)), expected), case
        assert torch.equal(reference.embedding(ids, reference.pack_grouped(matrix)), expected), case
    with pytest.raises(IndexError, match="37"):
        kernels.embedding(torch.tensor([37]), kernels.pack_grouped(Case().matrix()))


@pytest.mark.parametrize("isa", BYTE_ISAS)
def test_whole_numbers_are_exact(isa: str) -> None:
    """With 127 as the largest activation of each step the 8-bit activations are the activations."""
    kernels = cpu_kernels(isa)
    for bits in BITS:
        for group_size in (16, 32, 48, 128, 192, 300):
            matrix = Case(bits=bits, group_size=group_size, num_inputs=300, order=bits % 2 == 0).matrix()
            matrix = replace(matrix, scales=torch.ones_like(matrix.scales))
            x = torch.randint(-127, 128, (6, 300)).float()
            for step in steps_of(300, group_size):
                x[:, step.start] = 127.0
            if matrix.input_order is not None:
                x = x[:, matrix.input_order.argsort()]
            assert torch.equal(_run(kernels, matrix, x), x @ matrix.dequantize().T)


@pytest.mark.parametrize("isa", BYTE_ISAS)
def test_the_largest_sums_do_not_overflow(isa: str) -> None:
    for bits in BITS:
        for code, zero in (((1 << bits) - 1, 0), (0, (1 << bits) - 1), ((1 << bits) - 1, 1 << (bits - 1))):
            codes = torch.full((20, 256), code, dtype=torch.uint8)
            matrix = GroupedMatrix(codes, torch.ones(20, 1), bits, zero, 256)
            signs = torch.tensor([1.0, -1.0]).repeat(10)[:, None]
            x = (signs * 127).expand(20, 256).contiguous()
            expected = signs.expand(20, 20) * (code - zero) * 127 * 256
            assert torch.equal(_run(cpu_kernels(isa), matrix, x), expected)


def test_differs_from_the_dense_product_only_by_rounding_activations() -> None:
    kernels = cpu_kernels()
    for case in _cases():
        matrix = case.matrix()
        x = torch.randn(4, case.num_inputs)
        dense = matrix.dequantize()  # [N, K]
        permuted = x if matrix.input_order is None else x[:, matrix.input_order]
        steps = steps_of(case.num_inputs, case.group_size)
        scales = torch.stack([quantize_row(row, steps)[1] for row in permuted])  # [M, activation groups]
        half_steps = torch.empty_like(x)
        for step in steps:
            half_steps[:, step.start : step.end] = scales[:, step.activation_group, None] * 0.501
        if matrix.input_order is not None:
            half_steps = half_steps[:, matrix.input_order.argsort()]
        allowed = half_steps @ dense.abs().T + 1e-5 * (x.abs() @ dense.abs().T)
        assert bool(((_run(kernels, matrix, x) - x @ dense.T).abs() <= allowed).all()), case


@pytest.mark.parametrize("isa", BYTE_ISAS)
def test_every_instruction_set_and_thread_count_gives_the_same_bits(isa: str) -> None:
    for case in (*_cases()[::3], *COUNTING_CASES, *TILE_CASES):
        case = replace(case, num_outputs=333)
        matrix = case.matrix()
        for num_rows in (1, 5, 14) if case not in TILE_CASES else (5, 9, 14, 33, 101):
            x, bias = torch.randn(num_rows, case.num_inputs), torch.randn(333)
            expected = _run(cpu_kernels("portable", 1), matrix, x, bias)
            for threads in (1, 2):
                assert torch.equal(_run(cpu_kernels(isa, threads), matrix, x, bias), expected), case


@pytest.mark.parametrize("isa", BYTE_ISAS)
def test_rows_cut_into_sections_have_the_same_bits(isa: str) -> None:
    """A row alone and one of many are quantized as a whole, those of a few rows in pieces that threads share."""
    kernels = kernels_named(isa)
    for bits, group_size in ((4, 16), (4, 32), (5, 48), (8, 128), (4, 192), (3, 288), (8, 1400)):
        k = 1408 if group_size in (32, 128) else 1400  # what tiles take, and what leaves a rest
        case = Case(40, k, bits, group_size, offsets=bits < 8, order=bits == 5)
        packed, x = kernels.pack_grouped(case.matrix()), torch.randn(70, k)
        alone = torch.cat([kernels.linear(row[None].clone(), packed, None) for row in x])
        for num_rows in (2, 13, 64, 65, 70):
            assert torch.equal(kernels.linear(x[:num_rows].clone(), packed, None), alone[:num_rows]), (case, num_rows)


@pytest.mark.parametrize("isa", (*BYTE_ISAS[:-1], "reference"))
def test_a_row_has_the_same_bits_in_every_batch(isa: str) -> None:
    kernels = kernels_named(isa)
    cases = (Case(bits=4), Case(bits=8, group_size=128, offsets=True), Case(bits=6, group_size=16, order=True))
    for case in (*cases, *TILE_CASES[:2], *COUNTING_CASES[::2]):
        packed = kernels.pack_grouped(replace(case, num_outputs=100).matrix())
        x, bias = torch.randn(52, case.num_inputs), torch.randn(100)
        alone = torch.cat([kernels.linear(row[None].clone(), packed, bias) for row in x])
        for num_rows in (*range(1, 18), 24, 31, 32, 33, 47, 48, 49, 52) if isa != "reference" else (2, 14, 52):
            order = torch.randperm(52)[:num_rows]
            assert torch.equal(kernels.linear(x[order], packed, bias), alone[order])


def test_row_blocks_of_a_long_prefill_change_nothing() -> None:
    kernels = cpu_kernels()
    packed = kernels.pack_grouped(Case(num_outputs=70, num_inputs=6000, group_size=128).matrix())
    x = torch.randn(150, 6000)
    assert torch.equal(kernels.linear(x, packed), torch.cat([kernels.linear(p.clone(), packed) for p in x.split(37)]))


@pytest.mark.parametrize("isa", ("reference", *BYTE_ISAS))
def test_what_is_not_finite_stays_in_its_row(isa: str) -> None:
    kernels = kernels_named(isa)
    for case in (Case(), Case(bits=8, group_size=16, offsets=True)):
        packed = kernels.pack_grouped(case.matrix())
        x = torch.randn(5, case.num_inputs)
        clean = kernels.linear(x, packed)
        x[1, 3], x[2, 5], x[3, -1] = torch.nan, torch.inf, -torch.inf
        dirty = kernels.linear(x, packed)
        assert torch.equal(dirty[[0, 4]], clean[[0, 4]])
        assert dirty[1:4].isnan().all()


@pytest.mark.parametrize("isa", ("reference", *BYTE_ISAS))
@pytest.mark.parametrize("size", (0.0, 1e-45, 1e-38, 1e38))
def test_tiny_and_huge_activations(isa: str, size: float) -> None:
    kernels = kernels_named(isa)
    x = torch.randn(2, 272).clamp(-3, 3) * size
    x[:, ::2] = 0
    result = _run(kernels, replace(Case().matrix(), scales=torch.full((37, 9), 2.0**-24)), x)
    assert result.isfinite().all()
    assert bool(result.any()) == (size > 1e-38)


def test_storage_is_the_smallest_that_holds_every_code() -> None:
    kernels = cpu_kernels()
    sizes = {bits: kernels.pack_grouped(Case(64, 1024, bits).matrix()).nbytes for bits in BITS}
    scale_bytes = 64 * (1024 // 32) * 2
    assert sizes == {bits: 64 * 1024 * (8 if bits == 7 else bits) // 8 + scale_bytes for bits in BITS}
    assert kernels.pack_grouped(Case(64, 1024, 4, half=False).matrix()).nbytes == sizes[4] + scale_bytes
    assert kernels.pack_grouped(Case(64, 1024, 4, offsets=True).matrix()).nbytes == sizes[4] + scale_bytes
    assert kernels.pack_grouped(replace(Case(64, 1024, 3).matrix(), bits=8)).nbytes == sizes[3]
    assert kernels.pack_grouped(Case(5, 20).matrix()).shape == (5, 20)


def test_wrong_matrices_and_tensors_are_refused() -> None:
    kernels, matrix = cpu_kernels(), Case().matrix()
    with pytest.raises(KernelError, match="columns"):
        kernels.linear(torch.randn(2, 5), kernels.pack_grouped(matrix))
    with pytest.raises(KernelError, match="contiguous"):
        kernels.linear(torch.randn(272, 2).T, kernels.pack_grouped(matrix))
    for order in (torch.zeros(272, dtype=torch.int64), torch.arange(272).int(), torch.arange(271)):
        with pytest.raises(KernelError, match="permutation"):
            kernels.pack_grouped(replace(matrix, input_order=order))
    with pytest.raises(KernelError, match="uint8"):
        kernels.pack_grouped(replace(matrix, codes=matrix.codes.int()))
    on_grid = Case(bits=4, num_inputs=320, tabled=True, run=8, signs=8).matrix()
    assert on_grid.points is not None
    assert on_grid.grid is not None
    with pytest.raises(KernelError, match="below 4"):
        kernels.pack_grouped(replace(on_grid, grid=replace(on_grid.grid, points=on_grid.grid.points + 1)))
    few, many = on_grid.grid.points[:128], on_grid.grid.points.repeat(200, 1)
    for grid_points in (few, many):
        with pytest.raises(KernelError, match="129 to 32768 points"):
            kernels.pack_grouped(replace(on_grid, grid=replace(on_grid.grid, points=grid_points)))
    for points in (None, on_grid.points[:, 1:], on_grid.points.int(), on_grid.points + 600, on_grid.points - 600):
        with pytest.raises(KernelError, match="points"):
            kernels.pack_grouped(replace(on_grid, points=points))
    with pytest.raises(KernelError, match="packed by"):
        kernels.linear(torch.randn(2, 272), kernels_named("reference").pack_grouped(matrix))


def test_no_rows_give_no_rows() -> None:
    assert _run(cpu_kernels(), Case().matrix(), torch.empty(0, 272)).shape == (0, 37)


@pytest.mark.parametrize("grouped_table", [False, True])
def test_a_recorded_product_is_the_eager_one(grouped_table: bool) -> None:
    pytest.importorskip("forerun.kernels.cpu.program")
    kernels = select_kernels("cpu", threads=2)
    table = kernels.pack_grouped(Case(50).matrix()) if grouped_table else torch.randn(50, 272)
    bias = torch.randn(272)
    packed = [kernels.pack_grouped(Case(272, 272, bits, order=bits == 8).matrix(bits)) for bits in (4, 8)]

    def forward(ids: Tensor) -> Tensor:
        x = kernels.embedding(ids, table)
        return kernels.linear(kernels.linear(x, packed[0], bias), packed[1])

    with recording(kernels, 20) as recorder:
        assert recorder is not None
        program = recorder.finish([forward(recorder.inputs.token_ids)])
    for num_rows in (1, 3, 13, 20):
        ids = torch.randint(0, 50, (num_rows,))
        batch = ForwardBatch.build([SequenceRows("", [0, 1], 0, ids.tolist(), num_rows, span_logits=True)], 16)
        assert torch.equal(program.run(batch)[0], forward(ids))
