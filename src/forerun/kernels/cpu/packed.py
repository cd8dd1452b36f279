"""Matrices as the C++ kernels read them: panels of one matrix, of one a head, and pairs of them, an expert each.

Knows: what C++ must be told about each. Does not know: layouts (csrc), the arithmetic, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.cpu import _native
from forerun.kernels.cpu.grouped import CpuGrouped
from forerun.kernels.ops import ACTIVATIONS, SQUARED_RELU, ExpertBiases, PackedExperts, PackedHeads, PackedLinear

Stored = tuple["CpuLinear | CpuGrouped", ...]


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """Weights in panels of 16 outputs, the last one zero-padded; codes that stand for them where there is a layout."""

    panels: Tensor  # flat
    address: int
    num_outputs: int
    num_inputs: int
    whole_outputs: int  # of the matrix whose rows these are: what is multiplied by AMX tiles is decided by it
    dtype_code: int
    layout: int = 0  # address of csrc's CodedLayout, 0 without one
    held: tuple[Tensor | None, ...] = ()  # the layout and what it points to

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.num_outputs, self.num_inputs

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.panels.nbytes


@dataclass(frozen=True, slots=True)
class CpuHeads:
    """A matrix a head, each in panels of its own, one behind the other."""

    panels: CpuLinear  # [Q * N rounded up to panels, K]
    num_heads: int
    num_outputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(Q, N, K)."""
        return self.num_heads, self.num_outputs, self.panels.num_inputs

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.panels.nbytes


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The matrices of all experts, and the list of them that C++ reads."""

    bank: _native.ExpertBank
    matrices: Stored  # kept alive
    num_experts: int
    biases: ExpertBiases | None  # kept alive


def head_rows(weight: Tensor) -> Tensor:
    """Matrices [Q, N, K] as one, every head's rows filled up with zeros to whole panels -> [Q * panels * 16, K]."""
    filled = -weight.shape[1] % _native.LANES
    return torch.nn.functional.pad(weight, (0, 0, 0, filled)).flatten(0, 1)


def pack_bank(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: str, biases: ExpertBiases | None,
    scales_inputs: bool,
) -> CpuExperts:  # fmt: skip
    """List the matrices of all experts; raises KernelError for shapes that do not go together."""
    num_inputs, num_inner = gate_up[0].shape[1], down[0].shape[1]
    _check(gate_up, (num_inner if activation == SQUARED_RELU else 2 * num_inner, num_inputs))
    _check(down, (num_inputs, num_inner))
    bank = _native.ExpertBank(num_inputs, num_inner, ACTIVATIONS.index(activation), scales_inputs)
    stored = (*_stored(gate_up), *_stored(down))
    added = [] if biases is None else [*biases.gate_up.unbind(), *biases.down.unbind()]
    for number, matrix in enumerate(stored):
        is_down, bias = number >= len(gate_up), added[number].data_ptr() if added else 0
        if isinstance(matrix, CpuGrouped):
            addresses = bias, matrix.address, matrix.order_address
            bank.add_grouped(is_down, *addresses, *matrix.shape, matrix.zero, matrix.layout)
        else:
            bank.add_linear(is_down, bias, matrix.address, *matrix.shape, matrix.dtype_code, matrix.layout)
    return CpuExperts(bank, stored, len(gate_up), biases)


def own_heads(weight: PackedHeads) -> CpuHeads:
    """The matrices of heads, if they were packed for the C++ kernels."""
    if not isinstance(weight, CpuHeads):
        raise KernelError(f"heads packed by {type(weight).__name__} given to the C++ kernels")
    return weight


def own_experts(experts: PackedExperts) -> CpuExperts:
    """The experts, if they were packed for the C++ kernels."""
    if not isinstance(experts, CpuExperts):
        raise KernelError(f"experts packed by {type(experts).__name__} given to the C++ kernels")
    return experts


def _check(matrices: Sequence[PackedLinear], shape: tuple[int, int]) -> None:
    wrong = next((matrix.shape for matrix in matrices if matrix.shape != shape), None)
    if wrong is not None:
        raise KernelError(f"a matrix of an expert is {list(wrong)}, the first one's sizes ask for {list(shape)}")


def _stored(matrices: Sequence[PackedLinear]) -> Stored:
    own = tuple(matrix for matrix in matrices if isinstance(matrix, (CpuLinear, CpuGrouped)))
    if len(own) != len(matrices):
        raise KernelError("an expert's matrix was not packed by the C++ kernels that are to multiply with it")
    return own
