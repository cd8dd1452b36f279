"""Banks: the matrices of all experts of a layer, multiplied with lists of rows by one launch.

Knows: addresses of matrices that were packed one by one, the kernels that multiply. Does not know: who chose them.

A *slot* is one pair of a row and a matrix. Slots of one matrix follow each other, in the order of the rows, so that a
program takes neighbouring slots; how many there are of each only the device knows, and programs with nothing to do end
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import PackedLinear
from forerun.kernels.triton import grouped, linear
from forerun.kernels.triton.common import EXACT, device_copy
from forerun.kernels.triton.grouped_layout import GroupedTensors, TritonGrouped, TritonGroupedLayout
from forerun.kernels.triton.linear import TritonLinear

_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Packed = TypeVar("Packed", TritonLinear, TritonGrouped)


class Slots(NamedTuple):
    """Which rows meet which matrix."""

    sources: Tensor  # [slots] int32: the row a slot stands for
    owners: Tensor  # [slots] int32: the matrix it meets
    starts: Tensor  # [E + 1] int32: where the slots of each matrix begin; the last entry is their number
    num_rows: int  # of the batch: no matrix has more slots

    @property
    def room(self) -> int:
        """Slots there is room for."""
        return self.sources.shape[0]


class Bank(Protocol):
    """E matrices of one shape [N, K]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def bytes_a_slot(self) -> int:
        """Work space a slot takes, its outputs included."""

    def multiply(self, x: Tensor, slots: Slots, gathered: bool) -> Tensor:
        """Every slot times its matrix transposed -> [slots, N]; x holds slots, or the batch's rows if `gathered`."""


@dataclass(frozen=True, slots=True)
class DenseBank:
    """Matrices of floating numbers."""

    matrices: Sequence[TritonLinear]
    addresses: Tensor  # [E] int64

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.matrices[0].shape

    @property
    def bytes_a_slot(self) -> int:
        """The outputs."""
        return 4 * self.shape[0]

    def multiply(self, x: Tensor, slots: Slots, gathered: bool) -> Tensor:
        """See `Bank`."""
        num_outputs, num_inputs = self.shape
        out = torch.empty(slots.room, num_outputs, device=x.device)
        (along_n, along_m), sizes = linear.product_sizes(self.shape, slots.num_rows)
        linear.multiply[(along_n, len(self.matrices), along_m)](
            x, self.addresses, x, out, slots.sources, slots.starts, slots.num_rows,
            num_inputs, 0, num_outputs, 0, **sizes, KIND=_KINDS[self.matrices[0].weight.dtype],
            HAS_BIAS=False, LISTED=True, GATHERED=gathered, **EXACT,
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class GroupedBank:
    """Matrices of small integers."""

    matrices: Sequence[TritonGrouped]
    layout: TritonGroupedLayout
    tensors: GroupedTensors  # [E] int64 each, addresses
    inputs: Tensor  # likewise

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.matrices[0].shape

    @property
    def bytes_a_slot(self) -> int:
        """Outputs, and the inputs as integers with their scales and sums."""
        return 4 * self.shape[0] + grouped.bytes_a_row(self.layout)

    def multiply(self, x: Tensor, slots: Slots, gathered: bool) -> Tensor:
        """See `Bank`."""
        rows = grouped.empty_rows(self.layout, slots.room, x.device)
        grouped.quantize[(-(-slots.room // grouped.QUANTIZED_ROWS), self.layout.num_blocks)](
            x, self.inputs, *rows, slots.sources, slots.owners, slots.starts[-1:], slots.room,
            **grouped.quantize_sizes(self.layout), LISTED=True, GATHERED=gathered, **EXACT,
        )  # fmt: skip
        out = torch.empty(slots.room, self.layout.num_outputs, device=x.device)
        (along_n, along_m), sizes = grouped.product_sizes(self.layout, slots.num_rows)
        grouped.multiply[(along_n, len(self.matrices), along_m)](
            *rows, *self.tensors, x, out, slots.starts, slots.room,
            **sizes, HAS_BIAS=False, LISTED=True, **EXACT,
        )  # fmt: skip
        return out


def pack_bank(matrices: Sequence[PackedLinear], shape: tuple[int, int]) -> Bank:
    """A bank of matrices of `shape` (N, K) that were packed for these kernels; raises KernelError for any others."""
    wrong = next((matrix.shape for matrix in matrices if matrix.shape != shape), None)
    if wrong is not None:
        raise KernelError(f"a matrix of an expert is {list(wrong)}, the first one's sizes ask for {list(shape)}")
    dense, small = _all(matrices, TritonLinear), _all(matrices, TritonGrouped)
    if dense is not None:
        return _dense_bank(dense)
    if small is not None:
        return _grouped_bank(small)
    kinds = ", ".join(sorted({type(matrix).__name__ for matrix in matrices}))
    raise KernelError(f"the experts' matrices are packed as {kinds}; the Triton kernels need all alike, and their own")


def _all(matrices: Sequence[PackedLinear], kind: type[Packed]) -> list[Packed] | None:
    """The matrices, if they are all of one kind."""
    found = [matrix for matrix in matrices if isinstance(matrix, kind)]
    return found if len(found) == len(matrices) else None


def _dense_bank(matrices: Sequence[TritonLinear]) -> DenseBank:
    _must_agree([matrix.weight.dtype for matrix in matrices])
    return DenseBank(matrices, _addresses([matrix.weight for matrix in matrices]))


def _grouped_bank(matrices: Sequence[TritonGrouped]) -> GroupedBank:
    _must_agree([matrix.layout for matrix in matrices])
    tensors = GroupedTensors(*map(_addresses, zip(*(matrix.tensors for matrix in matrices), strict=True)))
    return GroupedBank(matrices, matrices[0].layout, tensors, _addresses([matrix.inputs for matrix in matrices]))


def _must_agree(stored: Sequence[Any]) -> None:
    other = next((one for one in stored if one != stored[0]), None)
    if other is not None:
        raise KernelError(
            f"experts of one layer are stored in different ways ({stored[0]} and {other}), which the Triton kernels do "
            "not multiply; quantize all experts alike, or choose --device cpu"
        )


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return device_copy([tensor.data_ptr() for tensor in tensors], tensors[0].device)  # [E]
