"""Mixtures of experts and attention over latents: recording, drafting, layers behind the last, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.errors import CheckpointError, ConfigError, KernelError, UnsupportedError
from forerun.layers.linear import Linear
from forerun.layers.mla import LatentAttention
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import MixtureOfExperts
from forerun.models.base import passes_of
from forerun.models.build import Builder
from forerun.models.config import ModelConfig, active_parameters, num_parameters
from forerun.models.decoder import Decoder
from forerun.models.families import FAMILIES
from forerun.models.loader import load_model, read_config
from forerun.models.storage import describe_storage
from forerun.quant.dense import DenseWeight
from forerun.quant.joined import JoinedWeight
from forerun.quantize.run import open_source
from forerun.quantize.settings import QuantizeSettings
from forerun.runtime.bind import bind
from forerun.weights.checkpoint import Checkpoint
from tests.models import factory
from tests.models.factory import CASES, Runner, new_kvs
from tests.support.shared import shared_data

WITH_EXPERTS = ("moe", "mixtral", "deepseek", "oss", "minimax", "llama4", "step", "mimo", "longcat", "kimi", "-latent")
SPARSE = [name for name in CASES if any(word in name for word in WITH_EXPERTS)]
WEIGHTS = "model.safetensors"
TOKENS = [5, 9, 40, 33, 7, 81, 3, 9, 40]


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, factory.make_kernels(), **options)


@pytest.mark.parametrize("case", SPARSE)
def test_sizes_are_known_from_config_json_alone(case: str, tmp_path: Path) -> None:
    folder = factory.make_checkpoint(case, tmp_path)
    config, model = read_config(folder), load(folder).model
    assert config is not None and num_parameters(config) == model.num_parameters
    assert model.weight_bytes <= 1.2 * 4 * num_parameters(config)  # panels are filled up
    is_latent = case.startswith(("deepseek", "glm4-moe-lite", "longcat", "kimi"))
    assert all(spec.latent == is_latent for spec in model.kv_specs)
    if is_latent:
        assert model.kv_specs[0].bytes_per_position == 4 * (20 + 8)  # the latent and the rotated part, once


RECORDED = (
    "mixtral-window", "qwen2-moe", "deepseek-direct", "gpt-oss", "minimax-m2", "llama4", "step3.5", "mimo-v2",
)  # fmt: skip


@pytest.mark.parametrize("case", RECORDED)
def test_a_recorded_forward_has_the_bits_of_the_models_own(case: str, tmp_path: Path) -> None:
    pytest.importorskip("forerun.kernels.cpu._native")
    kernels = factory.make_kernels("cpu")
    model = load_model(factory.make_checkpoint(case, tmp_path, torch.bfloat16), kernels).model
    own, replayed = Runner(model, 40), Runner(model, 40)
    replayed.runner = bind(passes_of(model, (0, 2)), kernels, replayed.kvs, 4)
    assert replayed.runner.replays
    plain, found = (runner.span(TOKENS, hidden=(0, 2)) for runner in (own, replayed))
    assert torch.equal(plain.logits, found.logits) and torch.equal(plain.hidden[2], found.hidden[2])
    own_logits = own.tree([4, 8, 8, 9], [-1, 0, 0, 1], 9)
    own.runner = bind(passes_of(model), kernels, own.kvs, 4)
    assert torch.equal(own.tree([4, 8, 8, 9], [-1, 0, 0, 1], 9), own_logits)


def generated(llm: LLM, temperature: float) -> list[Any]:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    prompts = [list(range(5, 15)) * 2, [7, 8, 9], list(range(40, 70))]
    return [output.outputs[0] for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("case", ["mixtral", "deepseek", "gpt-oss", "step3.5", "mimo-v2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_and_chunks_change_no_token(case: str, temperature: float, tmp_path: Path) -> None:
    folder = str(factory.make_checkpoint(case, tmp_path))
    plain = generated(LLM(folder, drafter="none", threads=1), temperature)
    draft = {"drafter": "draft", "draft_model": folder, "adaptive": False, "max_draft_tokens": 6}
    for options in (
        {"drafter": "ngram", "ngram_min": 1, "adaptive": False},
        draft,
        {**draft, "tree_width": 3, "max_num_batched_tokens": 24},
    ):
        found = generated(LLM(folder, threads=1, **options), temperature)
        assert [sample.token_ids for sample in found] == [sample.token_ids for sample in plain], options
        if options["drafter"] == "draft":
            assert sum(count.accepted for sample in found for count in sample.stats.drafters.values()) > 20


def with_extra_layer(folder: Path, name: str = "eh_proj") -> dict[str, Tensor]:
    """Store a layer for drafting behind the last one, as DeepSeek-V3 is published."""
    tensors = load_file(folder / WEIGHTS)
    last = {key: value for key, value in tensors.items() if ".layers.1." in key}
    extra = {key.replace(".layers.1.", ".layers.2."): value * 0.5 for key, value in last.items()}
    extra[f"model.layers.2.{name}.weight"] = torch.ones(32, 64)
    save_file({**tensors, **extra}, folder / WEIGHTS, metadata={"format": "pt"})
    return extra


def test_layers_for_drafting_are_left_alone_and_can_be_built(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("deepseek", tmp_path)
    before = Runner(load(folder).model, 20).span(TOKENS).logits
    extra = with_extra_layer(folder)
    assert torch.equal(Runner(load(folder).model, 20).span(TOKENS).logits, before)
    checkpoint, family = Checkpoint.open(folder), FAMILIES["deepseek_v3"]
    config = ModelConfig.read(checkpoint.config, family)
    builder = Builder(config, family, checkpoint, factory.make_kernels(), None, 40)
    first, behind = builder.layer(0), builder.layer(2)
    assert isinstance(first.mlp, GatedMLP) and isinstance(behind.mlp, MixtureOfExperts)
    assert isinstance(behind.attention, LatentAttention)
    stored = extra["model.layers.2.mlp.experts.3.down_proj.weight"]
    assert torch.equal(behind.mlp.experts[3].down.weight.dequantize(), stored)


def in_pieces(mixture: MixtureOfExperts) -> MixtureOfExperts:
    """The same mixture with two matrices for gate and up, as of formats that cannot be joined."""
    kernels, experts = factory.make_kernels(), []
    for expert in mixture.experts:
        gate_up = JoinedWeight([DenseWeight(kernels, half) for half in expert.gate_up.weight.dequantize().chunk(2)])
        experts.append(GatedMLP(kernels, Linear(gate_up), expert.down, expert.activation))
    return MixtureOfExperts(kernels, mixture.routing, mixture.router, experts, mixture.correction, mixture.shared)


def test_experts_in_several_pieces_have_the_bits_of_the_op(tmp_path: Path) -> None:
    model = load(factory.make_checkpoint("qwen2-moe", tmp_path)).model
    mixture, x = model.parts.layers[1].mlp, torch.randn(7, 32)
    assert torch.equal(in_pieces(mixture)(x), mixture(x))


def test_experts_in_one_tensor_have_the_bits_of_single_ones(tmp_path: Path) -> None:
    """As transformers keeps them in memory."""
    folder = factory.make_checkpoint("mixtral", tmp_path)
    before, tensors = Runner(load(folder).model, 20).span(TOKENS).logits, load_file(folder / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 1):
        names = [f"model.layers.{layer}.block_sparse_moe.experts.{index}" for index in range(5)]
        gate_up = [torch.cat([tensors[f"{name}.{part}.weight"] for part in ("w1", "w3")]) for name in names]
        stacked = names[0].removesuffix(".0")
        kept[f"{stacked}.gate_up_proj"] = torch.stack(gate_up)
        kept[f"{stacked}.down_proj"] = torch.stack([tensors[f"{name}.w2.weight"] for name in names])
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    assert torch.equal(Runner(load(folder).model, 20).span(TOKENS).logits, before)


def test_experts_without_gates_in_one_tensor_have_the_bits_of_single_ones(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("nemotron-h-latent", tmp_path)
    before, tensors = Runner(load(folder).model, 20).span(TOKENS).logits, load_file(folder / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for module in [name.removesuffix(".0.up_proj.weight") for name in tensors if name.endswith(".0.up_proj.weight")]:
        for part in ("up_proj", "down_proj"):
            kept[f"{module}.{part}"] = torch.stack([tensors[f"{module}.{index}.{part}.weight"] for index in range(6)])
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    assert sum(name.endswith("experts.up_proj") for name in kept) == 2
    assert torch.equal(Runner(load(folder).model, 20).span(TOKENS).logits, before)


def with_blocks(folder: Path) -> dict[str, Tensor]:
    """Store the experts of a gpt-oss as random MXFP4, as they are published -> what the blocks are worth."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator, tensors, worth = torch.Generator().manual_seed(2), load_file(folder / WEIGHTS), {}
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, columns, rows = tensors.pop(name).shape
        sizes = num_experts, rows, columns // 32, 16
        tensors[f"{name}_blocks"] = torch.randint(256, sizes, generator=generator).byte()
        tensors[f"{name}_scales"] = torch.randint(121, 125, sizes[:-1], generator=generator).byte()
        blocks = (tensors[f"{name}_{part}"].clone() for part in ("blocks", "scales"))
        worth[name] = convert_moe_packed_tensors(*blocks, dtype=torch.float32)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return worth


