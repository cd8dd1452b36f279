"""Choosing the kernels: which backend runs each op, and why.

Knows: backends and what they declare. Does not know: what the ops compute, nor models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, cast

import torch

from forerun.errors import KernelError
from forerun.kernels.device import CPU, DEVICES, cuda_device, has_cuda
from forerun.kernels.ops import Kernels
from forerun.kernels.reference import OPS, ReferenceKernels

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Recorder

BACKENDS = ("auto", "cpu", "triton", "reference")


@dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen and the reason, for people to read."""

    backend: str
    reason: str


class KernelTable:
    """The ops of one backend; those it lacks come from the reference and are listed by `describe`."""

    def __init__(self, backend: Any, selection: Selection) -> None:
        reference = ReferenceKernels()
        self.name: str = backend.name
        self.device: torch.device = getattr(backend, "device", CPU)
        self.backend = backend
        self.selection = selection
        self._replacing = RLock()
        self._places: dict[str, str] = {**reference.describe(), **backend.describe()}
        for op in OPS:
            function: Callable[..., Any] = getattr(backend, op, None) or getattr(reference, op)
            setattr(self, op, function)

    @contextmanager
    def replaced_by(self, other: Any) -> Iterator[None]:
        """Inside this context this thread calls the ops of `other` when it calls those of the table.

        Other threads, whose engines may be computing with the table, go on calling its own.
        """
        with self._replacing:
            own = {op: getattr(self, op) for op in OPS}
            try:
                for op, function in own.items():
                    setattr(self, op, _on_this_thread(getattr(other, op), function))
                yield
            finally:
                for op, function in own.items():
                    setattr(self, op, function)

    def describe(self) -> dict[str, str]:
        """Op name -> where it runs."""
        return dict(self._places)


def _on_this_thread(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """An op that is `here` where the calling thread calls it."""
    caller = get_ident()

    def op(*args: Any, **kwargs: Any) -> Any:
        return (here if get_ident() == caller else elsewhere)(*args, **kwargs)

    return op


def select_kernels(
    name: str = "auto", threads: int | None = None, isa: str | None = None, device: str = "cpu"
) -> Kernels:
    """The kernels to use: "cpu" (C++), "triton" (a GPU), "reference" (torch), or "auto" for the best on `device`.

    device: "cpu", "cuda", or "auto" for a card where there is one and kernels for it. Raises KernelError for what is
    not installed or does not run there, ResourceError where there is no card.
    """
    if name not in BACKENDS:
        raise KernelError(f"kernels {name!r} is not one of {', '.join(BACKENDS)}")
    if device not in DEVICES:
        raise KernelError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    if device == "cuda" and name in ("cpu", "reference"):
        raise KernelError(f"kernels {name!r} run on the CPU, but device 'cuda' was asked for: choose kernels 'triton'")
    if name == "triton" or device == "cuda" or (device == "auto" and name == "auto" and _can_use_card()):
        return _triton_kernels(device)
    return _host_kernels(name, threads, isa)


def _can_use_card() -> bool:
    return has_cuda() and find_spec("triton") is not None


def _triton_kernels(device: str) -> Kernels:
    """The Triton kernels on a card; on the CPU only where Triton interprets them, as tests have it."""
    if find_spec("triton") is None:
        raise KernelError("triton is not installed, which the kernels for CUDA need: pip install 'forerun[gpu]'")
    from forerun.kernels.triton.backend import TritonKernels, is_interpreted

    on_host = device == "cpu" or (device == "auto" and is_interpreted())
    backend = TritonKernels(CPU if on_host else cuda_device())
    reason = "interpreted, for tests" if backend.device == CPU else torch.cuda.get_device_name(backend.device)
    return _table(backend, Selection("triton", reason))


def _host_kernels(name: str, threads: int | None, isa: str | None) -> Kernels:
    if name == "reference":
        return _table(ReferenceKernels(), Selection("reference", "asked for"))
    try:
        from forerun.kernels.cpu.backend import CpuKernels
    except ImportError as error:
        reason = f"the C++ extension is not installed ({error})"
        if name == "cpu":
            raise KernelError(
                f"{reason}. Install a C++17 compiler and run `pip install .` again, or choose kernels 'reference'."
            ) from error
        return _table(ReferenceKernels(), Selection("reference", reason))
    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise KernelError(f"threads must be from 1 to {cores}, the cores of this machine; got {threads}")
    backend = CpuKernels(threads, isa)
    reason = f"{backend.engine.isa} on {backend.num_threads} thread(s)"
    if has_cuda() and find_spec("triton") is None:
        reason += "; for the card that is there install triton (pip install 'forerun[gpu]')"
    return _table(backend, Selection("cpu", reason))


@contextmanager
def recording(kernels: Kernels, max_rows: int, **options: int) -> Iterator[Recorder | None]:
    """Inside this context the ops of `kernels` are written down by the recorder it gives; None if they cannot be.

    `options`: those of the recorder.
    """
    backend = getattr(kernels, "backend", None)
    if backend is None or not isinstance(kernels, KernelTable) or not hasattr(backend, "engine"):
        yield None
        return
    from forerun.kernels.cpu.program import Recorder

    recorder = Recorder(backend, max_rows, **options)
    with kernels.replaced_by(recorder):
        yield recorder


def selection_report(kernels: Kernels) -> str:
    """A few lines: the backend, the reason, and each op that runs elsewhere than most."""
    places = kernels.describe()
    selection = getattr(kernels, "selection", None)
    reason = f" ({selection.reason})" if selection else ""
    by_place: dict[str, list[str]] = {}
    for op, place in places.items():
        by_place.setdefault(place, []).append(op)
    lines = [f"kernels: {kernels.name}{reason}"]
    for place, ops in sorted(by_place.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {place}: {', '.join(ops)}")
    return "\n".join(lines)


def _table(backend: Any, selection: Selection) -> Kernels:
    return cast(Kernels, KernelTable(backend, selection))
