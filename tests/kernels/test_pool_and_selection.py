"""The thread pool under stress, and the choice of kernels."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.cases import ISAS, cpu_kernels

from forerun.errors import KernelError
from forerun.kernels.ops import OPS
from forerun.kernels.select import ISAS as KNOWN
from forerun.kernels.select import select_kernels

TASKS = Path("/proc/self/task")  # a file a thread, on Linux


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


@pytest.mark.skipif(not TASKS.is_dir(), reason="this system does not list a process's threads")
def test_pools_that_go_take_their_threads_with_them() -> None:
    cpu_kernels()
    from forerun.kernels.cpu.backend import CpuKernels

    x, weight = torch.randn(3, 100), torch.randn(300, 100)
    expected = cpu_kernels(threads=1).linear(x, cpu_kernels(threads=1).pack_linear(weight))
    before = settled_num_threads()  # threads of other tests' pools may still be ending
    for _ in range(50):
        kernels = CpuKernels(threads=4)
        assert torch.equal(kernels.linear(x, kernels.pack_linear(weight)), expected)
        assert num_threads() >= before + 3
        del kernels
    for _ in range(1000):
        if num_threads() <= before:
            return
        time.sleep(0.01)
    raise AssertionError(f"{num_threads() - before} threads are left over")


def settled_num_threads() -> int:
    """The number of threads once it has not changed for a while."""
    gc.collect()
    counts = [num_threads()]
    while len(counts) < 20 or len(set(counts[-20:])) > 1:
        time.sleep(0.01)
        counts.append(num_threads())
    return counts[-1]


def num_threads() -> int:
    return len(list(TASKS.iterdir()))


def test_the_reference_by_name() -> None:
    reference = select_kernels("reference")
    assert reference.describe() == dict.fromkeys(OPS, "reference")
    assert (reference.name, reference.reason) == ("reference", "asked for")


def test_auto_takes_the_best_instruction_set_for_every_op() -> None:
    best = cpu_kernels().engine.isa
    native = pytest.importorskip("forerun.kernels.cpu._native")
    assert best == native.available_isas()[0]
    kernels = select_kernels("auto", threads=1)
    assert kernels.describe()["linear"] == best
    assert (kernels.name, kernels.reason) == (f"cpu-{best}", f"{best} on 1 thread(s)")
    exact = select_kernels("auto", threads=1, activations="float32")
    assert exact.reason == f"{best} on 1 thread(s); activations in float32"


def test_threads_are_pinned_from_the_core_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pytest.importorskip("forerun.kernels.cpu.backend")
    asked = list[Any]()
    monkeypatch.setattr(backend, "pins", lambda *given, **named: asked.append((*given, named)) or [])
    select_kernels("cpu", threads=1, pin=True, first_core=3)
    assert asked == [(1, True, {"first": 3})]


@pytest.mark.parametrize("isa", ISAS)
def test_an_instruction_set_by_name_or_those_there_are(isa: str) -> None:
    available = pytest.importorskip("forerun.kernels.cpu._native").available_isas()
    if isa in available:
        assert select_kernels(f"cpu:{isa}").describe()["linear"] == isa
    else:
        with pytest.raises(KernelError, match=f"{isa}.* is not available here; choose from {', '.join(available)}"):
            select_kernels(f"cpu:{isa}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "cuda"}, "'cuda' is not one of auto, cpu, triton, reference"),
        ({"threads": 0}, "threads must be from 1 to"),
        ({"name": "cpu:sse9"}, "there is no instruction set 'sse9'; forerun has kernels for avx512amx, .*portable$"),
        ({"name": "cpu:avx512vni"}, "there is no instruction set 'avx512vni'; .*did you mean avx512vnni"),
        ({"name": "avx2"}, "'avx2' is not one of auto, .*; did you mean cpu:avx2"),
        ({"name": "reference:avx2"}, "'reference:avx2' is not one of"),
        ({"name": "cpu:"}, "names no instruction set"),
        ({"activations": "int4"}, "activations 'int4' is not one of auto, float32"),
        ({"name": "triton", "activations": "float32"}, "'float32' are for CPUs only.*: choose device 'cpu'"),
    ],
)
def test_what_there_is_not_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        select_kernels(**arguments)


def test_instruction_sets_in_capitals_are_the_same() -> None:
    pytest.importorskip("forerun.kernels.cpu._native")
    assert select_kernels("cpu:PORTABLE").describe()["linear"] == "portable"


def test_the_instruction_sets_are_those_of_the_sources() -> None:
    sources = "".join(path.read_text("utf-8") for path in (Path(__file__).parents[2] / "csrc").glob("kernels_*.cpp"))
    assert set(KNOWN) == set(re.findall(r'(?:#define FORERUN_ISA_NAME|table\.name =) "(\w+)"', sources))


def test_triton_without_a_gpu_says_that_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.kernels.select.has_cuda", lambda: False)
    monkeypatch.setattr("forerun.kernels.select.find_spec", lambda _: None)
    with pytest.raises(KernelError, match="triton is not installed.*need an NVIDIA GPU, too, and torch sees none here"):
        select_kernels("triton", device="auto")


def test_ops_without_cpp_come_from_the_reference_and_are_listed() -> None:
    places = cpu_kernels(isa="portable").describe()
    assert list(places) == list(OPS)
    in_cpp = {op for op, place in places.items() if place == "portable"}
    assert set(OPS) - in_cpp == {"gumbel_chances", "grow_trees", "keep_trees"}
    assert set(places.values()) == {"reference", "portable"}


def test_without_the_extension_the_reference_says_why() -> None:
    program = """
import sys
sys.modules["forerun.kernels.cpu._native"] = None
from forerun.errors import KernelError
from forerun.kernels.select import ISAS as KNOWN
from forerun.kernels.select import select_kernels
kernels = select_kernels()
print(kernels.name, kernels.reason)
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
