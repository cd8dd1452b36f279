"""Triton's tests run on the GPU where there is one, else under Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from quick_interpreter import quicken

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


@pytest.fixture(scope="session", autouse=True)
def interpreter_is_quick() -> None:
    if not torch.cuda.is_available() and find_spec("triton") is not None:
        quicken()


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
