"""Mixtures of experts and latent attention from GGUF files under the gguf package's own names.

The logits are those of the same model in safetensors, bit for bit, and transformers' own within rounding.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.errors import CheckpointError, ConfigError, ForerunError, ModelError, UnsupportedError
from forerun.models.loader import load_model, read_config
from forerun.models.storage import describe_storage
from tests.models import factory
from tests.models.factory import DEEPSEEK, DEEPSEEK_YARN, QWEN_EXPERTS, Runner

gguf = pytest.importorskip("gguf")
from tests.weights import gguf_makers as makers  # noqa: E402

TOKENS = [3, 17, 40, 8, 25, 61, 9, 33, 50, 12, 77, 4, 5, 81, 30, 22, 19, 64, 7, 11]
YARN = {**DEEPSEEK_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
SHARED = {**QWEN_EXPERTS, "shared_expert_intermediate_size": 24}
# name -> (architecture, model_type, fields)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("llama", "mixtral", {"num_local_experts": 5, "sliding_window": None}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", SHARED),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {**QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "gpt-oss": ("gpt-oss", "gpt_oss", factory.GPT_OSS),
    "minimax-m2": ("minimax-m2", "minimax_m2", factory.CASES["minimax-m2"][1]),
    "glm4moe": ("glm4moe", "glm4_moe", {**factory.GLM, "use_qk_norm": True, "head_dim": 16, "attention_bias": True}),
    "deepseek2": ("deepseek2", "deepseek_v3", {**DEEPSEEK, "rope_parameters": YARN, "n_shared_experts": 2}),
    "deepseek2-direct": (
        "deepseek2", "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
         "routed_scaling_factor": 1.25},
    ),
    "llama4": ("llama4", "llama4_text", {
        "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2}),
    "deepseek32": (
        "deepseek32", "deepseek_v32",
        {**DEEPSEEK, "rope_parameters": YARN, "n_shared_experts": 2, **factory.INDEXER},
    ),
    "glm-4.7-flash": (
        "deepseek2", "glm4_moe_lite", {**factory.LITE, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    ),
}  # fmt: skip


def make(tmp_path: Path, case: str, sizes: dict[str, Any] | None = None, **options: Any) -> tuple[Path, Path]:
    """A folder, and the same model as a GGUF file."""
    arch, model_type, fields = CASES[case]
    model = factory.random_hf_model(model_type, {**fields, **(sizes or {})})
    folder = factory.save_checkpoint(model, tmp_path / "folder")
    return folder, makers.write_mixture(tmp_path / "model.gguf", folder, model.config, arch, **options)


def logits(path: Path) -> Tensor:
    return Runner(load_model(path, factory.make_kernels()).model, 40).span(TOKENS).logits


@pytest.mark.parametrize(
    ("case", "is_split"), [*((case, True) for case in CASES), ("deepseek2", False), ("deepseek2-direct", False)]
)
def test_float32_gives_the_bits_of_safetensors(case: str, is_split: bool, tmp_path: Path) -> None:
    folder, path = make(tmp_path, case, is_split=is_split)
    found = logits(path)
    assert torch.equal(found, logits(folder))
    truth = factory.hf_logits(folder, TOKENS, torch.float64)
    assert factory.rms_error(found, truth) < 1e-4 * float(truth.std())
    ours, theirs = read_config(path), read_config(folder)
    assert ours is not None and theirs is not None and ours.experts is not None and theirs.experts is not None
    assert (ours.rope, ours.experts.routing, ours.latents) == (theirs.rope, theirs.experts.routing, theirs.latents)


@pytest.mark.parametrize("case", ["qwen2moe", "deepseek2"])
def test_half_precision_gives_the_logits_of_safetensors(case: str, tmp_path: Path) -> None:
    """Routers stay in float32 in GGUF files; in safetensors they are rounded like all else."""
    arch, model_type, fields = CASES[case]
    model = factory.random_hf_model(model_type, fields)
    folder = factory.save_checkpoint(model, tmp_path / "folder", torch.bfloat16)
    path = makers.write_mixture(tmp_path / "model.gguf", folder, model.config, arch, kind="BF16")
    found, expected = logits(path), logits(folder)
    assert factory.rms_error(found, expected.double()) < 0.01 * float(expected.std())


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Early files: a tensor for each expert."""
    found = {}
    for name, tensor in tensors.items():
        if "_exps" in name:
            found |= {name.replace("_exps", f".{index}"): part for index, part in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def gate_beside_up(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Files with gate and up of an expert in one."""
    found = dict(tensors)
    for name in tensors:
        if "ffn_gate_exps" in name:
            parts = [found.pop(name), found.pop(name.replace("gate", "up"))]
            found[name.replace("gate", "gate_up")] = torch.cat(parts, dim=1)
    return found


@pytest.mark.parametrize("change", [one_by_one, gate_beside_up])
@pytest.mark.parametrize("case", ["mixtral", "deepseek2"])
def test_other_ways_to_store_experts(case: str, change: Any, tmp_path: Path) -> None:
    folder, path = make(tmp_path, case, change=change)
    assert torch.equal(logits(path), logits(folder))


WIDE = {"hidden_size": 64, "intermediate_size": 64}  # rows of whole blocks of 32
QWEN_WIDE = {**WIDE, "moe_intermediate_size": 32}
LATENT_WIDE = {**QWEN_WIDE, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
WIDER = {
    "mixtral": WIDE, "qwen2moe": {**QWEN_WIDE, "shared_expert_intermediate_size": 32}, "qwen3moe": QWEN_WIDE,
    "deepseek2": LATENT_WIDE,
}  # fmt: skip


@pytest.mark.parametrize("case", WIDER)
def test_quantized_experts_are_worth_what_the_reference_says(case: str, tmp_path: Path) -> None:
    _, path = make(tmp_path, case, WIDER[case], kind="Q8_0")
    reader = gguf.GGUFReader(path)
    worth = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    model: Any = load_model(path, factory.make_kernels()).model
    for index, expert in enumerate(model.parts.layers[1].mlp.experts):
        gate, up, down = (worth[f"blk.1.ffn_{part}_exps.weight"][index] for part in ("gate", "up", "down"))
        assert torch.allclose(expert.gate_up.weight.dequantize(), torch.cat([gate, up]), rtol=1e-6, atol=1e-7)
        assert torch.allclose(expert.down.weight.dequantize(), down, rtol=1e-6, atol=1e-7)
    runner, whole = Runner(model, 40), logits(path)
    assert torch.equal(runner.span(TOKENS[:5]).logits, whole[:5])
    assert torch.equal(runner.tree([TOKENS[5], 7, TOKENS[6]], [-1, 0, 0], 5)[[0, 2]], whole[5:7])


def test_quantized_halves_of_heads(tmp_path: Path) -> None:
    """k_b and v_b in Q8_0 are what the same matrices give as floats; all else stays in float32."""
    kinds = {"attn_k_b": "Q8_0", "attn_v_b": "Q8_0", "": "F32"}
    folder, path = make(tmp_path, "deepseek2", LATENT_WIDE, kind=kinds)
    found, exact = logits(path), logits(folder)
    reader = gguf.GGUFReader(path)
    worth = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    rounded = {name: worth[name] for name in worth if "_b.weight" in name and ("attn_k" in name or "attn_v" in name)}
    assert len(rounded) == 4
    floats = tmp_path / "floats"
    floats.mkdir()
    _, same = make(floats, "deepseek2", LATENT_WIDE, change=lambda tensors: {**tensors, **rounded})
    assert torch.equal(found, logits(same)) and not torch.equal(found, exact)


def test_blocks_for_drafting_are_left_out(tmp_path: Path) -> None:
    """Today's converter keeps the one of GLM-4.7-Flash."""

    def with_module(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        last = {name.replace("blk.1.", "blk.2."): each for name, each in tensors.items() if name.startswith("blk.1.")}
        return {**tensors, **last, "blk.2.nextn.eh_proj.weight": torch.ones(32, 64)}

    keys = {"block_count": 3, "nextn_predict_layers": 1}
    folder, path = make(tmp_path, "glm-4.7-flash", change=with_module, **keys)
    assert torch.equal(logits(path), logits(folder))


def test_keys_early_qwen2moe_files_lack(tmp_path: Path) -> None:
    keys = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    folder, path = make(tmp_path, "qwen2moe", **keys)
    assert torch.equal(logits(path), logits(folder))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "softmax": ("deepseek2", {"expert_gating_func": 1}, "like DeepSeek-V2, whose experts are chosen by softmax"),
    "no gating": ("deepseek2", {"expert_gating_func": None}, "expert_gating_func 2, sigmoid"),
    "no groups": ("deepseek2", {"expert_group_count": None}, "how many groups its 8 experts are"),
    "no multiplier": ("deepseek2", {"yarn_log_multiplier": None}, "without deepseek2.rope.scaling.yarn_log_multiplier"),
    "more experts": ("mixtral", {"expert_count": 6}, r"shape \[5, 48, 32\], but llama.expert_count is 6"),
    "too many used": ("qwen3moe", {"expert_used_count": 7}, "num_experts_per_tok must be a whole number from 1 to 6"),
    "no experts": ("qwen3moe", {"expert_count": 0}, "qwen3moe.expert_count is 0"),
    "no rank": ("deepseek2", {"kv_lora_rank": None}, "lacks the key deepseek2.attention.kv_lora_rank"),
    "keys too short": ("deepseek2", {"key_length_mla": 3}, "qk_nope_head_dim must be a whole number from 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_wrongly_is_refused(case: str, tmp_path: Path) -> None:
    name, keys, says = REFUSED[case]
    _, path = make(tmp_path, name, **keys)
    with pytest.raises(ModelError, match=says):
        logits(path)


@pytest.mark.parametrize("case", ["mixtral", "deepseek2"])
def test_changed_headers_never_crash(case: str, tmp_path: Path) -> None:
    _, path = make(tmp_path, case)
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    header = whole.index(b"tokenizer.ggml.model")
    for _ in range(150):
        raw, place = bytearray(whole), draw.randrange(header)
        raw[place : place + 2] = draw.randbytes(2)
        path.write_bytes(raw)
        try:
            load_model(path, factory.make_kernels())
        except ForerunError as error:
            refused += 1
            assert "model.gguf" in str(error) and "\n" not in str(error) and len(str(error)) < 700
    assert refused > 100


def test_stacked_experts_are_told_as_experts(tmp_path: Path) -> None:
    folder, path = make(tmp_path, "mixtral")
    of_file, of_folder = (describe_storage(where)["bytes"] for where in (path, folder))
    assert of_file["experts"] == of_folder["experts"]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    drop = "blk.1.ffn_up_exps.weight"
    _, path = make(tmp_path, "mixtral", change=lambda t: {name: x for name, x in t.items() if name != drop})
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.0\.weight|block_sparse_moe\.experts\.0\.w3"):
        logits(path)


def test_groups_of_models_from_before_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.weights.gguf_mixtures._GROUPS", {(2, 8): (4, 2)})
    keys = {"expert_group_count": None, "expert_group_used_count": None}
    folder, path = make(tmp_path, "deepseek2", **keys)
    assert torch.equal(logits(path), logits(folder))


# -- windows that files do not record --------------------------------------------------------------------------------


def dense(tmp_path: Path, model_type: str, arch: str, **fields: Any) -> Path:
    model = factory.random_hf_model(model_type, fields)
    folder = factory.save_checkpoint(model, tmp_path / "folder")
    makers.write_model(tmp_path / "model.gguf", folder, model, arch)
    return tmp_path / "model.gguf"


def test_mistral_files_end_where_their_window_would_matter(tmp_path: Path) -> None:
    """Mistral 7B v0.1 and what is made from it: llama.cpp's converter leaves the window of 4096 out."""
    path = dense(tmp_path, "llama", "llama", max_position_embeddings=32768)
    config = read_config(path)
    assert config is not None and config.max_position == 4096
    with pytest.raises(ConfigError, match=r"from 1 to 4096, .* got 4097 \(.*Mistral 7B v0.1"):
        load_model(path, factory.make_kernels(), max_position=4097)
    other = read_config(dense(tmp_path, "llama", "llama", max_position_embeddings=32768,
                              rope_parameters={"rope_type": "default", "rope_theta": 1e6}))  # fmt: skip
    assert other is not None and other.max_position == 32768


def test_windows_that_are_recorded_are_kept(tmp_path: Path) -> None:
    config = read_config(dense(tmp_path, "mistral", "llama", max_position_embeddings=32768, sliding_window=7))
    assert config is not None and set(config.windows) == {7} and config.max_position == 32768


@pytest.mark.parametrize(("context", "window"), [(4096, 2047), (131072, 0), (8192, None)])
def test_phi3_files_from_before_the_key(context: int, window: int | None, tmp_path: Path) -> None:
    path = dense(tmp_path, "phi3", "phi3", max_position_embeddings=context, sliding_window=None)
    path.write_bytes(path.read_bytes().replace(b"phi3.attention.sliding_window", b"none.attention.sliding_window"))
    if window is None:
        with pytest.raises(UnsupportedError, match="lacks the key phi3.attention.sliding_window"):
            read_config(path)
    else:
        config = read_config(path)
        assert config is not None and set(config.windows) == {window}