def test_blocks_are_worth_what_transformers_says(tmp_path: Path) -> None:
    fields = {**factory.GPT_OSS, "hidden_size": 64, "intermediate_size": 96}
    folder = factory.save_checkpoint(factory.random_hf_model("gpt_oss", fields), tmp_path / "blocks")
    plain = factory.save_checkpoint(factory.random_hf_model("gpt_oss", fields), tmp_path / "plain")
    worth = with_blocks(folder)
    save_file(load_file(plain / WEIGHTS) | worth, plain / WEIGHTS, metadata={"format": "pt"})
    model, dense = load(folder).model, load(plain).model
    for layer in (0, 1):
        ours, theirs = (part.parts.layers[layer].mlp for part in (model, dense))
        for packed, expert in zip(ours.experts, theirs.experts, strict=True):
            assert torch.equal(packed.gate_up.weight.dequantize(), expert.gate_up.weight.dequantize())
            assert torch.equal(packed.down.weight.dequantize(), expert.down.weight.dequantize())
        size = 5 * 3 * 64 * 96 * 4.25 / 8
        assert sum(e.gate_up.weight.nbytes + e.down.weight.nbytes for e in ours.experts) <= 1.05 * size
    said = describe_storage(folder)
    assert (said["format"], said["method"], said["bits"], said["group_size"]) == ("quantized", "mxfp4", 4, 32)
    found, truth = (Runner(one, 20).span(TOKENS).logits for one in (model, dense))
    assert factory.rms_error(found, truth.double()) < 0.02 * float(truth.std())
    runner = Runner(model, 20)
    assert torch.equal(torch.stack([runner.root(token, at) for at, token in enumerate(TOKENS)]), found)


