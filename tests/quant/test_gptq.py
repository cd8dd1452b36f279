"""GPTQ checkpoints: every width, group size, act-order and both ways to store zero points, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import CheckpointError, UnsupportedError
from forerun.quant.formats import check_quantization
from forerun.quant.grouped import GroupedWeight
from forerun.quant.joined import JoinedWeight
from forerun.quant.packing import pack, unpack
from tests.quant import stored


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def section(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


def shuffled(columns: int, group_size: int) -> torch.Tensor:
    return (torch.arange(columns) // group_size)[torch.randperm(columns)]


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_is_the_bit_stream(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 37), dtype=torch.uint8)
    assert torch.equal(pack(codes, bits), stored.packed_rows(codes, bits))
    assert torch.equal(unpack(stored.packed_rows(codes, bits), bits, 37), codes)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("group_size", [32, 48, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_matrices_come_back(bits: int, group_size: int, second: bool, sym: bool, tmp_path: Path) -> None:
    size = 96 if group_size < 0 else group_size
    module = stored.gptq(32, 96, bits, size, sym=sym, second=second)
    fields = {"checkpoint_format": "gptq_v2"} if second else {}
    stored.check(tmp_path, {"m": module}, section(bits, group_size, **fields))


def test_a_short_last_group(tmp_path: Path) -> None:
    stored.check(tmp_path, {"m": stored.gptq(16, 96, 4, 64)}, section(4, 64))


@pytest.mark.parametrize("bits", [3, 4])
def test_act_order(bits: int, tmp_path: Path) -> None:
    module = stored.gptq(32, 96, bits, 32, group_ids=shuffled(96, 32))
    stored.check(tmp_path, {"m": module}, section(bits, 32, desc_act=True))


def test_parts_with_one_order_share_a_matrix(tmp_path: Path) -> None:
    ids = shuffled(96, 32)
    modules = {
        "q": stored.gptq(32, 96, 4, 32, group_ids=ids, sym=True),
        "k": stored.gptq(16, 96, 4, 32, group_ids=ids),
        "v": stored.gptq(16, 96, 4, 32, group_ids=ids, sym=True),
    }
    assert isinstance(stored.check(tmp_path, modules, section(4, 32, desc_act=True)), GroupedWeight)


def test_parts_with_orders_of_their_own(tmp_path: Path) -> None:
    modules = {name: stored.gptq(rows, 96, 4, 32, group_ids=shuffled(96, 32)) for name, rows in (("q", 32), ("k", 16))}
    weight = stored.check(tmp_path, modules, section(4, 32, desc_act=True))
    assert isinstance(weight, JoinedWeight) and weight.nbytes > 0
    x, bias = torch.randn(2, 96), torch.randn(48)
    assert torch.equal(weight.matmul(x, bias), weight.matmul(x, None) + bias)


def test_a_module_with_a_width_of_its_own(tmp_path: Path) -> None:
    modules = {"q": stored.gptq(32, 96, 8, 32), "k": stored.gptq(32, 96, 4, 32)}
    stored.check(tmp_path, modules, section(4, 32, dynamic={"+:q": {"bits": 8}}))


def test_a_zero_point_of_0_borrows_from_its_neighbour(tmp_path: Path) -> None:
    module = stored.gptq(16, 32, 4, 32, second=True)
    zeros = torch.arange(16)[None] % 5  # among them 0
    minus_one = (stored.packed_rows(zeros, 4).long() - 0x11111111 + (1 << 32)) % (1 << 32)
    module.tensors["qzeros"] = torch.where(minus_one >> 31 > 0, minus_one - (1 << 32), minus_one).int()
    codes = unpack(module.tensors["qweight"].T, 4, 32).double()
    truth = module.tensors["scales"].double().T * (codes - zeros.T)
    stored.check(tmp_path, {"m": module._replace(matrix=truth)}, section(4, 32))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scales": None}, "no tensor m.scales"),
        ({"qzeros": None}, "no tensor m.qzeros"),
        ({"g_idx": None}, "no tensor m.g_idx"),
        ({"qweight": torch.zeros(13, 32, dtype=torch.int32)}, r"m\.qweight has shape \[13, 32\]"),
        ({"qweight": torch.zeros(12, 32)}, "m.qweight .* stored as F32, not as integers"),
        ({"scales": torch.zeros(4, 32)}, r"m\.scales has shape \[4, 32\], groups of 32 of 96 inputs"),
        ({"qzeros": torch.zeros(3, 5, dtype=torch.int32)}, r"m\.qzeros .* shape \[3, 5\]"),
        ({"g_idx": torch.zeros(96, dtype=torch.int32)}, "m.g_idx does not put 32 inputs into each of 3 groups"),
        ({"g_idx": torch.zeros(95, dtype=torch.int32)}, "m.g_idx .* shape"),
    ],
)
def test_damage_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    module = stored.gptq(32, 96, 4, 32, group_ids=shuffled(96, 32))
    for name, value in change.items():
        module.tensors.pop(name)
        if value is not None:
            module.tensors[name] = value
    source = stored.open_source(tmp_path, {"m": module}, section(4, 32, desc_act=True))
    with pytest.raises((CheckpointError, UnsupportedError), match=said):
        stored.read(source, {"m": module})


def test_groups_the_kernels_do_not_have(tmp_path: Path) -> None:
    module = stored.gptq(32, 96, 4, 24)
    source = stored.open_source(tmp_path, {"m": module}, section(4, 24))
    with pytest.raises(UnsupportedError, match="m is quantized in groups of 24 of 96 inputs"):
        stored.read(source, {"m": module})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 5}, "bits is 5; supported: 2, 3, 4, 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"rotation": "hadamard"}, "rotation"),
        ({"pack_dtype": "int64"}, "pack_dtype is 'int64'"),
        ({"quant_method": "quip"}, "quip"),
    ],
)
def test_settings_beyond_forerun_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check_quantization({**section(4, 128), **fields})
    check_quantization(section(4, 128, sym=True, damp_percent=0.01, meta={"quantizer": ["x:1"]}))


def test_a_section_that_is_no_object() -> None:
    with pytest.raises(CheckpointError, match="must be an object"):
        check_quantization("4 bits")
