"""AutoRound's settings in the words of other formats, and what is refused (its files: test_tools)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from forerun.errors import CheckpointError, UnsupportedError
from forerun.models.storage import integer_bits
from forerun.quant.auto_round import ALIASES, GPTQ_PACKINGS, restated
from forerun.quant.compressed import _scheme_of
from forerun.quant.formats import check_quantization

INTEGERS = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
GPTQ = {**INTEGERS, "packing_format": "auto_round:auto_gptq"}
FLOATS = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp",
    "packing_format": "auto_round:llm_compressor",
}  # fmt: skip


class Names:
    """A source of which only names and config.json are asked."""

    def __init__(self, section: Mapping[str, Any], *names: str) -> None:
        self.config, self._names = {"quantization_config": section}, names

    def has(self, name: str) -> bool:
        return name in self._names


@pytest.mark.parametrize("packing", [*GPTQ_PACKINGS, *ALIASES, "auto_round:auto_awq"])
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
    assert [group["weights"]["num_bits"] for group in groups.values()] == [4, 8]
    blocks = restated({**GPTQ, "packing_format": "auto_round:fp8_static", "group_size": [128, 128]})
    assert blocks["weight_block_size"] == [128, 128]


@pytest.mark.parametrize(
    ("given", "method", "form"),
    [({}, "gptq", "gptq"), ({"packing_format": None}, "gptq", "gptq"), ({"packing_format": "auto"}, "gptq", "gptq"),
     ({"packing_format": "auto_round:gptq"}, "gptq", "gptq"), ({"packing_format": "auto_round:awq"}, "awq", None)],
)  # fmt: skip
def test_other_names_of_layouts(given: dict[str, Any], method: str, form: str | None) -> None:
    found = restated({**INTEGERS, **given})
    assert (found["quant_method"], found.get("checkpoint_format")) == (method, form)


def test_names_count_before_patterns_and_are_none_where_a_module_has_them() -> None:
    exceptions = {
        "mlp": {"bits": 8},
        "model.layers.1.mlp.gate": {"bits": 8},
        "model.layers.1.mlp.up_proj": {"bits": 4},
        "v_proj$": {"bits": 8},
    }
    source: Any = Names({**FLOATS, "extra_config": exceptions}, "model.layers.1.mlp.gate.weight_packed")

    def bits(name: str) -> Any:
        return _scheme_of(source, name).section("weights").get("num_bits")

    assert bits("model.layers.1.mlp.up_proj") == 4  # though a pattern before it fits
    assert bits("model.layers.1.mlp.down_proj") == bits("model.layers.1.self_attn.v_proj") == 8
    assert bits("model.layers.1.self_attn.o_proj") == 4
    exceptions.pop("mlp")
    assert bits("model.layers.1.mlp.gate") == 8 and bits("model.layers.1.mlp.gate_proj") == 4
    source._names = ()  # nothing is called so: AutoRound searches for it
    assert bits("model.layers.1.mlp.gate_proj") == 8


def test_exceptions_of_awqs_layout_may_repeat_what_holds_for_all() -> None:
    given = {"a": {"bits": 16, "group_size": 32}, "b": {"bits": 4, "group_size": 128}, "c": {"sym": False}}
    check_quantization({**GPTQ, "packing_format": "auto_round:auto_awq", "extra_config": given})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({**FLOATS, "extra_config": ["a"]}, r"extra_config must be an object, got \['a'\]"),
        ({**GPTQ, "extra_config": {"a": 8}}, "extra_config.a must be an object, got 8"),
        ({**FLOATS, "extra_config": {"a": {"bits": "8"}}}, "extra_config.a.bits must be a whole number, got '8'"),
        ({**GPTQ, "extra_config": {"a": {"bits": 8.0}}}, "extra_config.a.bits must be a whole number, got 8.0"),
        ({**FLOATS, "bits": None, "extra_config": {"a": {}}}, "bits must be a whole number, got None"),
        ({**FLOATS, "extra_config": {"a(": {"bits": 8}}}, r"pattern 'a\(' .* no regular expression"),
    ],
)
def test_what_is_malformed_is_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_quantization(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({**GPTQ, "packing_format": "mlx"}, "packing_format 'mlx'; supported: auto_round:auto_gptq"),
        ({**FLOATS, "packing_format": None}, "packing_format None and data_type 'mx_fp'; supported: int"),
        (
            {**GPTQ, "packing_format": "auto_round:auto_awq", "extra_config": {"a": {"group_size": 32}}},
            "extra_config.a.group_size 32; supported: 128 as for all",
        ),
        ({**GPTQ, "packing_format": "auto_round:awq", "extra_config": {"a": {"bits": 8}}}, "extra_config.a.bits 8"),
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


@pytest.mark.parametrize(
    ("section", "bits"),
    [
        (GPTQ, 4),
        ({**GPTQ, "bits": 4.0}, None),
        ({**GPTQ, "extra_config": {"a": {"bits": 8}}}, None),
        ({**GPTQ, "extra_config": {"a": {"bits": 16}, "b": {"sym": False}}}, 4),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:a": {}, "b": {"bits": 8}}}, None),
    ],
)
def test_bits_are_told_where_all_modules_have_them(section: dict[str, Any], bits: int | None) -> None:
    source: Any = Names(section)
    assert integer_bits(source) == bits