def test_broken_blocks_are_refused(tmp_path: Path) -> None:
    fields = {**factory.GPT_OSS, "hidden_size": 64, "intermediate_size": 96}
    folder = factory.save_checkpoint(factory.random_hf_model("gpt_oss", fields), tmp_path)
    with_blocks(folder)
    tensors, name = load_file(folder / WEIGHTS), "model.layers.1.mlp.experts.down_proj"
    spoilt = tensors[f"{name}_scales"].clone()
    spoilt[1, 2, 0] = 255  # NaN
    without = {key: value for key, value in tensors.items() if key != f"{name}_scales"}
    for changed, says in (
        ({**tensors, f"{name}_scales": spoilt}, "no scale 255"),
        ({**tensors, f"{name}_scales": spoilt[:, :, :1].contiguous()}, "has shape"),
        (without, f"no tensor {name}_scales"),
    ):
        save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=says):
            load(folder)


def test_latents_are_not_kept_in_8_bits(tmp_path: Path) -> None:
    folder = str(factory.make_checkpoint("deepseek", tmp_path))
    with pytest.raises(ConfigError, match="keeps latents"):
        LLM(folder, kv_cache_dtype="int8", threads=1).generate([[5, 6]], SamplingParams(max_tokens=2))
    wide = LLM(folder, drafter="none", kv_cache_dtype="bfloat16", threads=1)
    assert len(generated(wide, 0.0)[0].token_ids) == 24


@pytest.mark.parametrize("case", ["mixtral", "deepseek", "lfm2", "falcon-h1"])
def test_quantizing_is_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="mixtures of experts, latent attention"):
        open_source(factory.make_checkpoint(case, tmp_path), QuantizeSettings())


