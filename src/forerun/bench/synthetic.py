"""A model of a given shape with random weights, in memory only.

Knows: how to make tensors that cost what trained ones cost: no zeros, no denormals, activations near 1. Does not
know: timing, files. The values repeat after a million, which no cache or kernel can exploit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.bench.shapes import Shape
from forerun.bench.weight_kinds import Grouped, WeightKind
from forerun.errors import CheckpointError
from forerun.kernels.coded import NUM_VALUES, CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.models.build import Builder
from forerun.models.config import ModelConfig, num_parameters
from forerun.models.decoder import Decoder
from forerun.quant.base import RowPart, TensorSource, WeightFormat
from forerun.quant.coded import CodedWeight
from forerun.quant.dense import DenseFormat
from forerun.quant.gguf_grids import GRID_TYPES
from forerun.quant.grouped import GroupedWeight

PERIOD = 1_000_003  # a prime, so that no two rows of a matrix begin alike
SEED = 0
_GRID_BLOCKS = 8191  # a prime, too; of 256 codes
_TABLE = torch.cat([torch.arange(136, 256, 16), torch.arange(120, 0, -16)]).byte()  # around 128, the negatives last


class RandomSource:
    """A checkpoint that has every tensor it is asked for. Implements `quant.base.TensorSource`."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of every tensor."""
        self._dtype = dtype
        self._pool = torch.randn(PERIOD, generator=torch.Generator().manual_seed(SEED))  # [PERIOD]

    @property
    def config(self) -> Mapping[str, Any]:
        """No settings: the format is given."""
        return {}

    def has(self, name: str) -> bool:
        """Every tensor of a module; experts are modules too, none of their matrices are stacked in one tensor."""
        return not name.endswith(("_proj", "_proj_blocks"))

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """A matrix that keeps the size of what it multiplies, or a vector of entries around 1."""
        if shape is None:
            raise CheckpointError(f"random tensor {name} was asked for without a shape")
        values = self._pool / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.1 * self._pool
        return tiled(values.to(self._dtype), shape)

    def integers(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Raises CheckpointError: there are no integer tensors."""
        raise CheckpointError(f"random weights hold no integers, but {name} was asked for")

    def raw(self, name: str) -> Tensor:
        """Raises CheckpointError: nothing is stored."""
        raise CheckpointError(f"random weights are not stored, but {name} was asked for as it is")

    def shape(self, name: str) -> tuple[int, ...]:
        """(): a tensor has whatever shape it is asked for in."""
        return ()

    def stored_as(self, name: str) -> str:
        """Raises CheckpointError."""
        return str(self.raw(name).dtype)


class RandomGroupedFormat:
    """Every matrix as random integers with scales. Implements `quant.base.WeightFormat`."""

    name = "random"

    def __init__(self, layout: Grouped) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self._layout = layout
        self._codes = torch.randint(0, 1 << layout.bits, (PERIOD,), generator=generator, dtype=torch.uint8)
        self._scales = torch.rand(PERIOD, generator=generator) + 0.5  # [PERIOD]
        most = 16 if layout.bits == 2 else 64  # as in files
        self._counts = torch.randint(1, most, (PERIOD,), generator=generator, dtype=torch.int8)  # of units
        self._kind = None if layout.grid_type is None else GRID_TYPES[layout.grid_type]
        if self._kind is not None:
            blocks = torch.randint(0, 256, (_GRID_BLOCKS, self._kind.nbytes), generator=generator, dtype=torch.uint8)
            self._decoded = self._kind.decode(blocks.numpy())

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Always true."""
        return True

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> GroupedWeight:
        """A random matrix for all parts together."""
        return GroupedWeight(kernels, self.matrix(sum(part.rows for part in parts), columns))

    def matrix(self, rows: int, columns: int) -> GroupedMatrix:
        """A random matrix of `rows` and `columns`."""
        layout = self._layout
        spread = (1 << 8 if layout.tabled else 1 << layout.bits) / math.sqrt(12)  # of evenly drawn codes
        group_size = min(layout.group_size, columns)
        groups, middle = -(-columns // group_size), (1 << layout.bits) / 2  # offsets are so many scales
        codes, table = tiled(self._codes, (rows, columns)), _TABLE if layout.tabled else None
        together = math.gcd(groups, layout.groups_a_unit)  # fewer for shapes that no file of this type has
        sizes = _as_stored(self._scales / (spread * math.sqrt(columns)), layout.scales)
        scales = tiled(sizes, (rows, groups // together))
        if layout.groups_a_unit == 1:
            offsets = scales.float() * middle if layout.offsets else None
            return self._on_grid(
                GroupedMatrix(codes, scales.float(), layout.bits, layout.zero, group_size, offsets, table=table)
            )
        units, counts = (scales / 32).half(), tiled(self._counts, (rows, groups))
        moved = (counts, (units * middle).half()) if layout.offsets else (None, None)
        return self._on_grid(
            GroupedMatrix(codes, counts, layout.bits, layout.zero, group_size, moved[0], None, units, moved[1], table)
        )

    def _on_grid(self, matrix: GroupedMatrix) -> GroupedMatrix:
        """The matrix with codes, points and counts of units from random blocks, where files of the type have a grid."""
        (rows, columns), groups = matrix.shape, matrix.scales.shape[1]
        if self._kind is None or self._kind.grid is None or columns % 8:
            return matrix
        decoded, grid = self._decoded, self._kind.grid()

        def taken(numbers: Any, count: int) -> Tensor:
            return tiled(torch.from_numpy(numbers).flatten(), (rows, count))

        codes, points = taken(decoded.codes, columns), taken(decoded.points, columns // grid.run)
        matrix = replace(matrix, codes=codes, grid=grid, points=points)
        if decoded.units is not None:
            matrix = replace(matrix, scales=taken(decoded.scales, groups))
        if decoded.offsets is not None:
            matrix = replace(matrix, offsets=taken(decoded.offsets, groups), offset_units=matrix.units)
        return matrix


class RandomCodedFormat:
    """Every matrix as random codes of floats with scales: e4m3, or 4 bits. Implements `quant.base.WeightFormat`."""

    name = "random"

    def __init__(self, kind: WeightKind) -> None:
        generator = torch.Generator().manual_seed(SEED)
        floats = torch.randn(PERIOD, generator=generator)
        self._group_size = kind.coded_group
        self._values = None if kind.name == "fp8" else torch.linspace(-2, 2, NUM_VALUES)
        indices = torch.randint(0, NUM_VALUES, (PERIOD,), generator=generator, dtype=torch.uint8)
        self._codes = floats.to(torch.float8_e4m3fn).view(torch.uint8) if self._values is None else indices
        self._scales = torch.rand(PERIOD, generator=generator) + 0.5  # [PERIOD]

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Always true."""
        return True

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> CodedWeight:
        """A random matrix for all parts together."""
        return CodedWeight(kernels, self.matrix(sum(part.rows for part in parts), columns))

    def matrix(self, rows: int, columns: int) -> CodedMatrix:
        """A random matrix of `rows` and `columns`."""
        scales = tiled(self._scales / math.sqrt(columns), (rows, -(-columns // self._group_size)))
        return CodedMatrix(tiled(self._codes, (rows, columns)), scales, self._group_size, values=self._values)


def _as_stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales that a file with scales of `dtype` could have, if not as small as these."""
    if dtype is torch.float8_e4m3fn:  # files of this kind have a larger scale beside it
        return scales.clamp(min=torch.finfo(dtype).tiny).to(dtype).float() / 2
    return scales.to(dtype).float() if dtype is torch.float8_e8m0fnu else scales.to(dtype)


def tiled(values: Tensor, shape: Sequence[int]) -> Tensor:
    """The values over and over -> a fresh contiguous tensor of `shape`."""
    count = math.prod(shape)
    return values.repeat(-(-count // len(values)))[:count].view(tuple(shape))


def random_decoder(shape: Shape, kind: WeightKind, kernels: Kernels, max_position: int) -> Decoder:
    """A decoder of the shape, its matrices stored as `kind`. Check the memory first (`bytes_needed`)."""
    form: WeightFormat = DenseFormat() if kind.grouped is None else RandomGroupedFormat(kind.grouped)
    if kind.coded_group:
        form = RandomCodedFormat(kind)
    source = RandomSource(kind.dtype)
    builder = Builder(shape.config, shape.family, source, kernels, None, max_position, lambda *_: form)
    return builder.decoder()


def bytes_needed(config: ModelConfig, kind: WeightKind, kernels: Kernels, max_position: int) -> int:
    """Memory the model takes at most, plus twice the largest matrix while it is made."""
    hidden, heads = config.hidden_size, config.heads
    table = config.vocab_size * hidden
    largest = max(table, 2 * config.ffn_size * hidden, heads.row_size * hidden)
    embedding = 0 if config.tie_embeddings else table  # stored with the output layer's matrix
    matrices = (num_parameters(config) - embedding) * _bytes_per_weight(kind, kernels)
    stored = 2 if kind.dtype is torch.bfloat16 else 4
    rope = max_position * heads.rotary_dim * 4
    return int(matrices + table * stored + 2 * largest * stored + _head_matrices(config, kind) + rope)


def _head_matrices(config: ModelConfig, kind: WeightKind) -> int:
    """Extra memory for the matrices of latent heads, where integers become float32."""
    if config.latents is None or kind.grouped is None:
        return 0
    rows = config.heads.num_q * (config.latents.nope_dim + config.latents.value_dim)
    return config.num_layers * rows * config.latents.rank * 4


def _bytes_per_weight(kind: WeightKind, kernels: Kernels) -> float:
    """An upper bound; codes are packed into 4 or 8 bits each. The reference widens everything to float32."""
    slow = kernels.name == "reference"
    if kind.coded_group:
        return (4 if slow else 1) + 4 / kind.coded_group
    if kind.grouped is None:
        return 2 if kind.dtype is torch.bfloat16 and not slow else 4
    per_scale = 8 if kind.grouped.offsets else 4
    code = 5 if slow else 0.5 if kind.grouped.bits <= 4 and not kind.grouped.tabled else 1
    return code + per_scale / kind.grouped.group_size
