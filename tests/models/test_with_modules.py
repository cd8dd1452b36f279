"""Families whose checkpoints come with MTP modules of layers in windows: published configs, bounds, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import CheckpointError, ModelError, UnsupportedError
from forerun.models.config import ModelConfig, active_parameters, num_parameters
from forerun.models.families import FAMILIES
from forerun.models.loader import load_model
from tests.models import factory
from tests.models.factory import Runner

TOKENS = [5, 9, 40, 33, 7, 81, 3, 9, 40, 12, 13]
WEIGHTS = "model.safetensors"
STEP: dict[str, Any] = {  # Step-3.5-Flash
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264,
    "num_hidden_layers": 45, "vocab_size": 128896, "num_attention_heads": 64, "num_attention_groups": 8,
    "head_dim": 128, "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96,
                                                 "num_attention_groups": 8, "head_dim": 128},
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12, "sliding_window": 512,
    "max_position_embeddings": 262144, "max_seq_len": 262144, "num_nextn_predict_layers": 3, "att_impl_type": "GQA",
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12, "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072,
                     "low_freq_factor": 1.0, "high_freq_factor": 32.0},
    "yarn_only_types": ["full_attention"], "use_rope_layers": [], "use_head_wise_attn_gate": True, "sink": False,
    "use_moe": True, "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288, "moe_top_k": 8,
    "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_layer_offset": 0, "moe_every_n_layer": 1,
    "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "norm_expert_weight": True,
    "use_moe_router_bias": True, "need_fp32_gate": True, "torch_dtype": "bfloat16",
    "swiglu_limits": [0.0] * 43 + [7, 7, 0.0, 0.0, 0.0], "swiglu_limits_shared": [0.0] * 44 + [16, 0.0, 0.0, 0.0],
}  # fmt: skip
MIMO_V2: dict[str, Any] = {  # MiMo-V2-Flash
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_size": 4096,
    "intermediate_size": 16384, "num_hidden_layers": 48, "vocab_size": 152576, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "rope_theta": 5000000,
    "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "attention_value_scale": 0.707, "attention_bias": False,
    "sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128, "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, *([0, 1, 1, 1, 1, 1] * 7), 0], "moe_layer_freq": [0] + [1] * 47,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "layernorm_epsilon": 1e-5,
    "n_routed_experts": 256, "n_shared_experts": None, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": None, "hidden_act": "silu", "max_position_embeddings": 262144,
}  # fmt: skip


def read(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.read({**raw, **changes}, FAMILIES[raw["model_type"]])


def test_the_published_step_config() -> None:
    config = read(STEP)
    assert num_parameters(config) / 1e9 == pytest.approx(196.96, rel=1e-3)  # "196B", without modules that draft
    assert active_parameters(config) / 1e9 == pytest.approx(11.99, rel=1e-3)  # "11B", without a table's rows
    assert [config.window(layer) for layer in (0, 1, 44, 45, 47)] == [0, 512, 0, 512, 512]
    assert [config.shape(layer).heads.num_q for layer in (0, 1, 45)] == [64, 96, 96]
    assert [config.has_experts(layer) for layer in (2, 3, 44, 45)] == [False, True, True, False]
    assert [config.shape(layer).experts_bound for layer in (42, 43, 44, 45)] == [0, 7, 7, 0]
    assert [config.shape(layer).bound for layer in (43, 44, 45)] == [0, 16, 0]
    ropes = [(rope.kind, rope.theta, rope.rotary_dim) for rope in map(config.rope_of, (0, 1, 45))]
    assert ropes == [("llama3", 5e6, 64), ("default", 1e4, 128), ("default", 1e4, 128)]


def test_the_published_mimo_config() -> None:
    config = read(MIMO_V2)
    assert num_parameters(config) / 1e9 == pytest.approx(308.78, rel=1e-3)  # "309B"
    assert active_parameters(config) / 1e9 == pytest.approx(15.45, rel=1e-3)  # "15B"
    assert [config.window(layer) for layer in (0, 1, 5, 47, 48)] == [0, 128, 0, 0, 128]
    shapes = [config.shape(layer) for layer in (0, 1, 48)]
    assert [(shape.heads.num_kv, shape.has_sinks) for shape in shapes] == [(4, False), (8, True), (8, True)]
    assert [config.rope_of(layer).theta for layer in (0, 1, 48)] == [5e6, 1e4, 1e4]
    assert (config.norm_eps, config.rope.rotary_dim, config.scales.of_attention) == (1e-5, 64, 0.707)
    assert [config.has_experts(layer) for layer in (0, 1, 47)] == [False, True, True]


def test_published_fields_of_a_mimo_say_what_transformers_does(tmp_path: Path) -> None:
    raw = json.loads((factory.make_checkpoint("mimo-v2", tmp_path) / "config.json").read_text(encoding="utf-8"))
    ropes = raw["rope_parameters"]
    own = {
        "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "layernorm_epsilon": raw["rms_norm_eps"],
        "rope_theta": ropes["full_attention"]["rope_theta"], "partial_rotary_factor": 0.334,
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"], "routed_scaling_factor": None,
    }  # fmt: skip
    renamed = ("layer_types", "mlp_layer_types", "rms_norm_eps", "rope_parameters")
    assert read({**{name: value for name, value in raw.items() if name not in renamed}, **own}) == read(raw)


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def test_a_mimo_saved_by_transformers_is_the_published_one() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**MIMO_V2)
    saved = json.loads(config.to_json_string())
    assert saved["sliding_window"] == 129 and set(saved["rope_parameters"]) == {"full_attention", "sliding_attention"}
    assert read(saved, bos_token_id=None) == read(MIMO_V2)  # 1 where there is none
    with pytest.raises(UnsupportedError, match="swa_rope_theta differs from rope_parameters of sliding_attention"):
        read(saved, swa_rope_theta=20000)


def test_windowed_layers_of_a_mimo_without_a_base_of_their_own_have_that_of_all() -> None:
    config = read(without(MIMO_V2, "swa_rope_theta"))
    assert [(config.rope_of(layer).theta, config.rope_of(layer).rotary_dim) for layer in (0, 1)] == [(5e6, 64)] * 2
    flat = {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.334}
    bare = without(MIMO_V2, "swa_rope_theta", "rope_theta", "partial_rotary_factor")
    assert read(bare, rope_parameters=flat) == config
    with pytest.raises(CheckpointError, match="lacks 'rope_theta'"):
        read(bare)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default"}])
def test_ropes_of_a_mimo_are_not_scaled(scaling: dict[str, Any] | None) -> None:
    assert read(MIMO_V2, rope_scaling=scaling) == read(MIMO_V2)


def test_values_of_a_mimo_are_scaled_unless_it_says_null() -> None:
    assert read(without(MIMO_V2, "attention_value_scale")).scales.of_attention == 0.707
    assert read(MIMO_V2, attention_value_scale=None).scales.of_attention == 1.0
    assert read(MIMO_V2, attention_value_scale=0.5).scales.of_attention == 0.5


@pytest.mark.parametrize("scaled", [None, []])
def test_ropes_of_a_step_are_scaled_in_full_layers_alone(scaled: list[str] | None) -> None:
    assert read(STEP, yarn_only_types=scaled) == read(without(STEP, "yarn_only_types")) == read(STEP)


def test_a_gate_that_overflows_weighs_its_own_head_alone(tmp_path: Path) -> None:
    """Sigmoids of 1e4 are 0 and 1, as those of infinity are."""
    model = load_model(factory.make_checkpoint("step3.5", tmp_path), factory.make_kernels()).model
    attention = model.parts.layers[1].attending
    plain, made = attention.head_gate, []
    for size in (1e4, math.inf):
        ends = torch.tensor([size, -size])
        attention.head_gate = lambda x, ends=ends: torch.cat([ends.expand(len(x), 2), plain(x)[:, 2:]], dim=1)
        made.append(Runner(model, 40).span(TOKENS).logits)
    assert made[0].isfinite().all() and torch.equal(*made)
    attention.head_gate = plain
    assert not torch.equal(Runner(model, 40).span(TOKENS).logits, made[0])


def test_layers_with_experts_of_a_step() -> None:
    assert read(STEP, moe_layers_enum=list(range(3, 45))) == read(STEP)
    assert read(without(STEP, "moe_layers_enum")) == read(STEP)
    config = read(STEP, moe_layers_enum=[1, 4])
    assert [config.has_experts(layer) for layer in range(5)] == [False, True, False, False, True]


def test_bounds_that_bind_are_those_of_transformers(tmp_path: Path) -> None:
    model = factory.random_hf_model("step3p5", factory.STEP)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.mlp.experts.gate_up_proj *= 30
            for linear in (layer.mlp.shared_experts.gate_proj, layer.mlp.shared_experts.up_proj):
                linear.weight *= 30
    folder = factory.save_checkpoint(model, tmp_path)
    loaded = load_model(folder, factory.make_kernels()).model
    gates = [(layer.mlp.experts[0].activation, layer.mlp.shared.activation) for layer in loaded.parts.layers[1:]]
    assert gates == [("silu", "silu"), ("silu_within_7", "silu"), ("silu_within_7", "silu_within_16")]
    found = Runner(loaded, 12).span(TOKENS).logits
    truth, theirs = (factory.hf_logits(folder, TOKENS, dtype) for dtype in (torch.float64, torch.float32))
    assert factory.rms_error(found, truth) <= 2 * factory.rms_error(theirs, truth)


@pytest.mark.parametrize(
    ("raw", "changes", "named"),
    [
        (STEP, {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False"),
        (STEP, {"use_moe_router_bias": False}, "use_moe_router_bias is False"),
        (STEP, {"moe_router_activation": "softmax"}, "moe_router_activation is 'softmax'"),
        (STEP, {"sink": True}, "sink is True"),
        (STEP, {"zero_centered": False}, "zero_centered is False"),
        (STEP, {"swiglu_limits": [5.0] * 48}, "swiglu_limits is"),
        (STEP, {"use_rope_layers": [1] * 48}, "use_rope_layers"),
        (STEP, {"rope_theta": [1e4, 2e4] * 24}, "differ among layers of type sliding_attention"),
        (STEP, {"layer_types": STEP["layer_types"][:44]}, "layer_types must name 45 layers"),
        (STEP, {"num_nextn_predict_layers": 2}, "got 48 entries"),
        (STEP, {"attention_other_setting": {"head_dim": 64}}, "head_dim is 64"),
        (STEP, {"attention_other_setting": {"true_head_dim": 64}}, "true_head_dim is 64"),
        (STEP, {"attention_other_setting": {"num_heads": 96}}, "fields forerun does not know: num_heads"),
        (STEP, {"moe_layers_enum": "3-44"}, "moe_layers_enum must list"),
        (STEP, {"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        (STEP, {"moe_expert_bias": True}, "moe_expert_bias"),
        (MIMO_V2, {"swa_head_dim": 128}, "swa_head_dim is 128, head_dim 192; they must be equal"),
        (MIMO_V2, {"sliding_window_size": 64}, "sliding_window_size is 64"),
        (MIMO_V2, {"sliding_window": 130}, "sliding_window_size is 128"),
        (MIMO_V2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is .*yarn.* without scaling only"),
        (MIMO_V2, {"rope_scaling": {"type": "default", "factor": 4.0}}, "without scaling only"),
        (MIMO_V2, {"hybrid_layer_pattern": [2] * 48}, "hybrid_layer_pattern must hold"),
        (MIMO_V2, {"attention_projection_layout": "fused_qkv"}, "attention_projection_layout is 'fused_qkv'"),
        (MIMO_V2, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (MIMO_V2, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "differ from rope_theta"),
        (MIMO_V2, {"swa_expert_scale": 2.0}, "swa_expert_scale"),
    ],
)
def test_what_changes_the_computation_is_refused(raw: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        read(raw, **changes)


def in_8_bits(folder: Path) -> dict[str, torch.Tensor]:
    """Store the experts of a Step as e4m3 with a scale for each block, as published -> what they are worth."""
    generator, tensors, worth = torch.Generator().manual_seed(3), load_file(folder / WEIGHTS), {}
    for name in [name for name in tensors if ".moe." in name and name.endswith("_proj.weight")]:
        num_experts, rows, columns = tensors[name].shape
        codes = tensors[name].to(torch.float8_e4m3fn)
        scales = torch.rand(num_experts, -(-rows // 16), -(-columns // 8), generator=generator) + 0.5
        spread = scales.repeat_interleave(16, dim=1)[:, :rows].repeat_interleave(8, dim=2)[:, :, :columns]
        worth[name] = codes.float() * spread
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    path = folder / "config.json"
    section = {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic", "fmt": "e4m3"}
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**raw, "quantization_config": section}), encoding="utf-8")
    return worth


def test_experts_of_a_step_in_8_bits(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("step3.5", tmp_path)
    worth = in_8_bits(folder)
    model = load_model(folder, factory.make_kernels()).model
    for layer in (1, 2, 3):
        gate, up, down = (worth[f"model.layers.{layer}.moe.{part}_proj.weight"] for part in ("gate", "up", "down"))
        for index, expert in enumerate(model.parts.layers[layer].mlp.experts):
            assert torch.equal(expert.gate_up.weight.dequantize(), torch.cat([gate[index], up[index]]))
            assert torch.equal(expert.down.weight.dequantize(), down[index])
    tensors, name = load_file(folder / WEIGHTS), "model.layers.2.moe.up_proj.weight_scale_inv"
    for changed in ({**tensors, name: tensors[name][:5]}, {key: each for key, each in tensors.items() if key != name}):
        save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=name):
            load_model(folder, factory.make_kernels())


@pytest.mark.parametrize(
    ("raw", "changes", "named"),
    [
        (STEP, {"partial_rotary_factors": [0.5, 1.0]}, "must have an entry for each"),
        (STEP, {"attention_other_setting": ["sliding_attention"]}, "attention_other_setting must be an object"),
        (STEP, {"attention_other_setting": {"num_attention_heads": 95}}, "95 query heads, .* of their 8 key heads"),
        (STEP, {"moe_layers_enum": [3, -1]}, "moe_layers_enum must be a list of whole numbers"),
        (MIMO_V2, {"swa_num_key_value_heads": 7}, "64 query heads, .* of their 7 key heads"),
        (MIMO_V2, {"rope_parameters": ["default"]}, "rope_parameters must be an object"),
    ],
)
def test_malformed_fields_are_named(raw: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(raw, **changes)


def test_missing_gates_are_named(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("step3.5", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.2.self_attn.g_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.g_proj"):
        load_model(folder, factory.make_kernels())