def test_the_recorder_refuses_what_it_cannot_write_down(tmp_path: Path) -> None:
    pytest.importorskip("forerun.kernels.cpu._native")
    kernels = factory.make_kernels("cpu")
    model = load_model(factory.make_checkpoint("mixtral", tmp_path), kernels).model
    layers = tuple(replace(layer, mlp=in_pieces(layer.mlp)) for layer in model.parts.layers)
    model = Decoder(replace(model.parts, layers=layers), model.max_position, model.kv_specs[0].dtype)
    assert not bind(passes_of(model), kernels, new_kvs(model, 4), 4).replays
    with pytest.raises(KernelError):
        kernels.linear(torch.ones(1, 3), model.parts.lm_head.weight.packed)


def test_the_published_deepseek_config() -> None:
    raw = json.loads(shared_data("configs/hf/DeepSeek-V3.config.json").read_text())
    config = ModelConfig.read(raw, FAMILIES["deepseek_v3"])
    assert num_parameters(config) / 1e9 == pytest.approx(671.0, rel=1e-3)
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * 3.688879454 + 1) ** 2)
    assert active_parameters(config) / 1e9 == pytest.approx(37.55, rel=1e-2)  # "37B activated", without a table's rows
    assert config.rope.amplitude == 1.0 and config.max_position == 163840
    assert [config.has_experts(layer) for layer in (0, 2, 3, 60, 61)] == [False, False, True, True, True]


def test_the_published_gpt_oss_config() -> None:
    raw = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "attention_dropout": 0.0,
        "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": False},
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip
    config = ModelConfig.read(raw, FAMILIES["gpt_oss"])
    assert num_parameters(config) / 1e9 == pytest.approx(20.9, rel=2e-3)
    assert active_parameters(config) / 1e9 == pytest.approx(4.19, rel=1e-2)  # "3.6B active", without a table's rows
    assert config.windows == (128, 0) * 12 and config.max_position == 131072
    bare = {key: value for key, value in raw.items() if key != "rope_scaling"}
    assert ModelConfig.read(bare, FAMILIES["gpt_oss"]).rope == config.rope  # transformers' default too


def test_positions_that_the_indexer_selects_from_are_refused(tmp_path: Path) -> None:
    fields = {**CASES["deepseek-v32"][1], "index_topk": 12}
    folder = factory.save_checkpoint(factory.random_hf_model("deepseek_v32", fields), tmp_path)
    model = load(folder).model
    assert model.max_position == 12
    found, truth = Runner(model, 12).span(TOKENS).logits, factory.hf_logits(folder, TOKENS, torch.float64)
    assert factory.rms_error(found, truth) < 1e-5
    with pytest.raises(ConfigError, match=r"from 1 to 12, .*attends to a selection"):
        load(folder, max_position=13)


def test_the_published_llama_4_config() -> None:
    raw = {  # Llama-4-Scout-17B-16E, its text
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 202048, "max_position_embeddings": 10485760, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "attention_bias": False, "attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "no_rope_layers": [],
        "num_experts_per_tok": 1, "num_local_experts": 16, "use_qk_norm": True, "rope_theta": 500000.0,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "attention_dropout": 0.0, "for_llm_compressor": False, "bos_token_id": 200000, "pad_token_id": 200018,
        "eos_token_id": [200001, 200007, 200008], "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 8192},
    }  # fmt: skip
    config = ModelConfig.read(raw, FAMILIES["llama4_text"])
    assert num_parameters(config) / 1e9 == pytest.approx(107.77, rel=1e-4)
    assert [(config.rope_of(layer).kind, config.rope_of(layer).rotary_dim) for layer in (2, 3)] == [
        ("llama3", 128), ("default", 0),
    ]  # fmt: skip
    assert [config.chunk(layer) for layer in (2, 3)] == [8192, 0] and config.max_position == 8191


def test_published_sizes_of_the_other_families() -> None:
    common = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    mixtral = {
        **common, "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "router_aux_loss_coef": 0.02,
        "output_router_logits": False,
    }  # fmt: skip
    qwen = {
        **common, "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "rope_scaling": None, "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False, "attention_bias": False,
    }  # fmt: skip
    coder = {
        **qwen, "max_position_embeddings": 262144, "hidden_size": 6144, "intermediate_size": 8192,
        "num_hidden_layers": 62, "num_attention_heads": 96, "num_key_value_heads": 8, "max_window_layers": 62,
        "moe_intermediate_size": 2560, "num_experts": 160, "rope_theta": 1e7, "router_aux_loss_coef": 0.0,
        "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True,
    }  # fmt: skip
    for raw, billions in ((mixtral, 46.70), (qwen, 30.53), (coder, 480.15)):
        config = ModelConfig.read(raw, FAMILIES[str(raw["model_type"])])
        assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=1e-3)
        assert set(config.windows) == {0} and config.has_experts(0)


