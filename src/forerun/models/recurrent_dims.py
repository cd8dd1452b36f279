"""The shapes of recurrent layers, which stand in place of attention in some layers of a decoder.

Knows: their sizes, which layers have them, how many parameters they hold. Does not know: config.json's spelling (a
Family does), tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.recurrent_ops import DeltaHeads
from forerun.models.fields import THROUGH_TRANSFORMERS, what_is_wrong

MAX_TAPS = 64  # of a convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaDims:
    """The layers that are gated delta nets (2412.06464) in place of attention, and which layers these are."""

    heads: DeltaHeads
    taps: int  # of the convolution
    layers: frozenset[int]
    gate_rank: int = 0  # of the matrices into gates for each channel of keys and of values (Kimi); 0: as Qwen has them

    @property
    def num_decays(self) -> int:
        """Gates that a state is multiplied with, of all heads."""
        return self.heads.num_values * (self.heads.key_dim if self.gate_rank else 1)

    def num_parameters(self, hidden_size: int) -> int:
        """Entries of one such layer's matrices, convolution and vectors."""
        heads, rank = self.heads, self.gate_rank
        gates = heads.values_size + self.num_decays
        made = hidden_size * (2 * rank if rank else gates) + rank * gates
        others = heads.row_size + heads.num_values + heads.values_size  # the output projection among them
        vectors = heads.num_values + self.num_decays + heads.value_dim
        return made + hidden_size * others + heads.row_size * self.taps + vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvDims:
    """The layers that are short convolutions between two gates (LFM2)."""

    taps: int
    layers: frozenset[int]

    def num_parameters(self, hidden_size: int) -> int:
        """Entries of one such layer's matrices and convolution."""
        return hidden_size * (4 * hidden_size + self.taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaDims:
    """The layers that are Mamba-2 (2405.21060) in place of attention or beside it."""

    heads: DeltaHeads  # groups of b and c are its heads of keys
    taps: int  # of the convolution
    layers: frozenset[int]
    beside: bool = False  # attention reads the same, and the two outputs are added
    conv_bias: bool = True
    norm: Literal["", "before_gate", "after_gate"] = "after_gate"  # of what the state space gives
    factors: tuple[float, float, float, float, float] = (1, 1, 1, 1, 1)  # of gate, x, b, c and steps
    out_factor: float = 1.0  # of what the layer gives

    def num_parameters(self, hidden_size: int) -> int:
        """Entries of one such layer's matrices, convolution and vectors."""
        heads = self.heads
        rows = heads.row_size + 2 * heads.values_size + heads.num_values  # the output projection among them
        conv = heads.row_size * (self.taps + self.conv_bias)
        return hidden_size * rows + conv + 3 * heads.num_values + heads.values_size * bool(self.norm)


RecurrentDims = DeltaDims | ConvDims | MambaDims


def mamba_heads(num_heads: int, head_dim: int, num_groups: int, state_dim: int) -> DeltaHeads:
    """The heads of Mamba-2; raises CheckpointError if groups do not divide them."""
    if num_heads % num_groups:
        raise CheckpointError(
            f"config.json: {num_heads} heads of Mamba-2 are no multiple of their {num_groups} groups; correct the file"
        )
    return DeltaHeads(num_groups, num_heads, state_dim, head_dim)


def state_shapes(dims: RecurrentDims, hidden_size: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """What a sequence keeps of a layer: inputs of the convolution and channels; heads, key_dim and value_dim."""
    if isinstance(dims, ConvDims):
        return (dims.taps - 1, hidden_size), (0, 0, 0)
    heads = dims.heads
    return (dims.taps - 1, heads.row_size), (heads.num_values, heads.key_dim, heads.value_dim)


def layers_of(kinds: tuple[str, ...], kind: str, attends: str, num_layers: int) -> frozenset[int]:
    """The layers of a kind that do not attend, where config.json names the kind of each; raises UnsupportedError."""
    if (wrong := what_is_wrong(kinds, (kind, attends), num_layers)) is not None:
        raise UnsupportedError(
            f"config.json: layer_types must name one of {kind}, {attends} for each of {num_layers} layers, got "
            f"{wrong}; correct the file"
        )
    if attends not in kinds:
        raise UnsupportedError(
            f"config.json: no layer has {attends}; forerun itself runs models of recurrent layers only if one layer at "
            f"least has it; {THROUGH_TRANSFORMERS}"
        )
    return frozenset(layer for layer, found in enumerate(kinds) if found == kind)
