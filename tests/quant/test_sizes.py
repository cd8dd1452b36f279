"""What a weight takes in memory is what docs/quantization.md says, and at most 5 % more than in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.kernels.grouped import GroupedMatrix
from forerun.quant.gguf_decode import BLOCK_TYPES, decode_rows
from forerun.quant.sizes import quantized_growth
from forerun.weights.checkpoint import FLOAT_DTYPES, Checkpoint
from tests.kernels.cases import cpu_kernels
from tests.quant.test_gguf_blocks import valid_blocks
from tests.quant.test_tools import FIXTURES, modules, weight_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantization.md"
ROWS, COLUMNS = 64, 2048


def table() -> dict[str, tuple[float, float, float]]:
    """Bits a weight in a file, on CPUs and on GPUs."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text("utf-8").splitlines()]
    return {row[0]: (float(row[1]), float(row[2]), float(row[3])) for row in rows if row[0] in BLOCK_TYPES}


def matrix(name: str) -> GroupedMatrix:
    """Random blocks of one type."""
    rows = valid_blocks(name, shape=(ROWS, COLUMNS))
    if name == "NVFP4":
        rows.view(-1, 36)[:, :4] &= 127  # files have no signs there
    return decode_rows(name, rows)


def test_the_table_has_every_type() -> None:
    assert list(table()) == list(BLOCK_TYPES)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_files_and_cpus(name: str) -> None:
    in_file, on_cpu, _ = table()[name]
    kind = BLOCK_TYPES[name]
    assert in_file == pytest.approx(8 * kind.nbytes / kind.size, abs=0.001)
    found = 8 * cpu_kernels().pack_grouped(matrix(name)).nbytes / (ROWS * COLUMNS)
    assert on_cpu == pytest.approx(found, abs=0.001)
    assert on_cpu <= 1.05 * in_file


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_gpus(name: str) -> None:
    pytest.importorskip("triton")
    from forerun.kernels.triton.grouped_layout import pack_grouped

    in_file, _, on_gpu = table()[name]
    packed = pack_grouped(matrix(name), torch.device("cpu"))
    assert on_gpu == pytest.approx(8 * packed.nbytes / (ROWS * COLUMNS), abs=0.001)
    assert on_gpu <= 1.05 * in_file


def test_zero_points_that_differ_and_their_scales() -> None:
    """What headers tell of AWQ: 4 bytes for each, 4.5 bits a weight in groups of 128."""
    source, matrices = Checkpoint.open(FIXTURES / "auto-round-awq"), modules("auto-round-awq")
    own = tuple(f"{module}." for module in matrices)
    told = 0.0
    for name, kind, nbytes in source.stored():
        if name.startswith(own):
            itemsize = FLOAT_DTYPES[kind].itemsize if kind in FLOAT_DTYPES else 1
            growth = quantized_growth(name, kind, itemsize, 4, is_symmetric=False, as_floats=False)
            assert growth is not None
            told += nbytes * growth
    assert told == 4.5 / 8 * sum(rows * columns for rows, columns in matrices.values())
    assert told == pytest.approx(sum(weight_of(source, *each).nbytes for each in matrices.items()), rel=0.03)
