"""Where a tensor's memory begins, if C++ would read it as it is.

Knows: dtypes and contiguity. Does not know: ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import KernelError


def address_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of a contiguous tensor of that dtype; raises KernelError for any other."""
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise KernelError(f"an op was given {tensor.dtype} {list(tensor.shape)}, it needs contiguous {dtype}")
    return tensor.data_ptr()


def floats_of(tensor: Tensor) -> int:
    """The address of contiguous float32."""
    return address_of(tensor, torch.float32)
