"""Choosing the kernels: which backend, and why.

Knows: which backends there are and where they run. Does not know: what the ops compute, nor models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from forerun.errors import KernelError, ResourceError, suggestion
from forerun.kernels.device import CPU, DEVICES, cuda_device, has_cuda
from forerun.kernels.ops import Kernels
from forerun.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Recorder

BACKENDS = ("auto", "cpu", "triton", "reference")
ACTIVATIONS = ("auto", "float32")
# Every instruction set there are kernels for, on whatever CPU; csrc/kernel_table.h has the same.
AMX = "avx512amx"
ISAS = (AMX, "avx512vnni", "avx512", "avx2vnni", "avx2", "neoni8mm", "neondot", "neon", "portable")


def select_kernels(
    name: str = "auto", threads: int | None = None, device: str = "cpu", pin: bool | None = None,
    activations: str = "auto", first_core: int = 0,
) -> Kernels:  # fmt: skip
    """The kernels to use: "cpu" (C++), "triton" (a GPU), "reference" (torch), or "auto" for the best on `device`.

    "cpu:avx2" and the like: C++ with an instruction set that is not the machine's best; the same bits, but of AMX.
    device: "cpu", "cuda", or "auto" for a GPU where there is one and kernels for it. activations: "auto" rounds them to
    8 bits for products with matrices of integers, "float32" does not. pin, first_core: see `cores.pins`. Raises
    KernelError for what is not installed or does not run there, ResourceError for want of a GPU or of threads.
    """
    name, _, isa = (given := name).partition(":")
    if name not in BACKENDS or (given != name and name != "cpu"):
        meant = f"; did you mean cpu:{given.lower()}?" if given.lower() in ISAS else suggestion(given, BACKENDS)
        raise KernelError(
            f"kernels {given!r} is not one of {', '.join(BACKENDS)}, or cpu:ISA for an instruction set{meant}"
        )
    if given == "cpu:":
        raise KernelError("kernels 'cpu:' names no instruction set: write one after the colon, as in cpu:avx2")
    if isa and isa.lower() not in ISAS:
        raise KernelError(
            f"kernels {given!r}: there is no instruction set {isa!r}; forerun has kernels for {', '.join(ISAS)}"
            f"{suggestion(isa, ISAS)}"
        )
    if activations not in ACTIVATIONS:
        raise KernelError(f"activations {activations!r} is not one of {', '.join(ACTIVATIONS)}")
    if device not in DEVICES:
        raise KernelError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    if device == "cuda" and name in ("cpu", "reference"):
        raise KernelError(f"kernels {name!r} run on the CPU, but device 'cuda' was asked for: choose kernels 'triton'")
    if name == "triton" or (device != "cpu" and runs_on_gpu(name, device, can_use_gpu())):
        if activations == "float32":
            raise KernelError(
                "activations 'float32' are for CPUs only, on a GPU products with integers round activations to 8 bits: "
                "choose device 'cpu', leave activations at 'auto', or take a bfloat16 checkpoint of the model"
            )
        return _triton_kernels(device)
    return _host_kernels(name, threads, isa.lower(), pin, first_core, activations == "float32")


def can_use_gpu() -> bool:
    """Whether there is a GPU, and kernels for it."""
    return has_cuda() and find_spec("triton") is not None


def runs_on_gpu(name: str, device: str, has_gpu: bool) -> bool:
    """Whether `select_kernels` takes a GPU with these arguments, where there is one (`can_use_gpu`) or is none."""
    if name == "triton":
        return device == "cuda" or (device == "auto" and not _is_interpreted())
    return device == "cuda" or (device == "auto" and name == "auto" and has_gpu)


def has_amx() -> bool:
    """Whether this CPU has AMX, and C++ kernels for it."""
    try:
        from forerun.kernels.cpu import _native
    except ImportError:
        return False
    return AMX in _native.available_isas()


def takes_amx(name: str) -> bool:
    """Whether `select_kernels` takes AMX with this name, where a CPU has it and runs the model."""
    return name.lower() in ("auto", "cpu", f"cpu:{AMX}")


def _is_interpreted() -> bool:
    if find_spec("triton") is None:
        return False
    from forerun.kernels.triton.backend import is_interpreted

    return is_interpreted()


def _triton_kernels(device: str) -> Kernels:
    """The Triton kernels on a GPU; on the CPU only where Triton interprets them, as tests have it."""
    if find_spec("triton") is None:
        no_gpu = (
            "" if has_cuda() else "; they need an NVIDIA GPU, too, and torch sees none here: kernels 'cpu' need none"
        )
        raise KernelError(
            'triton is not installed, which the kernels for CUDA need: pip install ".[gpu]" in the checkout of forerun'
            f"{no_gpu}"
        )
    from forerun.kernels.triton.backend import TritonKernels

    on_host = device == "cpu" or (device == "auto" and _is_interpreted())
    if device == "auto" and not on_host and not has_cuda():
        raise ResourceError("kernels 'triton' need an NVIDIA GPU, and torch sees no CUDA device: choose kernels 'cpu'")
    backend = TritonKernels(CPU if on_host else cuda_device())
    reason = "interpreted, for tests" if backend.device == CPU else torch.cuda.get_device_name(backend.device)
    return _because(reason, backend)


def _host_kernels(
    name: str, threads: int | None, isa: str, pin: bool | None, first_core: int, float_activations: bool
) -> Kernels:  # fmt: skip
    backend, reason = _host_backend(name, threads, isa, pin, first_core)
    backend.float_activations = float_activations
    return _because(reason + "; activations in float32" * float_activations, backend)


def _host_backend(
    name: str, threads: int | None, isa: str, pin: bool | None, first_core: int
) -> tuple[ReferenceKernels, str]:  # fmt: skip
    """The backend, and why that one."""
    if name == "reference":
        return ReferenceKernels(), "asked for"
    try:
        from forerun.kernels.cpu.backend import CpuKernels
    except ImportError as error:
        reason = f"the C++ extension is not installed ({error})"
        if name == "cpu":
            raise KernelError(
                f"{reason}. Install a C++17 compiler and run `pip install .` again, or choose kernels 'reference'."
            ) from error
        return ReferenceKernels(), reason
    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise KernelError(f"threads must be from 1 to {cores}, the cores of this machine; got {threads}")
    backend = CpuKernels(threads, isa or None, pin, first_core)
    reason = f"{backend.engine.isa} on {backend.num_threads} thread(s){', a core each' * backend.is_pinned}"
    if has_cuda() and find_spec("triton") is None:
        reason += '; for the GPU that is there install triton (pip install ".[gpu]" in the checkout of forerun)'
    return backend, reason


@contextmanager
def recording(kernels: Kernels, max_rows: int, **options: int) -> Iterator[Recorder | None]:
    """Inside this context ops that this thread calls are written down by the recorder it gives; None if they cannot be.

    `options`: those of the recorder.
    """
    engine = getattr(kernels, "engine", None)
    if engine is None:
        yield None
        return
    from forerun.kernels.cpu.program import Recorder

    with Recorder(engine, max_rows, **options) as recorder:
        yield recorder


def _because(reason: str, kernels: Kernels) -> Kernels:
    kernels.reason = reason
    return kernels
