"""The kernels compile for an H200, which needs no GPU, and fit its multiprocessors."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kernels.triton.ahead_of_time import compiled_in_subprocess

SHARED_BYTES = 227 << 10  # of a multiprocessor, CUDA C++ programming guide, table of compute capabilities, 9.0
MODULES = tuple(f"tests.kernels.triton.{name}_list" for name in ("products", "attention", "recurrent", "shares"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The kernels of each module, compiled by one process."""
    pytest.importorskip("triton")
    return compiled_in_subprocess(MODULES, tmp_path_factory.mktemp("compiled"))


@pytest.mark.slow
def test_products_experts_and_sampling(compiled: list[list[dict[str, Any]]]) -> None:
    entries = compiled[0]
    names = [entry["name"] for entry in entries]
    assert len(names) == 23 and names.count("multiply") == 10
    for entry in entries:
        assert entry["shared"] <= SHARED_BYTES // 2, entry  # two programs at a time
        assert entry["stack"] == 0, entry  # nothing spilled
        if entry["name"] != "multiply":  # which asks for the fused sums it has
            assert "fma.rn.f32" not in entry["instructions"], entry
    assert sum("cp.async" in entry["instructions"] for entry in entries if entry["name"] == "multiply") == 10


@pytest.mark.slow
def test_attention_and_what_is_around_it(compiled: list[list[dict[str, Any]]]) -> None:
    entries = compiled[1]
    assert len(entries) == 15
    for entry in entries:
        assert entry["shared"] <= SHARED_BYTES // 2, entry  # two programs at a time
        assert "fma.rn.f32" not in entry["instructions"], entry  # nothing was fused behind our back
        if "attention" in entry["name"]:
            assert entry["instructions"] == ["cp.async", "mma.sync"], entry  # loads run ahead, tensor cores
            assert entry["stack"] <= 128, entry  # a few registers spill
        else:
            assert entry["stack"] == 0, entry  # nothing spilled


@pytest.mark.slow
def test_recurrent_layers(compiled: list[list[dict[str, Any]]]) -> None:
    entries = compiled[2]
    assert len(entries) == 11
    for entry in entries:
        assert entry["shared"] <= SHARED_BYTES // 8 and entry["stack"] == 0, entry  # many programs at a time
        if entry["name"] != "_conv_kernel":  # which asks for the fused sums it has
            assert "fma.rn.f32" not in entry["instructions"], entry


@pytest.mark.slow
def test_ranks_add_up_as_one_process_does(compiled: list[list[dict[str, Any]]]) -> None:
    """With fewer outputs or heads every sum is laid out over threads as with all, so its order is the same."""
    from tests.kernels.triton.shares_list import groups

    sums = iter(entry["sums"] for entry in compiled[3])
    for group in groups():
        whole, *parts = [next(sums) for _ in group]
        assert whole and all(part == whole for part in parts), group[0][0]
