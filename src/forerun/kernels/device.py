"""The device kernels run on: which one, how much memory it has free, and when its work is done.

Knows: torch's names for devices. Does not know: kernels, models.
"""

from __future__ import annotations

import torch

from forerun.errors import ResourceError

DEVICES = ("auto", "cpu", "cuda")
CPU = torch.device("cpu")


def has_cuda() -> bool:
    """Whether torch sees a card."""
    return torch.cuda.is_available()


def cuda_device() -> torch.device:
    """The first card; raises ResourceError where torch sees none."""
    if has_cuda():
        return torch.device("cuda", 0)
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    raise ResourceError(
        f"device 'cuda' was asked for, but torch {torch.__version__} ({built}) sees no CUDA device: install a build of "
        "torch for CUDA and NVIDIA's driver, make the card visible (CUDA_VISIBLE_DEVICES), or choose device 'cpu'"
    )


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a card; None for the host, which `models.memory` knows about."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def synchronize(device: torch.device) -> None:
    """Wait until a card has done what it was given; the host's work is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
