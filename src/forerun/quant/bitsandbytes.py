"""bitsandbytes checkpoints: NF4 and FP4 with scales of scales or without, and LLM.int8.

Knows: `weight` (two codes a byte, the high half first, row after row), `weight.absmax`, `weight.quant_map`, the nested
ones, and the JSON of `weight.quant_state.bitsandbytes__nf4`; of LLM.int8 `weight` (int8) and `SCB`. Does not know:
LLM.int8's way with outliers: activations are rounded to 8-bit integers in groups, as for every matrix of integers here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.coded import NUM_SCALE_VALUES, NUM_VALUES, CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.floats import expect
from forerun.quant.joined import affine_matrix, join_rows
from forerun.quant.settings import REMEDY, Settings

METHOD = "bitsandbytes"
TYPES = ("nf4", "fp4")
ZERO = 128  # of an 8-bit integer kept without a sign


class BitsAndBytesFormat:
    """`PREFIX.weight` with `PREFIX.weight.absmax`, or with `PREFIX.SCB`."""

    name = METHOD

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the module is quantized and config.json says so."""
        if Settings.of(source.config).method != METHOD or not source.has(f"{prefix}.weight"):
            return False
        return _state_name(source, prefix) is not None or source.stored_as(f"{prefix}.weight") == "I8"

    def check(self, source: TensorSource, prefix: str) -> None:
        """See `CheckedFormat`."""
        if _state_name(source, prefix) is None:
            expect(source, f"{prefix}.SCB", (source.shape(f"{prefix}.weight")[0],))
        else:
            _FourBits(source, prefix).check()

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """See `WeightFormat`; dtype does not apply."""
        return join_rows(kernels, [_matrix(source, part, columns) for part in parts])


def check_bitsandbytes(settings: Settings) -> None:
    """Raise UnsupportedError for settings that are not implemented."""
    settings.require("bnb_4bit_quant_type", TYPES, "fp4")


def _matrix(source: TensorSource, part: RowPart, columns: int) -> GroupedMatrix | CodedMatrix:
    if _state_name(source, part.prefix) is None:
        return _int8_matrix(source, part, columns)
    module = _FourBits(source, part.prefix)
    if module.shape != (part.rows, columns):
        raise CheckpointError(
            f"{part.prefix}.weight is a matrix {list(module.shape)}, config.json asks for {[part.rows, columns]}; "
            "weights and config.json do not belong together"
        )
    return module.matrix()


def _int8_matrix(source: TensorSource, part: RowPart, columns: int) -> GroupedMatrix:
    if source.has(f"{part.prefix}.weight_format"):
        source.raw(f"{part.prefix}.weight_format")  # says how a GPU's kernels had it in memory, not in the file
    values = source.integers(f"{part.prefix}.weight", (part.rows, columns)).short()
    scales = source.tensor(f"{part.prefix}.SCB", (part.rows,)).float() / 127
    return affine_matrix((values + ZERO).byte(), scales[:, None], torch.tensor([ZERO]), 8, columns)


def _state_name(source: TensorSource, prefix: str) -> str | None:
    names = [f"{prefix}.weight.quant_state.bitsandbytes__{kind}" for kind in TYPES]
    return next((name for name in names if source.has(name)), None)


class _FourBits:
    """One module of 4 bits, and what its state says."""

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self.source = source
        self.weight = f"{prefix}.weight"
        self.state = self._read_state(str(_state_name(source, prefix)))
        shape = self.state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(size, int) for size in shape):
            raise CheckpointError(f"{self.weight} is stored with the shape {shape}; copy the checkpoint again")
        self.shape: tuple[int, int] = (shape[0], shape[1])
        self.group_size, self.nested_size = self._whole("blocksize"), self.state.get("nested_blocksize")
        if self.shape[1] % self.group_size:
            raise UnsupportedError(
                f"{self.weight} has rows of {self.shape[1]} inputs and a scale for every {self.group_size}, so that "
                f"rows share scales; supported are multiples of the block size; {REMEDY}"
            )
        self.groups = self.shape[1] // self.group_size

    def check(self) -> None:
        """Raise CheckpointError for tensors that are missing or misshapen."""
        rows = self.shape[0]
        expect(self.source, f"{self.weight}.absmax", (rows * self.groups,))
        expect(self.source, f"{self.weight}.quant_map", (NUM_VALUES,))
        if self.nested_size is not None:
            num_units = -(-rows * self.groups // self._whole("nested_blocksize"))
            expect(self.source, f"{self.weight}.nested_absmax", (num_units,))
            expect(self.source, f"{self.weight}.nested_quant_map", (NUM_SCALE_VALUES,))

    def matrix(self) -> CodedMatrix:
        """The codes, the table they are of, and their scales."""
        self.check()
        rows, columns = self.shape
        packed = self.source.raw(self.weight).view(-1).view(torch.uint8)
        if len(packed) * 2 != rows * columns:
            raise CheckpointError(
                f"{self.weight} has {len(packed)} bytes, a matrix {[rows, columns]} of 4 bits needs "
                f"{rows * columns // 2}; copy the checkpoint again"
            )
        codes = torch.stack([packed >> 4, packed & 15], dim=1).view(rows, columns)
        values = self._floats("quant_map")
        if self.nested_size is None:
            return CodedMatrix(codes, self._floats("absmax").view(rows, -1), self.group_size, values)
        units, shifts = self._units(), torch.full((rows,), self._nested_offset())
        scales = self.source.integers(f"{self.weight}.absmax").view(rows, -1)
        return CodedMatrix(codes, scales, self.group_size, values, self._floats("nested_quant_map"), units, shifts)

    def _units(self) -> Tensor:
        """What scales are multiples of: one for `nested_blocksize` scales, counted row after row -> [N, num_units]."""
        size = self._whole("nested_blocksize")
        together = math.gcd(self.groups, size)
        first = torch.arange(0, self.shape[0] * self.groups, together).view(self.shape[0], -1)
        return self._floats("nested_absmax")[first // size]

    def _floats(self, name: str) -> Tensor:
        return self.source.tensor(f"{self.weight}.{name}").float()

    def _read_state(self, name: str) -> dict[str, Any]:
        try:
            state = json.loads(bytes(self.source.integers(name).tolist()))
        except ValueError as error:
            raise CheckpointError(f"tensor {name} is not JSON: {error}; copy the checkpoint again") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"tensor {name} is not a JSON object; copy the checkpoint again")
        return state

    def _nested_offset(self) -> float:
        value = self.state.get("nested_offset")
        if not isinstance(value, int | float):
            raise CheckpointError(f"{self.weight}: its nested_offset is {value!r}; copy the checkpoint again")
        return float(value)

    def _whole(self, name: str) -> int:
        value = self.state.get(name)
        if type(value) is not int or value < 2 or value % 2:
            raise CheckpointError(f"{self.weight}: its {name} is {value!r}; copy the checkpoint again")
        return value
