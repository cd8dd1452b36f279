"""The kernels around attention compile for an H200, which needs no GPU, and fit its multiprocessors."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels.triton.ahead_of_time import compiled_in_subprocess

SHARED_BYTES = 227 << 10  # of a multiprocessor, CUDA C++ programming guide, table of compute capabilities, 9.0


@pytest.mark.slow
def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compiled = compiled_in_subprocess("tests.kernels.triton.attention_list", tmp_path)
    assert len(compiled) == 12
    for entry in compiled:
        assert entry["shared"] <= SHARED_BYTES // 2, entry  # two programs at a time
        assert "fma.rn.f32" not in entry["instructions"], entry  # nothing was fused behind our back
        if "attention" in entry["name"]:
            assert entry["instructions"] == ["cp.async", "mma.sync"], entry  # loads run ahead, tensor cores
            assert entry["stack"] <= 128, entry  # a few registers spill
        else:
            assert entry["stack"] == 0, entry  # nothing spilled
