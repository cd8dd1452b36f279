"""The device kernels run on: which one, how much memory it has free, what goes there and comes back.

Knows: torch's names for devices. Does not know: kernels, models.

What the host uploads goes through pinned memory, and the host goes on at once. Where it needs numbers of a GPU it
must wait for all work before them: `to_host` is the one place where a step does that, so that waits can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.errors import ResourceError

DEVICES = ("auto", "cpu", "cuda")
CPU = torch.device("cpu")


def has_cuda() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def num_gpus() -> int:
    """How many GPUs torch sees."""
    return torch.cuda.device_count() if has_cuda() else 0


def gpu_kind() -> str:
    """What the first GPU is called; "" where torch sees none."""
    return torch.cuda.get_device_name(0) if has_cuda() else ""


def use_gpu(index: int) -> None:
    """Make a GPU the one of this thread: the first of this process is, unless it is one of several ranks."""
    torch.cuda.set_device(index)


def cuda_device() -> torch.device:
    """The GPU of this thread; raises ResourceError where torch sees none."""
    if has_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    raise ResourceError(
        f"device 'cuda' was asked for, but torch {torch.__version__} ({built}) sees no CUDA device: install a build of "
        "torch for CUDA and NVIDIA's driver, make the GPU visible (CUDA_VISIBLE_DEVICES), or choose device 'cpu'"
    )


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a GPU; None for the host, which `models.memory` knows about."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; the host's work is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def given_work(device: torch.device) -> Callable[[], bool]:
    """Says whether a GPU has done all that this thread has given it until now, without waiting."""
    return _mark(device).query


def _mark(device: torch.device) -> torch.cuda.Event:
    """An event behind all that this thread has given a GPU until now."""
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark


def to_host(x: Tensor) -> Tensor:
    """A copy of `x` on the host, which waits for it; `x` itself if it is there."""
    return x.cpu()


def all_to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Several tensors of 64-bit numbers on the host, brought there in one copy."""
    if all(x.device == CPU for x in tensors):
        return tensors
    joined = to_host(torch.cat([x.contiguous().view(torch.int64).flatten() for x in tensors]))
    parts = joined.split_with_sizes([x.numel() for x in tensors])
    return tuple(part.view(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True))


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor copied to `device`, or the tensor itself if that is the host; the host does not wait."""
    if host.device == device:
        return host
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def upload(host: Tensor, target: Tensor) -> None:
    """Overwrite `target` with a host tensor; the host does not wait."""
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


def indices_on(indices: Sequence[int], device: torch.device) -> Tensor:
    """Indices as a tensor [len(indices)] int64 on `device`; indexing with a list would wait for a GPU."""
    return to_device(torch.tensor(list(indices), dtype=torch.int64), device)


def enqueue_to_host(rows: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Copies on the host, and what waits for them: a GPU makes them behind what it was given before."""
    if not rows[0].is_cuda:
        return list(rows), lambda: None
    on_host = [torch.empty_like(row, device="cpu", pin_memory=True).copy_(row, non_blocking=True) for row in rows]
    return on_host, _mark(rows[0].device).synchronize
