"""Rotary position tables: for every position the cosines and sines its query and key pairs turn by.

Knows: the frequency formulas (plain, linear, dynamic NTK, yarn, llama3, proportional, longrope within its original
context) as transformers computes them (modeling_rope_utils.py), in float32 and in its order. Does not know: config.

**Why dynamic NTK is per position here.** transformers recomputes the base from the length of the *call*: the same
prompt gives other keys when it comes in two chunks or in a longer batch. Then nothing that reuses keys (chunked
prefill, prefix cache, verification) could equal plain decoding. Here position p always uses the base for a sequence
of p + 1 tokens, which is what transformers computes when it decodes token by token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Everything a rope table is a function of. Fields that a kind does not use keep their defaults."""

    kind: RopeKind = "default"
    rotary_dim: int
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # positions the model was first trained for
    attention_factor: float | None = None  # yarn: None derives it from factor, mscale and mscale_all_dim
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()  # longrope: one divisor per frequency
    num_turned: int = 0  # proportional: pairs that turn, the first ones

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by (yarn's and longrope's attention factor, folded into the table)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return _yarn_amplitude(self) if self.kind == "yarn" else _longrope_amplitude(self)


def score_factor(spec: RopeSpec) -> float:
    """What DeepSeek's models multiply attention scores by beyond 1 / sqrt(d): yarn's mscale_all_dim, squared.

    Source: transformers modeling_deepseek_v3.py.
    """
    if spec.kind != "yarn" or not spec.mscale_all_dim:
        return 1.0
    return _mscale(spec.factor, spec.mscale_all_dim) ** 2


def rope_table(spec: RopeSpec, max_position: int) -> Tensor:
    """The table for positions 0 .. max_position-1 -> [max_position, rotary_dim] float32, cos half | sin half."""
    positions = torch.arange(max_position, dtype=torch.int64)  # [P]
    frequencies = _frequencies(spec, positions)  # [1 or P, rotary_dim / 2]
    angles = positions.float()[:, None] * frequencies  # [P, rotary_dim / 2] float32, as transformers rounds them
    wide = angles.double()
    table = torch.cat((wide.cos(), wide.sin()), dim=1) * spec.amplitude
    return table.float().contiguous()  # [P, rotary_dim]


def _frequencies(spec: RopeSpec, positions: Tensor) -> Tensor:
    """Radians per position of every pair: one row for all positions, or (dynamic) a row for each."""
    if spec.kind == "dynamic":
        return _dynamic(spec, positions)
    if spec.kind == "yarn":
        return _yarn(spec)[None]
    if spec.kind == "llama3":
        return _llama3(spec)[None]
    if spec.kind == "longrope":
        return (1.0 / (torch.tensor(spec.short_factors) * spec.theta ** _exponents(spec)))[None]
    plain = _plain(spec)
    if spec.kind == "proportional":
        plain[spec.num_turned :] = 0
        return (plain / spec.factor)[None]
    return (plain / spec.factor if spec.kind == "linear" else plain)[None]


def _exponents(spec: RopeSpec) -> Tensor:
    return torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim


def _plain(spec: RopeSpec) -> Tensor:
    inverse: Tensor = 1.0 / (spec.theta ** _exponents(spec))
    return inverse


def _dynamic(spec: RopeSpec, positions: Tensor) -> Tensor:
    """Base grown for a sequence of max(position + 1, original) tokens. Source: /u/bloc97, /u/emozilla (NTK)."""
    lengths = (positions + 1).clamp(min=spec.original_max_position)  # [P]
    stretch = spec.factor * lengths / spec.original_max_position - (spec.factor - 1)  # [P]
    bases = spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))  # [P]
    inverse: Tensor = 1.0 / (bases[:, None] ** _exponents(spec))
    return inverse


def _llama3(spec: RopeSpec) -> Tensor:
    """Long wavelengths divided by factor, short ones kept, a ramp between, if there is a between (not in Llama 4).

    Source: Llama 3.1.
    """
    plain, original = _plain(spec), spec.original_max_position
    wavelengths = 2 * math.pi / plain
    longest, shortest = original / spec.low_freq_factor, original / spec.high_freq_factor
    scaled = torch.where(wavelengths > longest, plain / spec.factor, plain)
    if spec.low_freq_factor == spec.high_freq_factor:
        return scaled
    ramp = (original / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smoothed = (1 - ramp) * scaled / spec.factor + ramp * scaled
    between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(between, smoothed, scaled)


def _yarn(spec: RopeSpec) -> Tensor:
    """Interpolated and extrapolated frequencies blended by a ramp over the dimensions. Source: YaRN (2309.00071)."""
    powers = spec.theta ** _exponents(spec)
    low, high = _yarn_range(spec)
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    blended: Tensor = 1.0 / (spec.factor * powers) * (1 - keep) + 1.0 / powers * keep
    return blended


def _yarn_range(spec: RopeSpec) -> tuple[float, float]:
    """Between which pair indices the ramp runs."""
    low, high = _yarn_dimension(spec, spec.beta_fast), _yarn_dimension(spec, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_dimension(spec: RopeSpec, rotations: float) -> float:
    """The pair index that turns `rotations` times within the original context."""
    turns = spec.original_max_position / (rotations * 2 * math.pi)
    return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))


def _yarn_amplitude(spec: RopeSpec) -> float:
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope_amplitude(spec: RopeSpec) -> float:
    if spec.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))
