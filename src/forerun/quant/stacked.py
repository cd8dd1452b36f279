"""The matrices of all experts of a layer in one tensor: floats, FP8, or MXFP4 blocks as gpt-oss is published in.

Knows: such tensors, and the E2M1 numbers of blocks. Does not know: models, other formats. They are `NAME` [E, N, K], or
[E, K, N] by inputs; or bytes, `NAME_blocks` [E, N, K / 32, 16] and `NAME_scales` [E, N, K / 32]: two numbers of 4 bits
in a byte, the first low, to be multiplied by 2 ** (scale - 127).
Source: OCP Microscaling Formats 1.0; transformers integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.dense import DenseWeight
from forerun.quant.float8 import Float8Format
from forerun.quant.floats import MX_GROUP, expect, float4_matrix, powers_of_two
from forerun.quant.grouped import GroupedWeight
from forerun.quant.settings import Settings

METHOD = "mxfp4"
BLOCK = MX_GROUP
IN_8_BITS = Float8Format()


def check_mxfp4(settings: Settings) -> None:
    """Nothing of its settings changes how blocks are read: which modules have blocks is said by their names."""


def is_stacked(source: TensorSource, name: str) -> bool:
    """Whether the matrices of all experts are the tensor NAME, or blocks of that name."""
    return source.has(name) or source.has(f"{name}_blocks")


def read_stacked(
    source: TensorSource, names: Sequence[str], shape: tuple[int, int, int], kernels: Kernels,
    dtype: torch.dtype | None, order: Tensor | None = None, is_transposed: bool = False,
) -> list[Weight]:  # fmt: skip
    """The matrices of E experts, [N, K] each, for shape (E, N, K); rows by `order` [N] if given.

    names: of one tensor, or of several floats with as many of the rows each. dtype, if given, is what floats are
    converted to. is_transposed: floats are [E, K, N]. Raises CheckpointError.
    """
    num_experts, rows, columns = shape
    if source.has(f"{names[0]}_blocks"):
        blocks, scales = _read_blocks(source, names[0], shape)
        chosen = torch.arange(rows) if order is None else order
        return [
            GroupedWeight(kernels, float4_matrix(block[chosen].flatten(1), powers_of_two()[scale[chosen].int()], BLOCK))
            for block, scale in zip(blocks, scales, strict=True)
        ]
    own = rows // len(names)
    parts = [RowPart(name.removesuffix(".weight"), own) for name in names]
    if IN_8_BITS.matches(source, parts[0].prefix):
        held = dict[str, Tensor]()
        for name in names:
            expect(source, name, (num_experts, own, columns))
        experts = (OneOfStack(source, index, held) for index in range(num_experts))
        return [IN_8_BITS.read(expert, parts, columns, kernels, None) for expert in experts]
    sizes = (num_experts, columns, own) if is_transposed else (num_experts, own, columns)
    stored = torch.cat([source.tensor(name, sizes) for name in names], dim=2 if is_transposed else 1)
    matrices = (matrix.T if is_transposed else matrix for matrix in stored.to(dtype or stored.dtype))
    return [DenseWeight(kernels, matrix if order is None else matrix[order]) for matrix in matrices]


@dataclass(frozen=True, slots=True)
class OneOfStack:
    """One expert's matrices among those of all, as tensors of its own: the TensorSource of its format."""

    source: TensorSource
    index: int
    held: dict[str, Tensor]  # what was read, of all experts

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's."""
        return self.source.config

    def has(self, name: str) -> bool:
        """Whether the experts have such a tensor."""
        return self.source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one expert's."""
        return self.source.shape(name)[1:]

    def stored_as(self, name: str) -> str:
        """The same for all."""
        return self.source.stored_as(name)

    def raw(self, name: str) -> Tensor:
        """One expert's part; raises CheckpointError if there are too few."""
        if name not in self.held:
            self.held[name] = self.source.raw(name)
        if self.index >= len(self.held[name]):
            raise CheckpointError(f"tensor {name} has {len(self.held[name])} experts, too few; copy the files again")
        return self.held[name][self.index]

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """The same; raises CheckpointError if it is not of `shape`."""
        if shape is not None:
            expect(self, name, tuple(shape))
        return self.raw(name)

    integers = tensor


def _read_blocks(source: TensorSource, name: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    num_experts, rows, columns = shape
    if columns % BLOCK:
        raise CheckpointError(f"{name}_blocks: {columns} inputs are no whole blocks of {BLOCK}; copy the files again")
    groups = columns // BLOCK
    blocks = source.integers(f"{name}_blocks", (num_experts, rows, groups, BLOCK // 2))
    scales = source.integers(f"{name}_scales", (num_experts, rows, groups))
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or bool((scales == 255).any()):
        raise CheckpointError(f"{name}_blocks or its scales are not MXFP4: bytes, no scale 255; copy the files again")
    return blocks, scales
