"""AutoRound's settings in the words of other formats, and what is refused (its files: test_tools)."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.errors import UnsupportedError
from forerun.quant.auto_round import GPTQ_PACKINGS, restated
from forerun.quant.formats import check_quantization

INTEGERS = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
GPTQ = {**INTEGERS, "packing_format": "auto_round:auto_gptq"}
FLOATS = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp",
    "packing_format": "auto_round:llm_compressor",
}  # fmt: skip


@pytest.mark.parametrize("packing", [*GPTQ_PACKINGS, "auto_round:auto_awq"])
def test_layouts_of_integers_are_taken(packing: str) -> None:
    check_quantization({**INTEGERS, "packing_format": packing})


def test_zero_points_that_are_stored_as_they_are() -> None:
    assert [restated({**GPTQ, "packing_format": name})["checkpoint_format"] for name in GPTQ_PACKINGS] == [
        "gptq", "gptq_v2", "gptq_v2",
    ]  # fmt: skip


def test_exceptions_among_floats_have_schemes_of_their_own() -> None:
    section = {**FLOATS, "extra_config": {"a.b": {"bits": 8}, "c": {"bits": 16}}}
    check_quantization(section)
    groups = restated(section)["config_groups"]
    assert {name: group["weights"]["num_bits"] for name, group in groups.items()} == {"all": 4, "a.b": 8}
    blocks = restated({**GPTQ, "packing_format": "auto_round:fp8_static", "group_size": [128, 128]})
    assert blocks["weight_block_size"] == [128, 128]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({**GPTQ, "packing_format": "mlx"}, "packing_format 'mlx'; supported: auto_round:auto_gptq"),
        ({**GPTQ, "packing_format": None}, "packing_format None"),
        ({**GPTQ, "rotation_config": {"type": "hadamard"}}, "rotation_config"),
        ({**GPTQ, "bits": 5}, "bits is 5; supported"),
        ({**FLOATS, "data_type": "mx_int"}, "data_type 'mx_int'; supported: mx_fp, nv_fp"),
        ({**FLOATS, "group_size": 64}, r"4 bits by group \(64\)"),
        ({**GPTQ, "packing_format": "auto_round:fp8_static", "fmt": "e5m2"}, "fmt is 'e5m2'"),
    ],
)
def test_what_is_not_implemented_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_quantization(section)
