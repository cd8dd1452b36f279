"""Step-3.5 and MiMo-V2 from GGUF files, written under the gguf package's own names as llama.cpp's converters do.

The logits are those of the same model in safetensors, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import ModelError, UnsupportedError
from forerun.models.heads.mtp import num_modules
from forerun.models.loader import load_model, read_config
from forerun.models.overview import look_at
from forerun.weights.gguf_config import llama3_factors
from tests.models import factory
from tests.models.factory import Runner

gguf = pytest.importorskip("gguf")
from tests.weights import gguf_makers as makers  # noqa: E402

TOKENS = [3, 17, 40, 8, 25, 61, 9, 33, 50, 12, 77, 4, 5, 81, 30, 22]
SCALING = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
           "original_max_position_embeddings": 131072}  # fmt: skip
STEP = {**factory.STEP, "rope_scaling": SCALING, "rope_theta": [5e6, 1e4, 1e4, 5e6]}
CASES = {"step35": ("step3p5", STEP), "mimo2": ("mimo_v2_flash", {**factory.MIMO_V2, "attention_value_scale": 0.6})}


def add_step(writer: Any, raw: dict[str, Any], num_modules: int) -> None:
    """Keys of Step-3.5; the blocks of modules, which draft, are like layers with a window."""
    types = raw["layer_types"] + ["sliding_attention"] * num_modules
    own = raw["attention_other_setting"]
    has_window = [kind == "sliding_attention" for kind in types]
    writer.add_rope_freq_base(raw["rope_theta"][0])
    writer.add_rope_freq_base_swa(raw["rope_theta"][1])
    for add, name in (
        (writer.add_head_count, "num_attention_heads"),
        (writer.add_head_count_kv, "num_attention_groups"),
    ):
        add([own[name] if window else raw[name] for window in has_window])
    writer.add_sliding_window_pattern(has_window)
    writer.add_value_length(raw["head_dim"])
    writer.add_expert_count(raw["moe_num_experts"])
    writer.add_expert_used_count(raw["moe_top_k"])
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(raw["share_expert_dim"])
    writer.add_expert_weights_scale(raw["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(1)
    writer.add_moe_every_n_layers(1)
    writer.add_layer_norm_rms_eps(raw.get("rms_norm_eps", 1e-5))
    writer.add_swiglu_clamp_exp([float(bound or 0) for bound in raw["swiglu_limits"]] + [0.0] * num_modules)
    writer.add_swiglu_clamp_shexp([float(bound or 0) for bound in raw["swiglu_limits_shared"]] + [0.0] * num_modules)
    turned = raw["head_dim"] // 2
    factors = [float(factor) for factor in llama3_factors(raw["rope_theta"][0], turned, 2.0, 1.0, 32.0, 131072)]
    assert max(factors) > 1.0
    padded = factors + [1.0] * (raw["head_dim"] // 2 - len(factors))
    writer.add_tensor("rope_freqs.weight", torch.tensor(padded).numpy())


def add_mimo(writer: Any, raw: dict[str, Any], num_modules: int) -> None:
    """Keys of MiMo-V2."""
    has_window = [kind == "sliding_attention" for kind in raw["layer_types"]] + [True] * num_modules
    ropes = raw["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(
        [
            raw.get("swa_num_key_value_heads", 2 * raw["num_key_value_heads"]) if window else raw["num_key_value_heads"]
            for window in has_window
        ]
    )
    writer.add_sliding_window_pattern([int(window) for window in has_window])
    writer.add_value_length(raw["v_head_dim"])
    writer.add_expert_count(raw["n_routed_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(raw["norm_topk_prob"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"] or 1.0)
    writer.add_expert_group_count(raw["n_group"])
    writer.add_expert_group_used_count(raw["topk_group"])
    writer.add_rope_dimension_count(int(raw["head_dim"] * ropes["full_attention"]["partial_rotary_factor"]))
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_float32("mimo2.attention.value_scale", raw["attention_value_scale"])


def converted(tensors: dict[str, Tensor], arch: str) -> dict[str, Tensor]:
    """By the names the converters look up: experts stacked, norms whole."""
    stacks: dict[str, list[Tensor]] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, is_expert, after = name.partition(".mlp.experts.")
        if is_expert:
            stacks.setdefault(f"{before}.mlp.experts.{after.partition('.')[2]}", []).append(tensor)
        elif name.endswith("router_bias"):
            found[f"{name}.bias"] = tensor
        elif name.endswith("attention_sink_bias"):
            found[f"{name}.weight"] = tensor
        else:
            is_less = arch == "step35" and name.endswith("norm.weight")
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = (
                tensor + 1 if is_less else tensor
            )
    return {**found, **{name: torch.stack(parts) for name, parts in stacks.items()}}


def write(
    path: Path, folder: Path, arch: str, num_modules: int = 0, change: Callable[[Any], object] = bool
) -> Path:  # fmt: skip
    """The model in `folder` as a file; `change` sees the writer before it writes."""
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    model = next(known for known, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    num_layers = raw["num_hidden_layers"] + num_modules
    names, writer = gguf.get_tensor_name_map(model, num_layers), gguf.GGUFWriter(path, arch)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_key_length(raw["head_dim"])
    writer.add_sliding_window(raw.get("sliding_window_size", raw["sliding_window"]))
    (add_step if arch == "step35" else add_mimo)(writer, raw, num_modules)
    if num_modules:
        writer.add_nextn_predict_layers(num_modules)
    makers.add_tokenizer(writer, folder)
    for name, tensor in converted(load_file(folder / "model.safetensors"), arch).items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        data, kind = makers.stored(own, tensor.float(), "F32")
        writer.add_tensor(own, data, raw_dtype=kind)
    for module in range(raw["num_hidden_layers"], num_layers):
        data, kind = makers.stored("", torch.ones(raw["hidden_size"], 2 * raw["hidden_size"]), "F32")
        writer.add_tensor(f"blk.{module}.nextn.eh_proj.weight", data, raw_dtype=kind)
    change(writer)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def rename(writer: Any, arch: str) -> None:
    writer.kv_data[0]["general.architecture"].value = arch


def logits(path: Path) -> Tensor:
    return Runner(load_model(path, factory.make_kernels()).model, 40).span(TOKENS).logits


@pytest.fixture(scope="module", params=list(CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, factory.save_checkpoint(factory.random_hf_model(*CASES[request.param]), folder)


def test_a_file_gives_the_logits_of_safetensors(made: tuple[str, Path], tmp_path: Path) -> None:
    arch, folder = made
    path = write(tmp_path / "model.gguf", folder, arch)
    assert torch.equal(logits(path), logits(folder))
    found, loaded = look_at(path), load_model(path, factory.make_kernels()).model
    assert found.kv_specs == loaded.kv_specs and found.num_parameters == loaded.num_parameters


def test_modules_are_left_alone(made: tuple[str, Path], tmp_path: Path) -> None:
    """Their blocks are named as DeepSeek's modules, which compute otherwise."""
    arch, folder = made
    path = write(tmp_path / "model.gguf", folder, arch, num_modules=1)
    assert torch.equal(logits(path), logits(folder)) and num_modules(path) == 0
    config, raw = read_config(path), json.loads((folder / "config.json").read_text("utf-8"))
    assert config is not None and config.num_layers == raw["num_hidden_layers"]


