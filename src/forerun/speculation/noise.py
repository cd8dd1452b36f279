"""Keyed randomness: every random number forerun draws is a pure function of (seed, position, stream, index).

Knows: which purposes exist and how they map to streams and positions. Does not know: who draws, or why. No state, no
streams shared between requests: the noise at a position is the same whatever was drafted, batched or cached. The
generator and the exact definition of the numbers are in `forerun.kernels.philox`.
"""

from __future__ import annotations

from enum import IntEnum

from forerun.kernels.philox import gumbel, philox, uniform, uniforms

__all__ = ["Purpose", "gumbel", "philox", "step_position", "stream_id", "uniform", "uniforms"]

_STREAM_BITS_PURPOSE = 4


class Purpose(IntEnum):
    """What a random number is for; different purposes never share numbers."""

    TARGET = 0  # the target's choice at a position: the coupled rule, plain sampling and coupled drafting
    DRAFT = 1  # a drafter's own choice under the rejection rule
    ACCEPT = 2  # the uniform an acceptance test compares with
    RECOVER = 3  # the token drawn from the residual or bonus distribution


def stream_id(sample_index: int, purpose: Purpose) -> int:
    """The stream of sample `sample_index` (of a request with `n` samples) for `purpose`."""
    return (sample_index << _STREAM_BITS_PURPOSE) | int(purpose)


def step_position(root_position: int, node: int) -> int:
    """A position for randomness that belongs to one step and tree node, not to a place in the text.

    The rejection rule's acceptance depends on tokens drafted further down, so what was drawn for a position in one
    step may not be used again for it in the next; a root position occurs in one step only.
    """
    return (node + 1) << 32 | root_position
