"""Triton's tests run on the GPU where there is one, else under Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Calls of functions within kernels do not look through Triton's language again, as the kernel's launch did."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    from triton.language.standard import sum as of_the_core
    from triton.runtime import interpreter

    launched = interpreter._patch_lang(of_the_core.fn)  # launches do that for the names that kernels know
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            interpreter.InterpretedFunction, "__call__", lambda self, *args, **named: self.rewrite()(*args, **named)
        )
        yield
    launched.restore()


@pytest.fixture
def device() -> torch.device:
    """Where the kernels' tensors lie."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def kernels(device: torch.device) -> Any:
    """Triton's table of ops on that device."""
    from forerun.kernels.triton.backend import TritonKernels

    return TritonKernels(device)