def test_layers_of_one_type_are_alike(made: tuple[str, Path], tmp_path: Path) -> None:
    arch, folder = made

    def differing(writer: Any) -> None:
        counts = writer.kv_data[0][f"{arch}.attention.head_count_kv"].value
        counts[-1] += 1

    path = write(tmp_path / "model.gguf", folder, arch, change=differing)
    with pytest.raises(ModelError, match="head_count_kv must be the same in all layers with a window"):
        read_config(path)


def test_values_are_scaled_as_in_the_model_whose_files_do_not_say_it(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("mimo-v2", tmp_path / "folder")
    path = write(
        tmp_path / "model.gguf", folder, "mimo2",
        change=lambda writer: writer.kv_data[0].pop("mimo2.attention.value_scale"),
    )  # fmt: skip
    config = read_config(path)
    assert config is not None and config.scales.of_attention == 0.707


@pytest.mark.parametrize("arch", ["gemma4-assistant", "longcat-flash"])
def test_other_architectures_are_refused_by_name(arch: str, tmp_path: Path) -> None:
    folder = factory.make_checkpoint("mimo-v2", tmp_path / "folder")
    path = write(tmp_path / "model.gguf", folder, "mimo2", change=partial(rename, arch=arch))
    with pytest.raises(UnsupportedError, match=arch):
        read_config(path)
