"""CodedWeight: a matrix of codes that stand for floats (FP8, NF4), whatever file format it came from.

Knows: `CodedMatrix` and `Kernels.pack_coded`. Does not know: file formats; each of those builds a CodedMatrix.
"""

from __future__ import annotations

from forerun.kernels.coded import CodedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.packed import PackedWeight


class CodedWeight(PackedWeight):
    """A matrix whose floats are looked up while it is read; activations are not rounded."""

    def __init__(self, kernels: Kernels, matrix: CodedMatrix) -> None:
        """Pack `matrix`; the unpacked one is not kept."""
        super().__init__(kernels, kernels.pack_coded(matrix))
