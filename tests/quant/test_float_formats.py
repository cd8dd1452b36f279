"""FP8 and FP4 modules with damaged scales, and settings beyond forerun; whole ones are in test_tools.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.quant.formats import check_quantization, check_tensors
from forerun.weights.checkpoint import Checkpoint
from tests.quant import stored
from tests.quant.stored import Stored
from tests.quant.test_compressed import section

ROWS, COLUMNS = 32, 64
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
TORCHAO = {"quant_method": "torchao"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}
    return section({"targets": ["Linear"], "weights": weights, "input_activations": None})


NVFP4 = floats(4, "tensor_group", group_size=16)


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(0, 120, shape, dtype=torch.uint8)


def float4() -> dict[str, Tensor]:
    """NVFP4 as compressed-tensors has it."""
    return {
        "weight_packed": bytes_of(ROWS, COLUMNS // 2),
        "weight_scale": bytes_of(ROWS, COLUMNS // 16).view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([300.0]),
    }


def modelopt() -> dict[str, Tensor]:
    packed, scales, factor = float4().values()
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": 1 / factor[0]}


@pytest.mark.parametrize("block", [None, (16, 32), (1, COLUMNS), (128, 128)])
def test_fp8_in_blocks_rows_and_whole(block: tuple[int, int] | None, tmp_path: Path) -> None:
    modules = {name: stored.float8(rows, COLUMNS, block) for name, rows in (("q", 40), ("k", 8))}
    settings = {**FP8, "weight_block_size": list(block) if block and block[0] > 1 else None}
    stored.check(tmp_path, modules, settings)


def test_fp8_of_fbgemm(tmp_path: Path) -> None:
    module = stored.float8(ROWS, COLUMNS, (1, COLUMNS))
    module.tensors["weight_scale"] = module.tensors.pop("weight_scale_inv")
    stored.check(tmp_path, {"m": module}, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})


@pytest.mark.parametrize(
    ("tensors", "change", "settings", "said"),
    [
        ({}, {"weight_scale_inv": None}, FP8, "no tensor m.weight_scale_inv"),
        ({}, {"weight_scale_inv": torch.ones(2, 3)}, FP8, r"has shape \[2, 3\], \[2, 2\] is needed"),
        ({}, {"weight_scale_inv": None}, floats(8, "channel"), "no tensor m.weight_scale"),
        ({}, {"weight_scale": torch.ones(3, 1)}, floats(8, "channel"), r"\[3, 1\], \[32, 1\] or \[32\] is needed"),
        (float4(), {"weight_scale": None}, NVFP4, "no tensor m.weight_scale"),
        (float4(), {"weight_global_scale": None}, NVFP4, "no tensor m.weight_global_scale"),
        (float4(), {"weight_scale": bytes_of(ROWS, 2)}, NVFP4, r"\[32, 2\], \[32, 4\] is needed"),
        (modelopt(), {"weight_scale_2": None}, MODELOPT, "no tensor m.weight_scale_2"),
        (modelopt(), {"weight_scale": torch.ones(4)}, MODELOPT, r"m.weight_scale has shape \[4\]"),
    ],
)
def test_headers_tell(
    tensors: dict[str, Tensor], change: dict[str, Tensor | None], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    whole = tensors or stored.float8(ROWS, COLUMNS).tensors
    held = {key: tensor for key, tensor in {**whole, **change}.items() if tensor is not None}
    source = stored.open_source(tmp_path, {"m": Stored(held, torch.zeros(ROWS, COLUMNS))}, settings)
    with pytest.raises(CheckpointError, match=said):
        check_tensors(source)


@pytest.mark.parametrize(
    ("tensors", "name", "settings", "said"),
    [
        ({}, "weight_scale_inv", FP8, "m.weight_scale_inv is stored as U8, not as F32 or BF16 or F16 or F8_E8M0"),
        (float4(), "weight_scale", NVFP4, "m.weight_scale is stored as U8, not as F8_E4M3"),
    ],
)
def test_scales_of_another_type(
    tensors: dict[str, Tensor], name: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    module = Stored({**(tensors or stored.float8(ROWS, COLUMNS).tensors)}, torch.zeros(ROWS, COLUMNS))
    module.tensors[name] = torch.ones(module.tensors[name].shape, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=said):
        stored.read(stored.open_source(tmp_path, {"m": module}, settings), {"m": module})


@pytest.mark.parametrize(
    ("name", "damaged", "said"),
    [
        ("weight", torch.full((ROWS, COLUMNS), torch.nan).to(torch.float8_e4m3fn), "m.weight holds NaN"),
        ("weight_scale_inv", torch.full((2, 2), torch.inf), "m.weight_scale_inv holds scales that are not finite"),
    ],
)
def test_numbers_that_are_none(name: str, damaged: Tensor, said: str, tmp_path: Path) -> None:
    module = stored.float8(ROWS, COLUMNS)
    module.tensors[name] = damaged
    with pytest.raises(CheckpointError, match=said):
        stored.read(stored.open_source(tmp_path, {"m": module}, FP8), {"m": module})


@pytest.mark.parametrize("factor", [0.0, torch.nan, -1.0])
def test_factors_of_a_matrix(factor: float, tmp_path: Path) -> None:
    module = Stored({**modelopt(), "weight_scale_2": torch.tensor(factor)}, torch.zeros(ROWS, COLUMNS))
    with pytest.raises(CheckpointError, match="m.weight_scale_2 holds"):
        stored.read(stored.open_source(tmp_path, {"m": module}, MODELOPT), {"m": module})


def test_modelopts_own_file_says_what_config_json_does_not(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    stored.open_source(tmp_path, {"m": Stored(modelopt(), torch.zeros(ROWS, COLUMNS))}, {})
    assert Checkpoint.open(tmp_path).config["quantization_config"] == MODELOPT


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "mystery"}, "mystery"),
    ],
)
def test_settings_beyond_forerun_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check_quantization(settings)


def torchao(groups: int, bits: int) -> Stored:
    """Signed values in bytes, with zero points."""
    half = 1 << (bits - 1)
    values, scales = torch.randint(-half, half, (ROWS, COLUMNS)), torch.rand(ROWS, groups).bfloat16()
    zeros = torch.randint(-half, half, (ROWS, groups))
    matrix = scales.double().repeat_interleave(COLUMNS // groups, 1) * (
        values - zeros.repeat_interleave(COLUMNS // groups, 1)
    )
    names = {"_weight_qdata": values, "_weight_zero_point": zeros}
    return Stored({**{name: table.to(torch.int8) for name, table in names.items()}, "_weight_scale": scales}, matrix)


def torchao_int4(dtype: torch.dtype) -> Stored:
    """Two signed values a byte, scales and zero points by column, the latter added."""
    values, scales, zeros = torch.randint(-8, 8, (ROWS, COLUMNS)), torch.rand(2, ROWS), torch.randn(2, ROWS)
    packed = ((values[:, 0::2] & 15) | (values[:, 1::2] & 15) << 4).byte().view(dtype)
    of_row = [table.double().T.repeat_interleave(COLUMNS // 2, 1) for table in (scales, zeros)]
    tensors = {"_weight_qdata": packed, "_weight_scale": scales, "_weight_zero_point": zeros}
    return Stored(tensors, values * of_row[0] + of_row[1])


@pytest.mark.parametrize(("groups", "bits"), [(1, 8), (2, 8), (4, 4)])
def test_torchaos_integers(groups: int, bits: int, tmp_path: Path) -> None:
    stored.check(tmp_path, {"m": torchao(groups, bits)}, TORCHAO)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_torchaos_pairs_of_integers(dtype: torch.dtype, tmp_path: Path) -> None:
    stored.check(tmp_path, {"m": torchao_int4(dtype)}, TORCHAO)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"_weight_qdata": torch.zeros(4, 4, 4, 4, dtype=torch.int32)}, "layout for one kind of device"),
        ({"_weight_act_pre_scale": torch.ones(COLUMNS)}, "act_pre_scale"),
    ],
)
def test_torchaos_layouts_for_devices_are_refused(change: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    module = torchao(2, 8)
    source = stored.open_source(tmp_path, {"m": Stored({**module.tensors, **change}, module.matrix)}, TORCHAO)
    with pytest.raises(UnsupportedError, match=said):
        check_tensors(source)
