"""compressed-tensors checkpoints of integers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import CheckpointError, UnsupportedError
from forerun.quant.formats import check_quantization, find_format
from forerun.quant.joined import JoinedWeight
from tests.quant import stored

DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def scheme(bits: int, strategy: str, group_size: int | None = None, sym: bool = True, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size, "symmetric": sym}
    return {"targets": ["Linear"], "weights": {**weights, **more}, "input_activations": None}


def section(*schemes: dict[str, Any], packed: bool = True, **more: Any) -> dict[str, Any]:
    groups = {f"group_{index}": entry for index, entry in enumerate(schemes)}
    form = "pack-quantized" if packed else "int-quantized"
    base = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return {**base, "quantization_status": "compressed", "kv_cache_scheme": None, **more}


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_come_back(bits: int, group_size: int | None, packed: bool, sym: bool, tmp_path: Path) -> None:
    sizes = {"q": 24, "k": 8}
    modules = {n: stored.compressed(rows, 96, bits, group_size, packed=packed, sym=sym) for n, rows in sizes.items()}
    strategy = "channel" if group_size is None else "group"
    stored.check(tmp_path, modules, section(scheme(bits, strategy, group_size, sym), packed=packed))


@pytest.mark.parametrize("bits", [3, 6])
def test_widths_that_straddle_words(bits: int, tmp_path: Path) -> None:
    module = stored.compressed(16, 80, bits, 16, packed=True)
    stored.check(tmp_path, {"m": module}, section(scheme(bits, "group", 16)))


def test_one_scale_for_all_and_dynamic_activations(tmp_path: Path) -> None:
    module = stored.compressed(16, 64, 8, None, packed=False, per_tensor=True)
    w8a8 = {**scheme(8, "tensor"), "input_activations": DYNAMIC}
    stored.check(tmp_path, {"m": module}, section(w8a8, packed=False))


def test_act_order_keeps_columns_in_place(tmp_path: Path) -> None:
    ids = (torch.arange(64) // 16)[torch.randperm(64)]
    module = stored.compressed(16, 64, 4, 16, packed=True, group_ids=ids)
    stored.check(tmp_path, {"m": module}, section(scheme(4, "group", 16, actorder="group")))
    module.tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)  # written, but not used


def test_zero_points_that_are_not_packed(tmp_path: Path) -> None:
    module = stored.compressed(16, 64, 4, 16, packed=True, sym=False)
    other = stored.compressed(16, 64, 4, 16, packed=False, sym=False)
    loose = other.tensors["weight_zero_point"]
    module.tensors["weight_zero_point"] = loose
    packed = module.tensors["weight_packed"].tolist()
    values = torch.tensor([[(word >> (4 * i)) % 16 - 8 for word in row for i in range(8)] for row in packed])
    scales = module.tensors["weight_scale"].double().repeat_interleave(16, 1)
    truth = scales * (values - loose.repeat_interleave(16, 1))
    stored.check(tmp_path, {"m": module._replace(matrix=truth)}, section(scheme(4, "group", 16, False)))


def test_schemes_by_name_and_pattern(tmp_path: Path) -> None:
    modules = {
        "layers.0.q": stored.compressed(16, 64, 4, 32, packed=True),
        "layers.0.k": stored.compressed(16, 64, 8, None, packed=True),
    }
    named = {**scheme(8, "channel"), "targets": ["re:.*k$"]}
    assert isinstance(stored.check(tmp_path, modules, section(scheme(4, "group", 32), named)), JoinedWeight)


def test_ignored_modules_stay_dense(tmp_path: Path) -> None:
    dense = stored.Stored({"weight": torch.randn(8, 16)}, torch.zeros(8, 16))
    source = stored.open_source(tmp_path, {"lm_head": dense}, section(scheme(4, "group", 16)))
    form = find_format(source, "lm_head")
    assert form is not None and form.name == "dense"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_scale": None}, "no tensor m.weight_scale"),
        ({"weight_zero_point": None}, "no tensor m.weight_zero_point"),
        ({"weight_shape": torch.tensor([16, 63])}, r"m\.weight_shape says \[16, 63\]"),
        ({"weight_packed": torch.zeros(16, 9, dtype=torch.int32)}, r"m\.weight_packed .* shape \[16, 9\]"),
        ({"weight_scale": torch.zeros(16, 3)}, r"m\.weight_scale has shape \[16, 3\]"),
        ({"weight_scale": torch.zeros(16, 1)}, r"m\.weight_scale has shape \[16, 1\]"),
    ],
)
def test_damage_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    module = stored.compressed(16, 64, 4, 16, packed=True, sym=False)
    for name, value in change.items():
        module.tensors.pop(name)
        if value is not None:
            module.tensors[name] = value
    source = stored.open_source(tmp_path, {"m": module}, section(scheme(4, "group", 16, sym=False)))
    with pytest.raises(CheckpointError, match=said):
        stored.read(source, {"m": module})


def test_values_beyond_their_bits(tmp_path: Path) -> None:
    module = stored.compressed(16, 64, 8, None, packed=False)
    source = stored.open_source(tmp_path, {"m": module}, section(scheme(4, "channel"), packed=False))
    with pytest.raises(CheckpointError, match="more than 4 bits"):
        stored.read(source, {"m": module})


def test_a_group_size_that_does_not_divide(tmp_path: Path) -> None:
    module = stored.compressed(16, 64, 4, 16, packed=True)
    source = stored.open_source(tmp_path, {"m": module}, section(scheme(4, "group", 48)))
    with pytest.raises(CheckpointError, match="m has 64 inputs, which group_size 48"):
        stored.read(source, {"m": module})


def test_targets_that_are_no_list(tmp_path: Path) -> None:
    module = stored.compressed(16, 64, 4, 16, packed=True)
    source = stored.open_source(tmp_path, {"m": module}, section({**scheme(4, "group", 16), "targets": 7}))
    with pytest.raises(CheckpointError, match="targets must be a list of strings, got 7"):
        stored.read(source, {"m": module})


def test_a_module_nothing_targets(tmp_path: Path) -> None:
    module = stored.compressed(16, 64, 4, 16, packed=True)
    source = stored.open_source(tmp_path, {"m": module}, section({**scheme(4, "group", 16), "targets": ["re:other"]}))
    with pytest.raises(UnsupportedError, match="no config_group of quantization_config targets m"):
        stored.read(source, {"m": module})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (section(scheme(8, "channel", type="complex")), "type is 'complex'"),
        (section(scheme(6, "channel", type="float")), "float weights of 6 bits by channel"),
        (section(scheme(4, "group", 64, type="float")), r"float weights of 4 bits by group \(64\)"),
        (section(scheme(8, "block", type="float")), "block_structure"),
        (section(scheme(8, "block")), "strategy is 'block'"),
        (section(scheme(16, "channel")), "num_bits is 16"),
        (section(scheme(4, "channel"), format="marlin-24"), "format is 'marlin-24'"),
        (section(scheme(4, "channel"), sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (section(scheme(4, "channel"), quantization_status="calibration"), "calibration"),
        (section({**scheme(8, "channel"), "input_activations": {**DYNAMIC, "dynamic": False}}), "dynamic is False"),
        (section({**scheme(4, "channel"), "input_activations": {**DYNAMIC, "num_bits": 4}}), "num_bits is 4"),
        (section(scheme(4, "channel"), transform_config={"config_groups": {"u": {}}}), "transform_config"),
    ],
)
def test_settings_beyond_forerun_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check_quantization(settings)
    check_quantization(section(scheme(4, "group", 32), sparsity_config={"format": "dense"}, transform_config={}))
