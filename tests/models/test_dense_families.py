"""Dense families beyond Llama: recording, drafting, text parts of multimodal models, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.cli.engine import what_part
from forerun.errors import CheckpointError, ConfigError, UnsupportedError
from forerun.models.base import passes_of
from forerun.models.config import ModelConfig, num_parameters
from forerun.models.decoder import Decoder
from forerun.models.families import FAMILIES
from forerun.models.loader import load_model, read_config
from forerun.models.subset import lent_layers, subset_decoder
from forerun.quantize.run import open_source
from forerun.quantize.settings import QuantizeSettings
from forerun.runtime.bind import bind
from tests.models import factory
from tests.models.factory import Runner

CASES = (
    "gemma2", "gemma3", "gemma3-capped", "ministral3", "olmo2", "olmo3", "exaone4", "granite", "smollm3-window", "glm4",
    "cohere2", "gemma4", "gemma4-experts", "gemma4-wide",
)  # fmt: skip
TOKENS = [5, 9, 40, 33, 7, 81, 3, 9, 40, 12, 13]


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_forward_has_the_bits_of_the_models_own(case: str, tmp_path: Path) -> None:
    pytest.importorskip("forerun.kernels.cpu._native")
    kernels = factory.make_kernels("cpu")
    folder = factory.make_checkpoint(case, tmp_path, torch.bfloat16)
    config, model = read_config(folder), load_model(folder, kernels).model
    assert config is not None and num_parameters(config) == model.num_parameters
    own, replayed = Runner(model, 40), Runner(model, 40)
    replayed.runner = bind(passes_of(model, (0, 2)), kernels, replayed.kvs, 4)
    assert replayed.runner.replays
    plain, found = (runner.span(TOKENS, hidden=(0, 2)) for runner in (own, replayed))
    assert torch.equal(plain.logits, found.logits) and torch.equal(plain.hidden[2], found.hidden[2])
    trees = [runner.tree([4, 8, 8, 9], [-1, 0, 0, 1], len(TOKENS)) for runner in (own, replayed)]
    assert torch.equal(*trees)


def generated(llm: LLM, temperature: float) -> list[Any]:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    prompts = [list(range(5, 15)) * 2, [7, 8, 9], list(range(40, 60))]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gemma4", "gemma4-experts", "cohere2"])
def test_drafting_changes_no_token(case: str, tmp_path: Path) -> None:
    folder = str(factory.make_checkpoint(case, tmp_path))
    plain = LLM(folder, drafter="none")
    for drafter in ("ngram", "recycling", "layer_skip"):
        drafted = LLM(folder, drafter=drafter, adaptive=False)
        for temperature in (0.0, 1.0):
            assert generated(drafted, temperature) == generated(plain, temperature), (drafter, temperature)


def as_part(folder: Path, model_type: str, prefix: str) -> None:
    """Turn a saved text model into the text part of a multimodal one."""
    raw, path = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    whole = {"model_type": model_type, "text_config": raw, "vision_config": {"hidden_size": 8}, "dtype": raw["dtype"]}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, "vision_tower.patch.weight": torch.ones(8, 8)}, path)


@pytest.mark.parametrize(
    ("case", "model_type", "prefix"),
    [
        ("gemma3", "gemma3", "language_model.model."),
        ("gemma4", "gemma4", "model.language_model."),
        ("mistral", "mistral3", "model.language_model."),
        ("qwen3.5", "qwen3_5", "model.language_model."),
    ],
)
def test_a_multimodal_model_runs_its_text_part_and_says_so(
    case: str, model_type: str, prefix: str, tmp_path: Path
) -> None:
    folder = factory.make_checkpoint(case, tmp_path)
    alone = load_model(folder, factory.make_kernels())
    assert what_part(alone) is None
    as_part(folder, model_type, prefix)
    part = load_model(folder, factory.make_kernels())
    assert part.implementation == "forerun" and f"text part of a {model_type} model" in str(what_part(part))
    found: list[Tensor] = [Runner(loaded.model, 12).span(TOKENS).logits for loaded in (alone, part)]
    assert torch.equal(*found)


@pytest.mark.parametrize("is_copy", [False, True])
def test_an_output_layer_that_is_no_copy_is_not_tied(is_copy: bool, tmp_path: Path) -> None:
    folder = factory.make_checkpoint("mistral", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if is_copy:
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    alone = load_model(folder, factory.make_kernels())
    as_part(folder, "mistral3", "model.language_model.")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    part = load_model(folder, factory.make_kernels())
    assert part.config is not None and part.config.tie_embeddings == is_copy
    assert torch.equal(*[Runner(loaded.model, 12).span(TOKENS).logits for loaded in (alone, part)])


def read(model_type: str, **changes: Any) -> ModelConfig:
    return ModelConfig.read({**factory.SIZES, "rms_norm_eps": 1e-5, **changes}, FAMILIES[model_type])


def published(layers: int, hidden: int, ffn: int, heads: int, num_kv: int, vocab: int, **others: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": num_kv, **others}


LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
PHI4_MINI = {
    "rope_scaling": LONG, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
    "tie_word_embeddings": True, "sliding_window": 262144,
}  # fmt: skip
COHERE2 = {
    "head_dim": 128, "layer_switch": 4, "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False, "use_qk_norm": False,
}  # fmt: skip


EXAONE4_32B = {
    "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "reorder_qk_norm": True,
    "rope_theta": 1000000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
MINISTRAL3 = {
    "head_dim": 128, "sliding_window": None, "max_position_embeddings": 262144,
    "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                        "rope_type": "yarn", "type": "yarn"},
}  # fmt: skip
GEMMA4_31B = {
    "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "num_global_key_value_heads": 4,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA4_26B = {
    **GEMMA4_31B, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "billions"),
    [
        ("gemma2", published(26, 2304, 9216, 8, 4, 256000, sliding_window_size=4096, hidden_act="gelu"), 2.614),
        ("gemma3_text", published(34, 2560, 10240, 8, 4, 262208, sliding_window=1024), 3.880),
        ("gemma4_text", published(60, 5376, 21504, 32, 16, 262144, **GEMMA4_31B), 30.7),
        ("gemma4_text", published(30, 2816, 2112, 16, 8, 262144, **GEMMA4_26B), 25.2),
        ("olmo2", published(32, 4096, 11008, 32, 32, 100352), 7.299),
        ("granite", published(40, 2048, 8192, 32, 8, 49159, tie_word_embeddings=True), 2.534),
        ("smollm3", published(36, 2048, 11008, 16, 4, 128256, max_window_layers=28), 3.075),
        ("glm4", published(40, 4096, 13696, 32, 2, 151552), 9.400),
        ("cohere2", published(32, 4096, 14336, 32, 8, 256000, **COHERE2), 8.028),
        ("exaone4", published(30, 2048, 4096, 32, 8, 102400, sliding_window=None, tie_word_embeddings=True), 1.279),
        ("exaone4", published(64, 5120, 27392, 40, 8, 102400, **EXAONE4_32B), 32.00),
        ("ministral3", published(34, 4096, 14336, 32, 8, 131072, **MINISTRAL3), 8.490),
        ("phi3", published(32, 3072, 8192, 24, 8, 200064, **PHI4_MINI), 3.836),
    ],
)
def test_published_configs_have_the_published_sizes(
    model_type: str, changes: dict[str, Any], billions: float
) -> None:  # fmt: skip
    assert num_parameters(read(model_type, **changes)) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_letters_say_which_layers_of_an_exaone_have_windows() -> None:
    config = read("exaone4", **published(6, 32, 48, 4, 2, 96, sliding_window=7, sliding_window_pattern="LLLG"))
    assert config.windows == (7, 7, 7, 0, 7, 0)
    with pytest.raises(UnsupportedError, match="reorder_qk_norm"):
        read("exaone4", reorder_qk_norm=False)
    with pytest.raises(CheckpointError, match="sliding_window_pattern"):
        read("exaone4", sliding_window_pattern="LX")


def test_windows_and_ropes_of_layers() -> None:
    assert read("gemma2", num_hidden_layers=3).windows == (4096, 0, 4096)
    old = {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma = read("gemma3_text", num_hidden_layers=6, sliding_window=9, **old)
    assert gemma.windows == (9,) * 5 + (0,) and gemma.max_position == 64
    assert [rope.theta for rope in gemma.layer_ropes] == [5e3] * 5 + [2e6]
    assert (gemma.layer_ropes[0].kind, gemma.rope.kind) == ("default", "linear")
    new = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_type": "default"}}
    gemma = read("gemma3_text", num_hidden_layers=6, rope_parameters=new)
    assert [rope.theta for rope in gemma.layer_ropes] == [1e4] * 5 + [2e6]
    ministral = read("ministral3")
    assert (ministral.rope.kind, ministral.rope.theta, ministral.rope.factor) == ("yarn", 1e6, 16.0)
    assert [rope.rotary_dim for rope in read("cohere2", num_hidden_layers=4).layer_ropes] == [8, 8, 8, 0]
    assert [rope.rotary_dim for rope in read("smollm3", num_hidden_layers=5).layer_ropes] == [8, 8, 8, 0, 8]
    assert read("exaone4", num_hidden_layers=4, sliding_window=None).layer_ropes[3].rotary_dim == 8


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("granite", {"mamba_multiplier": 2.0}, "mamba_multiplier"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod is 2"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must hold an object for each"),
        ("olmo2", {"sliding_window": 5}, "sliding_window"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4_text", {"per_layer_config": {"1": {"intermediate_size": 9}}}, "per_layer_config"),
        ("gemma4_text", {"per_layer_config": {"full": {"head_dim": 16}}}, "per_layer_config"),
        ("gemma4_text", {"num_kv_shared_layers": 1, "num_hidden_layers": 6}, "num_kv_shared_layers leaves no layer"),
        ("gemma4_text", {"attention_sink_size": 4}, "attention_sink_size"),
        ("mistral", {"rope_scaling": {**factory.YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    ],
)
def test_what_would_change_the_computation_is_refused(model_type: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        read(model_type, **changes)


def test_shapes_of_gemma_4s_layers() -> None:
    types = ["sliding_attention", "full_attention"] * 3
    fields = {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": types, "use_double_wide_mlp": True}
    config = read("gemma4_text", head_dim=16, global_head_dim=32, sliding_window=5, **fields)
    assert [shape.kv_layer for shape in config.shapes] == [None, None, None, 1, 2, 1]
    assert [shape.heads.head_dim for shape in config.shapes] == [16, 32] * 3
    assert [shape.ffn_size for shape in config.shapes] == [48] * 3 + [96] * 3
    assert [(rope.kind, rope.rotary_dim, rope.num_turned) for rope in config.layer_ropes[:2]] == [
        ("default", 16, 0),
        ("proportional", 32, 4),
    ]
    own = read("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=1, num_hidden_layers=6)
    assert [shape.heads.num_kv for shape in own.shapes] == [2] * 5 + [1]
    assert [shape.keys_are_values for shape in own.shapes] == [False] * 5 + [True]


def test_gemma_4s_layers_may_be_numbered_with_zeros_before() -> None:
    """As transformers writes them."""
    own = {"05": {"head_dim": 32}, "11": {"head_dim": 32, "num_key_value_heads": 1}}
    shapes = read("gemma4_text", head_dim=16, num_hidden_layers=12, per_layer_config=own).shapes
    assert [shape.heads.head_dim for shape in shapes] == ([16] * 5 + [32]) * 2
    assert [shape.heads.num_kv for shape in shapes] == [2] * 11 + [1]


def test_keys_of_layers_that_read_anothers_are_not_missed_nor_used(tmp_path: Path) -> None:
    """Published files hold them."""
    folder = factory.make_checkpoint("gemma4", tmp_path)
    alone = load_model(folder, factory.make_kernels()).model
    assert len(alone.kv_specs) == 3
    path = folder / "model.safetensors"
    tensors = load_file(path)
    of_owner = {name: tensor for name, tensor in tensors.items() if ".layers.1.self_attn.k" in name}
    save_file({**tensors, **{name.replace(".1.", ".5."): tensor.clone() for name, tensor in of_owner.items()}}, path)
    full = load_model(folder, factory.make_kernels()).model
    assert torch.equal(*[Runner(model, 12).span(TOKENS).logits for model in (alone, full)])


def test_layers_draft_with_those_whose_keys_they_read(tmp_path: Path) -> None:
    model = load_model(factory.make_checkpoint("gemma4", tmp_path), factory.make_kernels()).model
    assert isinstance(model, Decoder) and lent_layers(model) == {1, 2}
    assert len(subset_decoder(model, (1, 2, 3, 5)).kv_specs) == 2
    with pytest.raises(ConfigError, match="keep 1, 2, too"):
        subset_decoder(model, (0, 1, 4))


def test_gemma_4_is_not_quantized(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="norms of values"):
        open_source(factory.make_checkpoint("gemma4", tmp_path), QuantizeSettings())


def test_ministral_stays_within_its_original_context(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("ministral3", tmp_path)
    assert load_model(folder, factory.make_kernels()).model.max_position == 32
    with pytest.raises(ConfigError, match=r"from 1 to 32, .* \(past its original context"):
        load_model(folder, factory.make_kernels(), max_position=33)


def test_dual_chunk_attention_ends_with_its_first_chunk(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("qwen2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"from 1 to 64, .*got 65$"):
        load_model(folder, factory.make_kernels(), max_position=65)
    config["dual_chunk_attention_config"] = {"chunk_size": 40, "local_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder, factory.make_kernels()).model.max_position == 32
    with pytest.raises(ConfigError, match=r"from 1 to 32, .* \(past its first chunk"):
        load_model(folder, factory.make_kernels(), max_position=33)


@pytest.mark.parametrize("case", ["gemma2", "olmo2"])
def test_norms_that_cannot_absorb_scales_are_not_quantized(case: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="behind a norm whose weights are stored as they are"):
        open_source(factory.make_checkpoint(case, tmp_path), QuantizeSettings())
