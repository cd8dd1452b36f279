"""The storages a shape can be measured in: dense types, plain integers, codes of floats, the block types of GGUF.

Knows: names, and which bits, groups, zero points and offsets each has. Does not know: models, files, values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from forerun.errors import ConfigError

DENSE = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
DEFAULT_GROUP = 128  # inputs per scale if only the bits are given, as in GPTQ and AWQ checkpoints
INTEGERS = re.compile(r"int([2-8])(?::(\d+))?")
GGUF = "gguf:"
CODED = {"fp8": 128, "nf4": 64}  # inputs per scale, as DeepSeek and bitsandbytes have them


@dataclass(frozen=True, slots=True)
class Grouped:
    """The layout of a `GroupedMatrix`."""

    bits: int
    group_size: int
    zero: int
    offsets: bool
    groups_a_unit: int = 1  # above 1: scales are small integers times a float16 for so many groups
    tabled: bool = False  # codes are indices of a table of 8-bit integers
    grid_type: str | None = None  # of GGUF, whose codes are points of a grid
    scales: torch.dtype = torch.float16  # whose numbers they are, or with float8_e4m3fn halves of those


# The blocks of ggml-common.h as integers and scales.
GGUF_TYPES: dict[str, Grouped] = {
    "q8_0": Grouped(8, 32, 128, False),
    "q4_0": Grouped(4, 32, 8, False),
    "q4_1": Grouped(4, 32, 0, True),
    "q5_0": Grouped(5, 32, 16, False),
    "q5_1": Grouped(5, 32, 0, True),
    "q2_k": Grouped(2, 16, 0, True, 16),
    "q3_k": Grouped(3, 16, 4, False, 16),
    "q4_k": Grouped(4, 32, 0, True, 8),
    "q5_k": Grouped(5, 32, 0, True, 8),
    "q6_k": Grouped(6, 16, 32, False, 16),
    "iq4_nl": Grouped(4, 32, 128, False, tabled=True),
    "iq4_xs": Grouped(4, 32, 128, False, 8, tabled=True),
    "iq1_s": Grouped(2, 32, 1, True, 8, grid_type="IQ1_S"),
    "iq1_m": Grouped(4, 16, 128, False, 16, tabled=True, grid_type="IQ1_M"),
    "iq2_xxs": Grouped(4, 32, 128, False, 8, tabled=True, grid_type="IQ2_XXS"),
    "iq2_xs": Grouped(4, 16, 128, False, 16, tabled=True, grid_type="IQ2_XS"),
    "iq2_s": Grouped(4, 16, 128, False, 16, tabled=True, grid_type="IQ2_S"),
    "iq3_xxs": Grouped(4, 32, 128, False, 8, tabled=True, grid_type="IQ3_XXS"),
    "iq3_s": Grouped(4, 32, 128, False, 8, tabled=True, grid_type="IQ3_S"),
    "tq1_0": Grouped(2, 256, 1, False, grid_type="TQ1_0"),
    "tq2_0": Grouped(2, 256, 1, False),
    "q1_0": Grouped(2, 128, 1, False, grid_type="Q1_0"),
    "q2_0": Grouped(2, 64, 1, False),
    "mxfp4": Grouped(4, 32, 128, False, tabled=True, scales=torch.float8_e8m0fnu),
    "nvfp4": Grouped(4, 16, 128, False, tabled=True, scales=torch.float8_e4m3fn),
}
GGUF_DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightKind:
    """How the matrices of a measured model are stored: dense in `dtype`, in groups of integers, or one of CODED."""

    name: str
    dtype: torch.dtype  # of what is dense: everything, or the embedding table
    grouped: Grouped | None

    @property
    def coded_group(self) -> int:
        """Inputs per scale of codes that stand for floats, 0 for other storages."""
        return CODED.get(self.name, 0)


def read_kind(name: str) -> WeightKind:
    """bf16, f32, f16, fp8, nf4, int4, int4:32, gguf:Q4_K and so on; raises ConfigError for others."""
    text = name.strip().lower()
    if text in DENSE:
        return WeightKind(text, DENSE[text], None)
    if text in CODED:
        return WeightKind(text, torch.bfloat16, None)
    if text.startswith(GGUF):
        return _gguf(name, text.removeprefix(GGUF))
    match = INTEGERS.fullmatch(text)
    if match is None:
        raise _unknown(name)
    bits, group = int(match[1]), int(match[2] or DEFAULT_GROUP)
    if group < 16 or group % 16:
        raise ConfigError(f"weights {name!r}: a group must be a multiple of 16 inputs, such as int{bits}:32")
    return WeightKind(text, torch.bfloat16, Grouped(bits, group, 1 << (bits - 1), False))


def _gguf(name: str, block: str) -> WeightKind:
    if block in GGUF_DENSE:
        return WeightKind(GGUF + block, GGUF_DENSE[block], None)
    if block not in GGUF_TYPES:
        raise _unknown(name)
    return WeightKind(GGUF + block, torch.bfloat16, GGUF_TYPES[block])


def _unknown(name: str) -> ConfigError:
    blocks = ", ".join((*GGUF_DENSE, *GGUF_TYPES))
    return ConfigError(
        f"weights {name!r} are unknown; choose {', '.join((*DENSE, *CODED))}, int2 to int8 (groups of {DEFAULT_GROUP}; "
        f"int4:32 for another), or gguf:TYPE with one block type for all matrices: {blocks} (mixes such as Q4_K_M are "
        "several)"
    )
