"""Choosing the kernels: which backend runs each op, and why.

Knows: backends and what they declare. Does not know: what the ops compute, nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from forerun.errors import KernelError
from forerun.kernels.ops import Kernels
from forerun.kernels.reference import OPS, ReferenceKernels

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Recorder

BACKENDS = ("auto", "cpu", "reference")


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
        self.backend = backend
        self.selection = selection
        self._places: dict[str, str] = {**reference.describe(), **backend.describe()}
        for op in OPS:
            function: Callable[..., Any] = getattr(backend, op, None) or getattr(reference, op)
            setattr(self, op, function)

    @contextmanager
    def replaced_by(self, other: Any) -> Iterator[None]:
        """Inside this context everyone who holds the table calls the ops of `other`. One thread at a time."""
        own = {op: getattr(self, op) for op in OPS}
        try:
            for op in OPS:
                setattr(self, op, getattr(other, op))
            yield
        finally:
            for op, function in own.items():
                setattr(self, op, function)

    def describe(self) -> dict[str, str]:
        """Op name -> where it runs."""
        return dict(self._places)


def select_kernels(name: str = "auto", threads: int | None = None, isa: str | None = None) -> Kernels:
    """The kernels to use: "cpu" (C++), "reference" (torch), or "auto" for the best that is installed."""
    if name not in BACKENDS:
        raise KernelError(f"kernels {name!r} is not one of {', '.join(BACKENDS)}")
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
    backend = CpuKernels(threads, isa)
    reason = f"{backend.engine.isa} on {backend.num_threads} thread(s)"
    return _table(backend, Selection("cpu", reason))


@contextmanager
def recording(kernels: Kernels, max_rows: int) -> Iterator[Recorder | None]:
    """Inside this context the ops of `kernels` are written down by the recorder it gives; None if they cannot be."""
    backend = getattr(kernels, "backend", None)
    if backend is None or not isinstance(kernels, KernelTable) or not hasattr(backend, "engine"):
        yield None
        return
    from forerun.kernels.cpu.program import Recorder

    recorder = Recorder(backend, max_rows)
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
