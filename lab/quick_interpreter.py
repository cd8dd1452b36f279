"""Triton's interpreter, many times as quick: for the rehearsal of gpu.py, and for tests.

Knows: private names of the interpreter. Does not know: kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """What the interpreter does again and again is done once, what it does for nobody not at all.

    Before every call of a function within a kernel it looks for operations to replace in all of Triton's language, as
    it did when the kernel was launched; from now on at launches alone. Every integer sum and product is computed once
    more in 64 bits and compared with what 32 hold, for an assertion that it has switched off. Types are read from
    tables that are made anew, and shapes looked through, for every result.
    """
    from triton.language.core import block_type, tensor
    from triton.language.standard import sum as of_the_language
    from triton.runtime import interpreter

    def call(function: Any, *given: Any, **named: Any) -> Any:
        return function.rewrite()(*given, **named)

    interpreter._patch_lang(of_the_language.fn)  # launches replace what kernels import, not what the language does
    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    block_type.__init__ = by_shape(block_type.__init__)
    tensor.__init__ = by_type(tensor.__init__)


def by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`find`, asked once for each name of a type."""
    known: dict[str, Any] = {}

    def found(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = find(kind)
        return known[kind.name]

    return found


def by_shape(init: Callable[..., None]) -> Callable[..., None]:
    """`block_type.__init__`, which shares what it makes of an element's name and a shape."""
    known: dict[tuple[Any, ...], tuple[Any, int, str]] = {}

    def once(self: Any, element_ty: Any, shape: Iterable[Any]) -> None:
        key = (str(element_ty), *shape)
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            init(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name

    return once


def by_type(init: Callable[..., None]) -> Callable[..., None]:
    """`tensor.__init__`, which shares the shape in the language's own words."""
    known: dict[str, tuple[Any, Any]] = {}

    def once(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[type.name]
        else:
            init(self, handle, type)
            known[type.name] = self.shape, self.numel

    return once
