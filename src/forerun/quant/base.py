"""The Weight protocol: a matrix of a linear layer, however it is stored.

Knows: what a layer asks of a stored matrix, and what a storage format asks of a checkpoint. Does not know: any
storage format, file layout or architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels, PackedLinear


class Weight(Protocol):
    """A matrix [N, K] in some storage."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""

    @property
    def nbytes(self) -> int:
        """Bytes the stored matrix occupies."""

    @property
    def packed(self) -> PackedLinear | None:
        """The matrix as its kernels packed it; None unless it is one packed matrix (several pieces, or plain torch)."""

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K] times the matrix transposed, plus bias [N] float32 -> [M, N] float32."""

    def dequantize(self) -> Tensor:
        """The matrix this weight stands for -> [N, K] float32 (the oracle of its tests)."""


class TensorSource(Protocol):
    """Where the tensors of a checkpoint come from."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's config.json, whose `quantization_config` says how matrices are stored."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read one floating tensor; raises CheckpointError if it is missing or not of `shape`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""

    def stored_as(self, name: str) -> str:
        """The type a tensor is stored in, such as "BF16", without reading it."""

    def raw(self, name: str) -> Tensor:
        """Read a tensor of any type as it is stored; raises CheckpointError if it is missing."""

    def integers(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read one integer tensor; raises CheckpointError if it is missing or not of `shape`."""


class RowPart(NamedTuple):
    """One module of a checkpoint that becomes some rows of a matrix."""

    prefix: str
    rows: int


class WeightFormat(Protocol):
    """Recognises and reads one storage format."""

    name: str

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the module `prefix` is stored in this format."""

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """Read the modules, put their rows one after the other, and pack them -> [sum of rows, columns].

        dtype, if given, is the precision a dense matrix is converted to; quantized formats have their own.
        Raises CheckpointError for missing or misshapen tensors.
        """


@runtime_checkable
class RowFormat(Protocol):
    """A WeightFormat whose rows depend on nothing but their own bytes, so that some can be read without the others."""

    def read_rows(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels,
        dtype: torch.dtype | None, chosen: Sequence[Tensor],
    ) -> Weight:  # fmt: skip
        """`read` of the rows `chosen` [R] int64 of each part."""


@runtime_checkable
class RowSource(Protocol):
    """A TensorSource that reads some rows of a matrix without the others."""

    def rows(self, name: str, shape: tuple[int, int], row_ids: Tensor) -> Tensor:
        """Rows `row_ids` [R] int64 of a floating matrix; raises as `TensorSource.tensor`."""


@runtime_checkable
class CheckedFormat(Protocol):
    """A WeightFormat that can tell from headers whether a module is whole."""

    def check(self, source: TensorSource, prefix: str) -> None:
        """Raise CheckpointError for missing or misshapen tensors of the module; reads no data."""
