"""Activations of a recording: tensors whose values exist only when the program runs.

Knows: the few things torch itself is asked to do in a forward pass, and how each is written down. Does not know:
kernel ops (`program`), models. Anything else done to an activation raises KernelError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.cpu import _native

_PLAIN_ACCESS = frozenset({"__get__", "data_ptr", "is_contiguous", "size", "dim", "stride", "numel", "contiguous"})


class Scribe(Protocol):
    """The recorder as an activation sees it: it writes ops down and lends memory for their results."""

    engine: _native.CpuEngine

    def buffer(self, num_rows: int, width: int) -> Activation:
        """A fresh activation [num_rows, width]."""

    def keep(self, held: Any) -> None:
        """Keep something alive whose address was written down."""


class Activation(Tensor):
    """A tensor without values yet. Kernel ops take it; torch may do to it what `_RECORDED` lists.

    The batch's own tensors are such activations too while recording: whatever torch computed from them once would be
    wrong for the next batch.
    """

    scribe: Scribe
    parent: Activation | None  # whose memory this one looks at

    @classmethod
    def over(cls, memory: Tensor, scribe: Scribe, parent: Activation | None = None) -> Activation:
        """An activation at this memory."""
        activation = memory.as_subclass(cls)
        activation.scribe = scribe
        activation.parent = parent
        return activation

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Write it down, or refuse."""
        if func.__name__ in _PLAIN_ACCESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        record = _RECORDED.get(func.__name__)
        if record is None:
            raise KernelError(f"torch's {func.__name__} on an activation cannot be recorded")
        try:
            return record(*args, **(kwargs or {}))
        except TypeError as error:
            raise KernelError(f"torch's {func.__name__} on an activation cannot be recorded so: {error}") from error

    def as_view(self, *shape: int) -> Activation:
        """The same memory in another shape."""
        with torch._C.DisableTorchFunctionSubclass():
            memory = self.as_subclass(Tensor).view(shape)
        return Activation.over(memory, self.scribe, self)


def _select_rows(x: Activation, dim: int, row_ids: Tensor) -> Activation:
    _only(dim == 0 and _is_rows(x), "only rows of floats can be selected")
    out = x.scribe.buffer(row_ids.shape[0], x.shape[1])
    x.scribe.engine.select_rows(x.data_ptr(), row_ids.data_ptr(), out.data_ptr(), *out.shape)
    return out


def _clone(x: Activation) -> Activation:
    _only(_is_rows(x), "only rows of floats can be copied")
    out = x.scribe.buffer(*x.shape)
    x.scribe.engine.select_rows(x.data_ptr(), 0, out.data_ptr(), *out.shape)
    return out


def _concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Activation:
    """Columns side by side."""
    _only(dim == 1 and all(_is_rows(x) for x in tensors), "only columns can be joined")
    first = tensors[0]
    assert isinstance(first, Activation)
    out, start = first.scribe.buffer(first.shape[0], sum(x.shape[1] for x in tensors)), 0
    for x in tensors:
        num_rows, width = x.shape
        first.scribe.engine.copy_columns(x.data_ptr(), out.data_ptr(), num_rows, width, width, 0, out.shape[1], start)
        start += width
    return out


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Activation:
    """Several activations [M, width] of one shape, stacked row by row: [M, n, width]."""
    joined = _concatenate(tensors, dim)
    return joined.as_view(joined.shape[0], len(tensors), joined.shape[1] // len(tensors))


def _flatten(x: Activation, start_dim: int = 0, end_dim: int = -1) -> Activation:
    _only((x.dim(), start_dim, end_dim) == (3, 0, 1), "only stacked rows can be flattened")
    return x.as_view(x.shape[0] * x.shape[1], x.shape[2])


def _chunk(x: Activation, chunks: int, dim: int = 0) -> list[Activation]:
    """Copies of runs of columns."""
    _only(dim == 1 and _is_rows(x) and x.shape[1] % chunks == 0, "only columns can be cut, into equal runs")
    (num_rows, stride), width = x.shape, x.shape[1] // chunks
    parts = [x.scribe.buffer(num_rows, width) for _ in range(chunks)]
    for index, part in enumerate(parts):
        x.scribe.engine.copy_columns(x.data_ptr(), part.data_ptr(), num_rows, width, stride, index * width, width, 0)
    return parts


def _add_in_place(x: Activation, other: Tensor) -> Activation:
    _only(_is_rows(x) and _is_rows(other) and other.shape == x.shape, "only activations of one shape can be added")
    x.scribe.engine.add(other.data_ptr(), x.data_ptr(), *x.shape)
    return x


def _add(x: Activation, other: Tensor) -> Activation:
    _only(_is_rows(x) and _is_rows(other), "only activations of one shape can be added")
    return _add_in_place(_clone(x), other)


def _new_full(x: Activation, size: Sequence[int], fill_value: float) -> Activation:
    _only(len(size) == 2, "only rows can be filled")
    out = x.scribe.buffer(*size)
    x.scribe.engine.fill(out.data_ptr(), out.shape[0], out.shape[1], fill_value)
    return out


def _ones_like(x: Activation) -> Activation:
    return _new_full(x, x.shape, 1.0)


def _scatter(x: Activation, dim: int, ids: Tensor, source: Tensor) -> Activation:
    """Copy the columns of `source` into the columns `ids` of x; `ids` are known while recording."""
    known = ids.dtype is torch.int64 and ids.is_contiguous() and not isinstance(ids, Activation)
    _only(dim == 1 and known and _is_rows(source), "only columns can be put into known places")
    x.scribe.keep(ids)
    x.scribe.engine.scatter_columns(
        source.data_ptr(), ids.data_ptr(), x.data_ptr(), x.shape[0], source.shape[1], x.shape[1]
    )
    return x


def _is_rows(x: object) -> bool:
    return isinstance(x, Activation) and x.dim() == 2 and x.dtype is torch.float32


def _only(possible: bool, what: str) -> None:
    if not possible:
        raise KernelError(f"{what} in a recording")


_RECORDED: Mapping[str, Callable[..., Any]] = {
    "index_select": _select_rows,
    "clone": _clone,
    "cat": _concatenate,
    "stack": _stack,
    "flatten": _flatten,
    "chunk": _chunk,
    "add_": _add_in_place,
    "add": _add,
    "__add__": _add,
    "new_full": _new_full,
    "ones_like": _ones_like,
    "index_copy_": _scatter,
}
