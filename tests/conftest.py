"""How the test processes share the machine's cores, what is cut for all, the order of files, skips refused in CI."""

from __future__ import annotations

import gc
import os
import platform
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.support.programs import NOT_INSTALLED
from tests.support.shared import MISSING

# Read when torch is imported, here and in child processes. OpenMP's threads spin while they wait: two test processes
# with two threads each on two cores took twice the CPU time. The kernels' own threads are left as users have them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's interpreter multiplies with numpy. With AVX2 OpenBLAS rounds a row of a product by its place in the matrix,
# with these older instructions it does not, so that what kernels promise can be tested. Read when numpy is imported.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ["OPENBLAS_CORETYPE"] = "Nehalem"  # whatever the machine has for other programs
if not os.path.exists("/dev/nvidiactl"):  # no GPU of NVIDIA's
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which transformers does
os.environ["FORERUN_CACHE"] = os.devnull  # nothing can be kept there: tests do not depend on those before them

# Test -> why CI may do without its data or programs. A reviewed list.
MAY_BE_SKIPPED = {
    "tests/kernels/test_instruction_sets.py::test_arm_gives_the_same_bits": "ARM's compiler and qemu are Debian's",
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for while a million lasting objects are made, nor later on among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no process ends with a long file while the others have nothing left."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.fixture(scope="session", autouse=True)
def usual_passes() -> Iterator[int]:
    """Engines measure two passes of each size, as on a slow machine: there are hundreds -> how many are usual."""
    measuring = sys.modules.get("forerun.engine.measuring")
    if measuring is None:  # nobody has imported torch either
        yield 0
        return
    usual = measuring._MAX_PASSES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_MAX_PASSES", measuring._MIN_PASSES)
        yield usual


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI (FORERUN_CI is set, as `.ci/run` does) a test that would skip for want of data or programs fails."""
    report = yield
    why: Any = report.longrepr
    wanting = report.skipped and any(word in str(why) for word in (MISSING, NOT_INSTALLED))
    if os.environ.get("FORERUN_CI") and wanting and item.nodeid not in MAY_BE_SKIPPED:
        report.outcome, report.longrepr = "failed", f"skipped in CI: {why[-1]}"
    return report
