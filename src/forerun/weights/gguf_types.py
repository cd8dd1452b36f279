"""GGUF's numbers for types of metadata values, of tensors and of files.

Knows: the tables, and how many bytes a block of each tensor type has. Does not know: what is in a block, or files.
Source: ggml docs/gguf.md and ggml.h (names and sizes), llama.h (types of files).
"""

from __future__ import annotations

from typing import NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had 32-bit lengths and was used for a few weeks only
DEFAULT_ALIGNMENT = 32
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Value type -> its `struct` letter."""


class BlockLayout(NamedTuple):
    """A tensor type: `size` neighbouring entries of a row take `nbytes` bytes."""

    name: str
    size: int
    nbytes: int


TENSOR_TYPES = {
    0: BlockLayout("F32", 1, 4),
    1: BlockLayout("F16", 1, 2),
    2: BlockLayout("Q4_0", 32, 18),
    3: BlockLayout("Q4_1", 32, 20),
    6: BlockLayout("Q5_0", 32, 22),
    7: BlockLayout("Q5_1", 32, 24),
    8: BlockLayout("Q8_0", 32, 34),
    10: BlockLayout("Q2_K", 256, 84),
    11: BlockLayout("Q3_K", 256, 110),
    12: BlockLayout("Q4_K", 256, 144),
    13: BlockLayout("Q5_K", 256, 176),
    14: BlockLayout("Q6_K", 256, 210),
    16: BlockLayout("IQ2_XXS", 256, 66),
    17: BlockLayout("IQ2_XS", 256, 74),
    18: BlockLayout("IQ3_XXS", 256, 98),
    19: BlockLayout("IQ1_S", 256, 50),
    20: BlockLayout("IQ4_NL", 32, 18),
    21: BlockLayout("IQ3_S", 256, 110),
    22: BlockLayout("IQ2_S", 256, 82),
    23: BlockLayout("IQ4_XS", 256, 136),
    29: BlockLayout("IQ1_M", 256, 56),
    30: BlockLayout("BF16", 1, 2),
    34: BlockLayout("TQ1_0", 256, 54),
    35: BlockLayout("TQ2_0", 256, 66),
    39: BlockLayout("MXFP4", 32, 17),
    40: BlockLayout("NVFP4", 64, 36),
    41: BlockLayout("Q1_0", 128, 18),
    42: BlockLayout("Q2_0", 64, 18),
}
"""Those that weights can be read from; integers, F64 and types of intermediate results are none."""
TYPE_CODES = {layout.name: code for code, layout in TENSOR_TYPES.items()}

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
"""`general.file_type` -> the mix of tensor types it stands for."""
