"""AWQ checkpoints in the gemm layout, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import CheckpointError, UnsupportedError
from forerun.quant.awq import pack_outputs, unpack_outputs
from forerun.quant.formats import check_quantization
from forerun.quant.grouped import GroupedWeight
from tests.quant import stored

SECTION = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("group_size", [16, 32, 96])
def test_matrices_come_back(group_size: int, tmp_path: Path) -> None:
    torch.manual_seed(group_size)
    modules = {"q": stored.awq(32, 96, group_size), "k": stored.awq(16, 96, group_size)}
    assert isinstance(stored.check(tmp_path, modules, {**SECTION, "group_size": group_size}), GroupedWeight)


def test_packing_is_its_own_inverse() -> None:
    codes = torch.randint(0, 16, (5, 24), dtype=torch.uint8)
    assert torch.equal(unpack_outputs(pack_outputs(codes)), codes.T)
    assert pack_outputs(torch.arange(8)[None]).tolist() == [[0x75316420]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scales": None}, "no tensor m.scales"),
        ({"qzeros": None}, "no tensor m.qzeros"),
        ({"qweight": torch.zeros(96, 5, dtype=torch.int32)}, r"m\.qweight .* shape \[96, 5\]"),
        ({"scales": torch.zeros(6, 32)}, r"m\.scales .* shape \[6, 32\]"),
    ],
)
def test_damage_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    module = stored.awq(32, 96, 32)
    for name, value in change.items():
        module.tensors.pop(name)
        if value is not None:
            module.tensors[name] = value
    source = stored.open_source(tmp_path, {"m": module}, SECTION)
    with pytest.raises(CheckpointError, match=said):
        stored.read(source, {"m": module})


def test_a_group_size_that_does_not_divide(tmp_path: Path) -> None:
    module = stored.awq(32, 96, 32)
    source = stored.open_source(tmp_path, {"m": module}, {**SECTION, "group_size": 64})
    with pytest.raises(CheckpointError, match="96 inputs not one of group_size 64"):
        stored.read(source, {"m": module})


@pytest.mark.parametrize(("fields", "said"), [({"version": "gemv"}, "version is 'gemv'"), ({"bits": 3}, "bits is 3")])
def test_settings_beyond_forerun_are_refused(fields: dict[str, Any], said: str) -> None:
    check_quantization({**SECTION, "modules_to_not_convert": ["lm_head"]})
    with pytest.raises(UnsupportedError, match=said):
        check_quantization({**SECTION, **fields})