DEEPSEEK: dict[str, Any] = {**factory.SIZES, **factory.DEEPSEEK, "model_type": "deepseek_v3"}
MINIMAX: dict[str, Any] = {**factory.SIZES, **CASES["minimax-m2"][1], "model_type": "minimax_m2"}
LLAMA4: dict[str, Any] = {**factory.SIZES, **factory.LLAMA4, "model_type": "llama4_text"}
GPT_OSS: dict[str, Any] = {**factory.SIZES, **factory.GPT_OSS, "model_type": "gpt_oss"}
QWEN: dict[str, Any] = {**factory.SIZES, **factory.QWEN_EXPERTS, "model_type": "qwen3_moe", "head_dim": 16}


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (DEEPSEEK, {"topk_method": "group_limited_greedy"}, "topk_method"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (DEEPSEEK, {"n_group": 3, "topk_group": 1}, "cannot be cut into 3 groups"),
        (DEEPSEEK, {"head_dim": 16}, "head_dim is 16"),
        (DEEPSEEK, {"index_n_heads": 4}, "index_n_heads"),
        (QWEN, {"shared_expert_intermediate_size": 16}, "shared_expert_intermediate_size"),
        (QWEN, {"use_qk_norm": False}, "use_qk_norm is False"),
        (QWEN, {"qkv_bias": True}, "qkv_bias is True"),
        (QWEN, {"expert_bias": True}, "expert_bias"),
        ({**DEEPSEEK, "model_type": "glm4_moe_lite"}, {"mlp_layer_types": ["dense", "moe"]}, "each dense or sparse"),
        ({**DEEPSEEK, "model_type": "deepseek_v32"}, {"layer_types": ["full_attention"] * 2}, "layer_types is"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list is"),
        (MINIMAX, {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
        (LLAMA4, {"no_rope_layers": [1, 1, 1]}, "no_rope_layers must hold"),
        (LLAMA4, {"layer_types": ["sliding_attention"] * 4}, "chunked_attention or full_attention"),
        (GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        (GPT_OSS, {"experts_per_token": 3}, "experts_per_token is 3"),
        (GPT_OSS, {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        (GPT_OSS, {"attention_sink_size": 4}, "attention_sink_size"),
        ({**QWEN, "model_type": "qwen2_moe", "head_dim": None}, {"use_sliding_window": True}, "layer_types"),
    ],
)
def test_what_changes_the_computation_is_refused(base: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    ModelConfig.read(base, FAMILIES[base["model_type"]])
    with pytest.raises(UnsupportedError, match=named):
        ModelConfig.read({**base, **changes}, FAMILIES[base["model_type"]])


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (DEEPSEEK, {"num_experts_per_tok": 5}, "num_experts_per_tok must be a whole number from 1 to 4"),
        (DEEPSEEK, {"topk_group": 5}, "topk_group must be a whole number from 1 to 4"),
        (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank"),
        (QWEN, {"num_experts": 10**6}, "num_experts must be a whole number from 1 to 4096"),
        (QWEN, {"mlp_only_layers": ["first"]}, "mlp_only_layers must be a list of whole numbers"),
    ],
)
def test_malformed_fields_are_named(base: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.read({**base, **changes}, FAMILIES[base["model_type"]])


def test_positions_whose_queries_grow_are_refused(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama4", tmp_path)
    assert load(folder).model.max_position == 59
    with pytest.raises(ConfigError, match=r"from 1 to 59, .*multiplies queries by position"):
        load(folder, max_position=60)


def test_the_text_part_of_a_llama_4(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama4", tmp_path)
    before, config = (
        Runner(load(folder).model, 20).span(TOKENS).logits,
        json.loads((folder / "config.json").read_text()),
    )
    whole = {"model_type": "llama4", "text_config": config, "vision_config": {}, "image_token_index": 9}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    vision = {"vision_model.layernorm_pre.weight": torch.ones(4)}
    save_file({**tensors, **vision}, folder / WEIGHTS, metadata={"format": "pt"})
    assert torch.equal(Runner(load(folder).model, 20).span(TOKENS).logits, before)
