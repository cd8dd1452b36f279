"""Products of float32 rows with stored matrices on tensor cores, as precise as float32: what runs inside kernels.

Knows: how a float32 splits into bfloat16 numbers, and one tile of a product. Does not know: which matrix, whose rows.

Tensor cores multiply bfloat16 numbers exactly and sum in float32. A float32 is exactly the sum of three bfloat16
numbers (8 bits of its 24 each), a float16 of two. So a row's product with a bfloat16 matrix is three products, and no
bit of either operand is lost; of float16 and float32 matrices the pairs of parts below 2^-24 of the whole are left out
(Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype", arXiv 1904.06376). The parts' sums
of one tile start at zero and are added to the row's total by an ordinary float32 addition, since the sums inside a
tensor core are rounded towards zero and may not grow long.

**Row invariance.** A tile has ROWS rows whatever the batch, so that all rows meet the same instructions in the same
order; a larger batch has more tiles, never other ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # of a tile: the fewest a tensor core takes
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # on CPU tensors, whose products are float32's


@triton.jit
def dot(a, b, total):
    """a [ROWS, k] times b [k, n], both bfloat16, plus total [ROWS, n] float32."""
    if INTERPRETED:  # the interpreter holds bfloat16 numbers as bits
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def top_bits(x):
    """The first 8 bits of float32 numbers, the others zero: a bfloat16, but still float32."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def three_parts(x):
    """float32 as three bfloat16 numbers that add up to it; what is not finite is in all of them."""
    finite = tl.abs(x) < float("inf")
    first = top_bits(x)
    rest = tl.where(finite, x - first, x)
    second = top_bits(rest)
    third = tl.where(finite, rest - second, x)
    return first.to(tl.bfloat16), second.to(tl.bfloat16), third.to(tl.bfloat16)


@triton.jit
def tile_product(x, w):
    """x [ROWS, k] float32 times w [k, n] of a stored type -> [ROWS, n] float32, the smallest parts summed first."""
    x1, x2, x3 = three_parts(x)
    total = tl.zeros((x.shape[0], w.shape[1]), tl.float32)
    if w.dtype == tl.bfloat16:
        total = dot(x2, w, dot(x3, w, total))
        return dot(x1, w, total)
    else:
        w1, w2, w3 = three_parts(w.to(tl.float32))
        if w.dtype == tl.float32:
            total = dot(x1, w3, total)
        total = dot(x1, w2, dot(x2, w2, dot(x3, w1, total)))
        return dot(x1, w1, dot(x2, w1, total))
