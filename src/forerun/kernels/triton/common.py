"""What the Triton kernels share: roundings, and how kernels are launched.

Knows: number formats, the compiler's options, the interpreter's gaps. Does not know: ops, products (`products`).

Three things could give a row other bits in another batch, and are shut out here. The compiler may fuse a product and a
sum in one variant of a kernel and not in another: it is told never to (`EXACT`), and fused sums are written as such.
It lays a reduction out by how wide it may load, so every argument is aligned alike (`aligned`). And an integer that
happens to be 1 or a multiple of 16 makes a variant of its own, so sizes are compile-time constants of a layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EXACT = {"enable_fp_fusion": False}  # launch options of every kernel
ALIGNMENT = 16  # bytes; what the compiler looks at


def aligned(x: Tensor) -> Tensor:
    """`x` itself if it is contiguous and starts at a multiple of 16 bytes, as fresh tensors do, else a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`: how long the compiler wants a tile to be."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def warps_for(size: int) -> int:
    """Warps of a program that holds one row of `size` numbers in registers, up to 32 a thread."""
    return min(16, max(1, power_of_two(size) // 1024))


def device_copy(values: list[int], device: torch.device) -> Tensor:
    """Integers as an int64 tensor on `device`; the host does not wait."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@triton.jit
def round_to_bfloat16(x):
    """float32 to the nearest bfloat16, ties to even, NaN kept; by its bits, since the interpreter's cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(x == x, rounded, 0x7FC0)
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_integer(x):
    """The nearest integer, ties to even, of |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0
