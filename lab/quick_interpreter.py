"""Triton's interpreter, several times as quick: for the rehearsal of gpu.py, and for tests.

Knows: two private names of the interpreter. Does not know: kernels.
"""

from __future__ import annotations

from typing import Any


def quicken() -> None:
    """Before every call of a function within a kernel the interpreter looks for operations to replace in all of
    Triton's language, as it did when the kernel was launched. From now on it does that at launches alone.
    """
    from triton.language.standard import sum as of_the_language
    from triton.runtime import interpreter

    def call(function: Any, *given: Any, **named: Any) -> Any:
        return function.rewrite()(*given, **named)

    interpreter._patch_lang(of_the_language.fn)  # launches replace what kernels import, not what the language does
    interpreter.InterpretedFunction.__call__ = call
