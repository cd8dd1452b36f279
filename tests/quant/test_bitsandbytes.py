"""bitsandbytes modules packed by hand, beside those of the tool itself (test_tools.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, Weight
from forerun.quant.formats import check_quantization, check_tensors, find_format
from tests.kernels.cases import cpu_kernels
from tests.quant import stored
from tests.quant.stored import Stored

SECTION = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def four_bits(rows: int, columns: int, nested: int | None = None, blocksize: int = 64) -> Stored:
    """A random module; `nested` scales share a scale of theirs, counted row after row."""
    codes, values = torch.randint(0, 16, (rows, columns)), torch.randn(16)
    count = rows * columns // blocksize
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors = {"weight": (codes[:, 0::2] << 4 | codes[:, 1::2]).byte().view(-1, 1), "weight.quant_map": values}
    scales = torch.rand(count) + 0.1
    if nested is None:
        tensors["weight.absmax"] = scales
    else:
        of, table, offset = torch.randint(0, 256, (count,)), torch.rand(256), 0.25
        units = torch.rand(-(-count // nested)) + 0.1
        scales = table[of] * units[torch.arange(count) // nested] + offset
        state |= {"nested_blocksize": nested, "nested_offset": offset, "nested_dtype": "float32"}
        tensors |= {"weight.absmax": of.byte(), "weight.nested_absmax": units, "weight.nested_quant_map": table}
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    matrix = values[codes] * scales.view(rows, -1).repeat_interleave(blocksize, 1)
    return Stored(tensors, matrix.double())


def int8(rows: int, columns: int) -> Stored:
    codes, scales = torch.randint(-127, 128, (rows, columns)), torch.rand(rows) * 0.1
    tensors = {"weight": codes.to(torch.int8), "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Stored(tensors, codes * scales.double()[:, None] / 127)


def read(folder: Path, modules: dict[str, Stored], kernels: Kernels) -> Weight:
    source = stored.open_source(folder, modules, SECTION)
    check_tensors(source)
    form = find_format(source, "a")
    assert form is not None
    rows = [RowPart(name, module.matrix.shape[0]) for name, module in modules.items()]
    return form.read(source, rows, modules["a"].matrix.shape[1], kernels, None)


@pytest.mark.parametrize(("columns", "nested"), [(192, None), (192, 4), (256, 2), (128, 256), (320, 256)])
def test_matrices_come_back(columns: int, nested: int | None, tmp_path: Path) -> None:
    module = four_bits(24, columns, nested)
    found = read(tmp_path, {"a": module}, cpu_kernels()).dequantize()
    assert torch.equal(found.double(), module.matrix)


def test_modules_of_other_tables_are_joined(tmp_path: Path) -> None:
    modules = {"a": four_bits(24, 192), "b": four_bits(8, 192)}
    found = read(tmp_path, modules, cpu_kernels()).dequantize()
    assert torch.equal(found.double(), torch.cat([module.matrix for module in modules.values()]))


def test_integers_of_8_bits(tmp_path: Path) -> None:
    stored.check(tmp_path, {"m": int8(24, 96)}, {**SECTION, "load_in_8bit": True})


@pytest.mark.parametrize(("columns", "nested"), [(2048, None), (2048, 256), (2560, 256), (11008, 256)])
def test_bytes_are_the_files(columns: int, nested: int | None, tmp_path: Path) -> None:
    module = four_bits(32, columns, nested)
    stored_bytes = sum(tensor.nbytes for key, tensor in module.tensors.items() if "map" not in key and key != STATE)
    assert read(tmp_path, {"a": module}, cpu_kernels()).nbytes <= 1.05 * stored_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight.absmax": None}, "no tensor a.weight.absmax"),
        ({"weight.quant_map": torch.zeros(8)}, r"a.weight.quant_map has shape \[8\], \[16\] is needed"),
        ({"weight.nested_absmax": torch.zeros(2)}, r"a.weight.nested_absmax has shape \[2\]"),
        ({STATE: torch.zeros(3, dtype=torch.uint8)}, "is not JSON"),
    ],
)
def test_damage_is_named(change: dict[str, Tensor | None], said: str, tmp_path: Path) -> None:
    module = four_bits(24, 192, 256)
    tensors = {key: tensor for key, tensor in {**module.tensors, **change}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path, {"a": module._replace(tensors=tensors)}, cpu_kernels())


def test_missing_scales_of_integers(tmp_path: Path) -> None:
    module = int8(24, 96)
    del module.tensors["SCB"]
    with pytest.raises(CheckpointError, match="no tensor a.SCB"):
        read(tmp_path, {"a": module}, cpu_kernels())


def test_rows_that_share_scales_are_refused(tmp_path: Path) -> None:
    module = four_bits(16, 96, blocksize=32)
    state = json.loads(bytes(module.tensors[STATE].tolist())) | {"blocksize": 64}
    module.tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="rows share scales"):
        read(tmp_path, {"a": module}, cpu_kernels())


def test_other_types_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="bnb_4bit_quant_type is 'nf3'"):
        check_quantization({**SECTION, "bnb_4bit_quant_type": "nf3"})
