"""What the tensors of quantized matrices take in memory, of integers by the activations they are multiplied with.

Knows: the blocks of GGUF, and which tensors hold integers, scales and zero points in other formats. Does not know:
files, models. Beside activations in float32 integers are codes of 4 or 8 bits, with 4 bytes for each scale and each
offset (`kernels.coded`); else they keep their size, but for zero points that differ, which become offsets of 4 bytes
beside scales of 4.
"""

from __future__ import annotations

from functools import cache

import torch

from forerun.kernels.coded import of_integers
from forerun.quant.gguf_decode import BLOCK_TYPES, decode_rows

INTEGERS = ("qweight", "weight_packed")
SCALES = ("scales", "weight_scale")
ZERO_POINTS = ("qzeros", "weight_zero_point")
_NUMBER = 4  # bytes of a scale or offset


def quantized_growth(
    name: str, kind: str, itemsize: int, bits: int | None, is_symmetric: bool, as_floats: bool
) -> float | None:  # fmt: skip
    """A tensor's bytes in memory over those in a file; None for one that is no part of a matrix of integers.

    `kind`: the type it is stored in, of `itemsize` bytes; `bits` of the checkpoint's integers, None if there are none.
    is_symmetric: all zero points are the same. as_floats: activations are float32.
    """
    if kind in BLOCK_TYPES:
        return _of_blocks(kind) if as_floats else 1.0
    if bits is None:
        return None
    if name.endswith(ZERO_POINTS):
        return 0.0 if is_symmetric else 8 * _NUMBER / bits
    if name.endswith(INTEGERS):
        return (4 if bits <= 4 else 8) / bits if as_floats else 1.0
    return (1.0 if is_symmetric and not as_floats else _NUMBER / itemsize) if name.endswith(SCALES) else None


@cache
def _of_blocks(kind: str) -> float:
    blocks = torch.zeros(1, BLOCK_TYPES[kind].nbytes, dtype=torch.uint8)
    matrix = of_integers(decode_rows(kind, blocks))
    codes = matrix.codes.numel() / (1 if matrix.values is None else 2)
    numbers = matrix.scales.numel() + (0 if matrix.offsets is None else matrix.offsets.numel())
    return (codes + _NUMBER * numbers) / blocks.nbytes
