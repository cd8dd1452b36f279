"""GroupedWeight: a matrix of small integers with group scales, whatever file format it came from.

Knows: `GroupedMatrix` and `Kernels.pack_grouped`. Does not know: file formats; each of those builds a GroupedMatrix.
"""

from __future__ import annotations

from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.packed import PackedWeight


class GroupedWeight(PackedWeight):
    """A quantized matrix; activations become 8-bit integers.

    127 times a unit vector becomes the integer 127 exactly, and entries of `dequantize` are off by float32 rounding
    (127 * scale * w / 127), which the tests of the formats allow for.
    """

    unit = 127.0

    def __init__(self, kernels: Kernels, matrix: GroupedMatrix) -> None:
        """Pack `matrix`; the unpacked one is not kept."""
        super().__init__(kernels, kernels.pack_grouped(matrix))
