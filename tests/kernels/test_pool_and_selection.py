"""The thread pool under stress, and the choice of kernels."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from tests.kernels.cases import ISAS, cpu_kernels

from forerun.errors import KernelError
from forerun.kernels.reference import OPS
from forerun.kernels.select import KernelTable, Selection, select_kernels, selection_report


def test_many_short_jobs_with_naps_between_them() -> None:
    kernels = cpu_kernels(threads=4)
    packed = kernels.pack_linear(torch.randn(700, 200))
    inputs = [torch.randn(rows, 200) for rows in (1, 2, 9)]
    expected = [cpu_kernels(threads=1).linear(x, packed) for x in inputs]
    for round_number in range(1500):
        for x, result in zip(inputs, expected, strict=True):
            assert torch.equal(kernels.linear(x, packed), result)
        if round_number % 150 == 0:
            time.sleep(0.001)  # long enough for the workers to fall asleep


def test_callers_in_several_threads() -> None:
    kernels = cpu_kernels(threads=3)
    packed = kernels.pack_linear(torch.randn(900, 500))
    x = torch.randn(16, 500)
    expected = kernels.linear(x, packed)
    wrong: list[int] = []

    def call() -> None:
        for index in range(150):
            if not torch.equal(kernels.linear(x, packed), expected):
                wrong.append(index)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_pools_come_and_go() -> None:
    cpu_kernels()
    from forerun.kernels.cpu.backend import CpuKernels

    for _ in range(50):
        kernels = CpuKernels(threads=4)
        kernels.linear(torch.randn(3, 100), kernels.pack_linear(torch.randn(300, 100)))
        del kernels


def test_selection() -> None:
    reference = select_kernels("reference")
    assert set(reference.describe().values()) == {"reference"}
    assert "asked for" in selection_report(reference)
    cpu_kernels()
    kernels = select_kernels("auto", threads=1)
    assert set(kernels.describe()) == set(OPS)
    assert "avx" in selection_report(kernels) or "portable" in selection_report(kernels)
    for isa in ISAS:
        try:
            assert select_kernels("cpu", isa=isa).describe()["linear"] == isa
        except KernelError as error:
            assert "not available" in str(error)
    for arguments in ({"name": "cuda"}, {"threads": 0}, {"isa": "sse9"}):
        with pytest.raises(KernelError):
            select_kernels(**arguments)  # type: ignore[arg-type]


def test_a_missing_op_comes_from_the_reference_and_is_listed() -> None:
    class OnlyNorms:
        name = "partial"

        def describe(self) -> dict[str, str]:
            return {"rms_norm": "partial"}

        def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            return x

    kernels = KernelTable(OnlyNorms(), Selection("partial", "a test"))
    assert kernels.describe()["rms_norm"] == "partial"
    assert kernels.describe()["linear"] == "reference"
    assert "linear" in selection_report(kernels)  # type: ignore[arg-type]
    assert kernels.linear(torch.ones(1, 2), kernels.pack_linear(torch.ones(1, 2))).tolist() == [[2.0]]  # type: ignore[attr-defined]


def test_without_the_extension_the_reference_says_why() -> None:
    program = """
import sys
sys.modules["forerun.kernels.cpu._native"] = None
from forerun.errors import KernelError
from forerun.kernels.select import select_kernels, selection_report
print(selection_report(select_kernels()))
try:
    select_kernels("cpu")
except KernelError as error:
    print("refused:", error)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "reference" in out
    assert "extension is not installed" in out
    assert "refused:" in out
    assert "pip install" in out
