"""The kernels of products, experts and sampling compile for an H200, which needs no GPU, and fit it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels.triton.ahead_of_time import compiled_in_subprocess

SHARED_BYTES = 227 << 10  # of a multiprocessor, CUDA C++ programming guide, table of compute capabilities, 9.0


@pytest.mark.slow
def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compiled = compiled_in_subprocess("tests.kernels.triton.products_list", tmp_path)
    names = [entry["name"] for entry in compiled]
    assert len(names) == 20 and names.count("multiply") == 8
    for entry in compiled:
        assert entry["shared"] <= SHARED_BYTES // 2, entry  # two programs at a time
        assert entry["stack"] == 0, entry  # nothing spilled
        if entry["name"] != "multiply":  # which asks for the fused sums it has
            assert "fma.rn.f32" not in entry["instructions"], entry
    assert sum("cp.async" in entry["instructions"] for entry in compiled if entry["name"] == "multiply") == 8
