"""Kernels that call the bit tricks of attention alone; imported by tests once Triton is there."""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.triton.attention_tiles import count_bits, select_bit


@triton.jit
def bits_kernel(words, counts, places):
    """For one word a program: how many bits are set, and where the 1st to 64th are [64]."""
    word, rank = tl.load(words + tl.program_id(0)), tl.arange(0, 64)
    tl.store(counts + tl.program_id(0), count_bits(word))
    tl.store(places + tl.program_id(0) * 64 + rank, select_bit(word, rank))
