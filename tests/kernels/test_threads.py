"""torch computes on one thread while a step runs on the kernels' threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import factory
from tests.support import mini

from forerun import LLM, SamplingParams, assemble
from forerun.kernels import threads
from forerun.kernels.threads import single_torch_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def hybrid(folder: Path) -> LLM:
    """Whose passes are not replayed."""
    model_type, fields = factory.CASES["qwen3.5"]
    factory.save_checkpoint(factory.random_hf_model(model_type, fields), folder)
    return LLM(str(folder), drafter="none")


def test_torch_has_one_thread_meanwhile_and_its_own_again_even_after_an_error() -> None:
    with single_torch_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="broken"), single_torch_thread():
        raise ValueError("broken")
    assert torch.get_num_threads() == 2


def in_new_thread() -> int:
    """torch's number of threads for one that has not called torch before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_threads_that_begin_meanwhile_have_their_own_number() -> None:
    if threads._setters()[0] is torch.set_num_threads:
        pytest.skip("torch is built without OpenMP")
    assert in_new_thread() == 2
    with single_torch_thread():
        assert torch.get_num_threads() == 1 and in_new_thread() == 2
    assert in_new_thread() == torch.get_num_threads() == 2


def test_torch_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_setters", lambda: (torch.set_num_threads, threads._nothing))
    with single_torch_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_passes_and_calls_are_measured_as_steps_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name, inner in (("measure_passes", assemble.measure_passes), ("measure_calls", assemble.measure_calls)):

        def watched(*given: Any, inner: Any = inner) -> Any:
            seen.append(torch.get_num_threads())
            return inner(*given)

        monkeypatch.setattr(assemble, name, watched)
    llm = LLM("mini", drafter="ngram", keep_learned=False)
    assert seen == [1 if llm.kernels.name.startswith("cpu") else 2] * 2 and torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["mini", "qwen3.5"])
def test_a_step_that_computes_on_the_kernels_threads(name: str, tmp_path: Path) -> None:
    llm = mini.plain().with_drafter("none") if name == "mini" else hybrid(tmp_path)
    inner, seen = llm.engine.verifier, []

    class Watched:
        reads_pending = staticmethod(inner.reads_pending)

        def verify(self, *given: Any) -> Any:
            seen.append(torch.get_num_threads())
            return inner.verify(*given)

    llm.engine.verifier = Watched()
    llm.generate(["One", "Two"], SamplingParams(max_tokens=4))
    is_native = llm.kernels.name.startswith("cpu")
    assert set(seen) == {1 if is_native else 2} and torch.get_num_threads() == 2
    assert llm.engine.runner.replays == (is_native and name == "mini")


POOL = """
import os, resource, signal, sys
import torch
from forerun.errors import ResourceError
from forerun.kernels.cpu.backend import CpuKernels
from forerun.kernels.select import select_kernels
"""
FORKS = (
    POOL
    + """
kernels = select_kernels("cpu", threads=2)
weight, x = torch.randn(512, 256), torch.randn(3, 256)
packed = kernels.pack_linear(weight)
expected = kernels.linear(x, packed)
for action in ("compute", "pack", "drop"):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        if action == "compute":
            assert torch.equal(kernels.linear(x, packed), expected)
        elif action == "pack":
            assert torch.equal(kernels.linear(x, kernels.pack_linear(weight)), expected)
        else:
            del packed, kernels
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, action
assert torch.equal(kernels.linear(x, packed), expected)
"""
)
TOO_MANY = (
    POOL
    + """
room = 64 << 20
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
try:
    CpuKernels(64)
except ResourceError as error:
    sys.exit("lower threads" not in str(error))
sys.exit(3)
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits what a process may take")
@pytest.mark.parametrize("program", [FORKS, TOO_MANY], ids=["forks", "too many"])
def test_a_pool_without_its_threads(program: str) -> None:
    """A child after fork() has none and computes alone; where the system starts too few there is an error."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
