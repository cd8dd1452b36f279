"""What a quantization run is asked to do.

Knows: options, their ranges and which contradict each other. Does not know: models, text, files.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError

METHODS = ("rtn", "gptq", "awq")
BITS = (2, 3, 4, 8)
SMALLEST_GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """How to quantize. Raises ConfigError for options out of range or in contradiction."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 128  # inputs that share a scale; -1: all of a row
    sym: bool = True  # the zero point is the middle of the range
    act_order: bool = False  # gptq: inputs of large magnitude first
    clip: bool | None = None  # search a range smaller than the weights' own; None: for awq only
    damp: float = 0.01  # gptq: added to the Hessian's diagonal, as a share of its mean

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}; got {self.method!r}")
        if self.bits not in BITS:
            raise ConfigError(f"bits must be one of {', '.join(map(str, BITS))}; got {self.bits}")
        if self.group_size != -1 and (self.group_size < SMALLEST_GROUP or self.group_size % SMALLEST_GROUP):
            raise ConfigError(f"group_size must be a multiple of {SMALLEST_GROUP}, or -1; got {self.group_size}")
        if self.act_order and self.method != "gptq":
            raise ConfigError(f"act_order is an option of method gptq, not of {self.method}: leave it out")
        if not 0 < self.damp <= 1:
            raise ConfigError(f"damp must be above 0 and at most 1; got {self.damp}")

    @property
    def clips(self) -> bool:
        """Whether ranges are searched."""
        return self.method == "awq" if self.clip is None else self.clip

    @property
    def layout(self) -> str:
        """The checkpoint layout written: "awq" for method awq at 4 bits, else "gptq"."""
        return "awq" if (self.method, self.bits) == ("awq", 4) else "gptq"

    def group_of(self, columns: int) -> int:
        """The group size in a matrix with `columns` inputs."""
        return columns if self.group_size == -1 else self.group_size
