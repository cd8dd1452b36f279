"""config.json: real ones, both spellings of rope, and everything that must be refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import CheckpointError, UnsupportedError
from forerun.layers.rotary import rope_table
from forerun.models.config import ModelConfig, num_parameters
from forerun.models.families import FAMILIES
from forerun.models.loader import find_family
from tests.models import factory
from tests.support.shared import shared_data

BASE: dict[str, Any] = {**factory.SIZES, "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4}
CHUNKS = {"chunk_size": 40, "local_size": 8}


def read(**changes: Any) -> ModelConfig:
    raw = {**BASE, **changes}
    return ModelConfig.read(raw, FAMILIES[raw["model_type"]])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-8B-Instruct", 8.03),
        ("Llama-3.2-1B-Instruct", 1.236),
        ("Mistral-7B-Instruct-v0.3", 7.248),
        ("Qwen2.5-7B-Instruct", 7.616),
        ("Qwen3-8B", 8.191),
        ("phi-4", 14.66),
    ],
)
def test_real_configs_have_the_published_sizes(name: str, billions: float) -> None:
    raw = json.loads(shared_data(f"configs/hf/{name}.config.json").read_text())
    family = find_family(raw)
    assert family is not None
    config = ModelConfig.read(raw, family)
    assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert set(config.windows) == {0}


def test_both_spellings_of_rope_agree() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = read(rope_theta=5e4, rope_scaling=scaling)
    raw = {name: value for name, value in BASE.items() if name != "rope_theta"}
    raw["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
    new = ModelConfig.read(raw, FAMILIES["llama"])
    assert old.rope == new.rope and new.rope.theta == 5e4
    assert old.max_position == 128


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, 64),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 256),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"rope_scaling": {"rope_type": "default"}}, 64),
        ({"rope_scaling": factory.LLAMA3}, 64),
    ],
)
def test_reachable_positions(changes: dict[str, Any], positions: int) -> None:
    assert read(**changes).max_position == positions


def test_yarns_amplitude_is_multiplied_by_attn_factor() -> None:
    """DeepSeek-R1-0528-Qwen3-8B's cancels it."""
    published = {"attn_factor": 0.8782488562869419, "factor": 4.0, "original_max_position_embeddings": 32768,
                 "rope_type": "yarn"}  # fmt: skip
    assert read(rope_scaling=published).rope.amplitude == pytest.approx(1.0, abs=1e-12)
    assert read(rope_scaling={**published, "attention_factor": 1.2}).rope.amplitude == 1.2
    plain = {name: value for name, value in published.items() if name != "attn_factor"}
    assert read(rope_scaling={**plain, "finetuned": True}) == read(rope_scaling=plain)


def test_positions_of_dual_chunk_attention_end_with_its_first_chunk() -> None:
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    fields = {"model_type": "qwen2", "max_position_embeddings": 1010000}
    assert read(**fields, dual_chunk_attention_config=chunks).max_position == 253952
    early = {**chunks, "original_max_position_embeddings": 4096}  # from where on scores grow
    assert read(**fields, dual_chunk_attention_config=early).max_position == 4096
    assert read(**fields).max_position == 1010000


def test_windows() -> None:
    assert read(model_type="mistral").windows == (4096, 4096)
    assert read(model_type="mistral", sliding_window=None).windows == (0, 0)
    assert read(model_type="qwen2", sliding_window=8).windows == (0, 0)
    used = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    assert read(**used, max_window_layers=1).windows == (0, 8)
    assert read(**used, layer_types=["sliding_attention", "full_attention"]).windows == (8, 0)


def test_fields_that_change_nothing_are_ignored() -> None:
    config = read(
        pretraining_tp=2, attention_dropout=0.1, _name_or_path="x", attn_implementation="sdpa", rope_interleaved=False,
        unsloth_version="2024", hidden_dropout=0.3, use_cache=False, quantization_config=None, initializer_range=0.1,
    )  # fmt: skip
    assert config == read()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"attention_multiplier": 0.5}, "attention_multiplier"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"head_dim": 7}, "7 entries of every head"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: hqq"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "type 'mrope'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "surprise": 1}}, 'surprise.*implementation="transf'),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "ion' for layer 1"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        (
            {"model_type": "qwen2", "dual_chunk_attention_config": {**CHUNKS, "sparse_attention_config": {}}},
            "not know: sparse_attention_config",
        ),
        (
            {"model_type": "qwen2", "dual_chunk_attention_config": {**CHUNKS, "sparse_attention_enabled": True}},
            "sparse_attention_enabled is True",
        ),
    ],
)
def test_unsupported_fields_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": "many"}, "vocab_size must be a whole number from 1 to 2147483647, got 'many'"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers must be a whole number from 1 to 10000"),
        ({"num_hidden_layers": None}, "lacks 'num_hidden_layers'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 5}, "not a multiple of num_attention_heads 5"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {**factory.LLAMA3, "high_freq_factor": 0.5}}, "low_freq_factor <= high_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3.0}}, "differ"),
        ({"model_type": "qwen2", "layer_types": "full"}, "layer_types must be a list of strings"),
        ({"model_type": "qwen2", "dual_chunk_attention_config": {**CHUNKS, "local_size": 40}}, "local_size must be"),
    ],
)
def test_malformed_fields_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(**changes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.sampled_from(["", "silu", "yarn", "linear"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)
FIELDS = sorted(
    {*BASE, "rope_scaling", "rope_parameters", "head_dim", "layer_types", "sliding_window", "max_window_layers"}
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3))
def test_any_value_is_read_or_refused(model_type: str, changes: dict[str, Any]) -> None:
    raw = {**BASE, **changes, "model_type": model_type}
    try:
        config = ModelConfig.read(raw, FAMILIES[model_type])
    except (CheckpointError, UnsupportedError) as error:
        assert "config.json" in str(error)
    else:
        assert len(config.windows) == config.num_layers and config.heads.rotary_dim % 2 == 0
        assert num_parameters(config) > 0
        if config.rope.rotary_dim < 1000:
            assert rope_table(config.rope, 4).isfinite().all()


SCALINGS = {
    "llama": [factory.YARN, factory.LLAMA3, {"rope_type": "dynamic", "factor": 2.0}],
    "phi3": [factory.LONGROPE],
}
numbers = st.none() | st.integers(-3, 2**40) | st.floats()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(sorted(SCALINGS)))
def test_any_rope_is_read_or_refused(data: st.DataObject, model_type: str) -> None:
    scaling = data.draw(st.sampled_from(SCALINGS[model_type]))
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(scaling)), numbers, max_size=2))
    raw = {**BASE, "model_type": model_type, "rope_scaling": {**scaling, **changed}}
    try:
        config = ModelConfig.read(raw, FAMILIES[model_type])
    except (CheckpointError, UnsupportedError):
        return
    assert rope_table(config.rope, 4).isfinite().all()


def test_what_a_file_does_not_say_is_what_transformers_takes() -> None:
    """Mixtral's key and value heads; Gemma's activation, where a file has null for it, too."""
    sizes = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    sizes |= {"num_attention_heads": 16, "hidden_size": 64}
    assert ModelConfig.read({**sizes, "model_type": "mixtral"}, FAMILIES["mixtral"]).heads.num_kv == 8
    assert ModelConfig.read({**sizes, "model_type": "llama"}, FAMILIES["llama"]).heads.num_kv == 16
    gelu, silu = (
        ModelConfig.read({**BASE, "model_type": name}, FAMILIES[name]).activation for name in ("gemma2", "llama")
    )
    assert read(model_type="gemma2", hidden_activation=None).activation == gelu != silu
