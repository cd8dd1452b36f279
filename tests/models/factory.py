"""Small random checkpoints of every family, made by transformers, and a greedy loop over a bare model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.cache.states import RecurrentStates
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import KeepsSlots, Model, PassOutput, state_specs_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime import runner as runtime
from tests.models.step import StepForCausalLM

REPO = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 96

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
WINDOWS = {"num_hidden_layers": 3, "sliding_window": 7, "layer_types": TYPES}
WIDE = {"head_dim": 16, "sliding_window": 5}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LITE = {name: value for name, value in DEEPSEEK.items() if name != "first_k_dense_replace"}
INDEXER = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 40,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 7,
    "floor_scale": 60,
}
LLAMA4_PLAIN = {
    "num_hidden_layers": 2,
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "num_experts_per_tok": 2,
    "moe_layers": [0],
    "attention_bias": True,
    "no_rope_layers": [1, 0],
    "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},  # as Llama 4 Scout has it
}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "head_dim": 16,
    "rope_parameters": {**YARN, "truncate": False},
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 7,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 3.0,
}
GEMMA4_EXPERTS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
NEXT = {
    **DELTA,
    **QWEN_EXPERTS,
    "shared_expert_intermediate_size": 24,
    "mlp_only_layers": [1],
    "tie_word_embeddings": True,
}
ERNIE = {
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 20,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": -1,
    "moe_gate": "topk",
    "moe_capacity": [6, 6, 6],
    "moe_use_aux_free": True,
    "use_rmsnorm": True,
}
LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
LFM2_MOE = {**LFM2, **QWEN_EXPERTS, "num_dense_layers": 1}
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_head": 16}
GRANITE_HYBRID = {
    **GRANITE,
    **MAMBA,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "position_embedding_type": "nope",
}
FALCON_H1 = {
    **MAMBA,
    "mamba_d_ssm": 64,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
    "mlp_multipliers": [0.8, 0.6],
}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "linear_attention", "mlp"],
    "num_hidden_layers": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
    "head_dim": 16,
}
STEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 7,
    "head_dim": 16,
    "num_attention_groups": 2,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6,
                                "num_attention_groups": 2, "head_dim": 16},
    "rope_theta": [500.0, 10000.0, 10000.0, 500.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"},
    "yarn_only_types": ["full_attention"],
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 20,
    "share_expert_dim": 24,
    "moe_router_scaling_factor": 1.5,
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
    "use_head_wise_attn_gate": True,
    "norm_expert_weight": True,
    "swiglu_limits": [0.0, 0.0, 7.0, 7.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0],
}  # fmt: skip
MIMO_V2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "attention_value_scale": 0.707,
}
LONGCAT: dict[str, Any] = {
    "num_layers": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "head_dim": 8,
    "n_routed_experts": 6,
    "zero_expert_num": 3,
    "moe_topk": 3,
    "expert_ffn_hidden_size": 20,
    "routed_scaling_factor": 1.5,
}
SPARSE = {
    **NEMOTRON_H,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
KIMI: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
# name -> (model_type, fields beyond SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma2": ("gemma2", {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}),
    "gemma2-plain": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 5}),
    "gemma3": ("gemma3_text", {**WINDOWS, "head_dim": 16, "rope_parameters": GEMMA3_ROPES}),
    "gemma3-capped": ("gemma3_text", {"sliding_window": 5, "final_logit_softcapping": 3.0, "attention_bias": True}),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4-wide": (
        "gemma4_text",
        {**GEMMA4, "global_head_dim": 512, "num_kv_shared_layers": 0, "attention_bias": True},
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1},
        },
    ),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {**WINDOWS, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
    "exaone4": ("exaone4", {**WINDOWS, "head_dim": 16}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "granite": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "smollm3-window": ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere2": ("cohere2", {**WINDOWS, "logit_scale": 0.3}),
    "cohere2-biased": ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 7, "head_dim": 16}),
    "qwen2-moe": ("qwen2_moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3-moe": ("qwen3_moe", {**QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 16, "decoder_sparse_step": 2}),
    "qwen3-moe-plain": ("qwen3_moe", {**QWEN_EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "attention_bias": True}),
    "deepseek": ("deepseek_v3", {**DEEPSEEK, "rope_parameters": DEEPSEEK_YARN, "n_shared_experts": 2}),
    "deepseek-direct": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-plain": ("gpt_oss", {**GPT_OSS, "attention_bias": False, "layer_types": ["full_attention"] * 2}),
    "glm4-moe": ("glm4_moe", {**GLM, "use_qk_norm": True, "head_dim": 16, "n_group": 4, "topk_group": 2}),
    "glm4-moe-biased": ("glm4_moe", {**GLM, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2}),
    "glm4-moe-lite": ("glm4_moe_lite", {**LITE, "n_shared_experts": 2}),
    "glm4-moe-lite-typed": ("glm4_moe_lite", {**LITE, "mlp_layer_types": ["sparse", "dense"], "q_lora_rank": None}),
    "deepseek-v32": ("deepseek_v32", {**DEEPSEEK, "rope_parameters": DEEPSEEK_YARN, **INDEXER}),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    "llama4": ("llama4_text", LLAMA4),
    "llama4-plain": ("llama4_text", {**LLAMA4, **LLAMA4_PLAIN}),
    "qwen3-next": ("qwen3_next", NEXT),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, **QWEN_EXPERTS, "shared_expert_intermediate_size": 24}),
    "ernie4.5": ("ernie4_5", {"head_dim": 16}),
    "ernie4.5-moe": ("ernie4_5_moe", ERNIE),
    "ernie4.5-moe-plain": ("ernie4_5_moe", {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_end_index": 0}),
    "lfm2": ("lfm2", {**LFM2, "block_multiple_of": 8}),
    "lfm2-moe": ("lfm2_moe", {**LFM2_MOE, "routed_scaling_factor": 1.5}),
    "granite-hybrid": ("granitemoehybrid", GRANITE_HYBRID),
    "granite-attending": ("granitemoehybrid", {**GRANITE_HYBRID, "layer_types": ["full_attention"] * 4}),
    "granite-hybrid-moe": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    "falcon-h1": ("falcon_h1", FALCON_H1),
    "falcon-h1-norm": ("falcon_h1", {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "step3.5": ("step3p5", STEP),
    "mimo-v2": ("mimo_v2_flash", MIMO_V2),
    "longcat": ("longcat_flash", LONGCAT),
    "nemotron-h-moe": ("nemotron_h", SPARSE),
    "nemotron-h-latent": ("nemotron_h", {**SPARSE, "moe_latent_size": 12, "n_group": 3, "topk_group": 2}),
    "kimi-linear": ("kimi_linear", KIMI),
    "kimi-linear-groups": (
        "kimi_linear",
        {**KIMI, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-window": ("phi3", {"sliding_window": 9}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
}


def random_hf_model(model_type: str, fields: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """A transformers model of SIZES (changed by `fields`) with random weights, biases and norms, in float32."""
    from transformers import AutoConfig

    fields = {**SIZES, **(fields or {})}
    if model_type == "step3p5":
        torch.manual_seed(seed)
        return with_random_weights(StepForCausalLM({"model_type": model_type, **fields}).eval())
    return random_model_of(AutoConfig.for_model(model_type, **fields), seed)


def random_model_of(config: Any, seed: int = 0) -> Any:
    """The same by transformers' configuration."""
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return with_random_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


def with_random_weights(model: Any) -> Any:
    """The model, its weights, biases and norms drawn anew."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if parameter.dim() == 1 else 0.15
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.1)
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.1)
    return model


def save_checkpoint(model: Any, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Save a transformers model in `dtype` with a tokenizer beside it; the model itself is rounded to `dtype`."""
    model.to(dtype)
    model.save_pretrained(folder, **options)
    write_tokenizer(folder, min(model.config.vocab_size, VOCAB_SIZE))
    return folder


def make_checkpoint(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save one of CASES."""
    model_type, fields = CASES[case]
    return save_checkpoint(random_hf_model(model_type, fields), folder, dtype)


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level tokenizer with single characters as tokens, ids 0 to 2 special."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 3]
    vocab = {name: index for index, name in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8"
    )


def new_kvs(model: Model, num_blocks: int, block_size: int = 4) -> list[LayerKV]:
    """An empty pool."""
    return [
        LayerKV.zeros(num_blocks, spec.num_kv_heads, spec.head_dim, block_size, spec.dtype, spec.latent)
        for spec in model.kv_specs
    ]


class Runner:
    """One sequence on a bare model with a pool of its own."""

    def __init__(self, model: Model, max_tokens: int, block_size: int = 4, request_id: str = "r") -> None:
        specs = state_specs_of(model)
        self.states = RecurrentStates(specs, 1, model.device) if isinstance(model, KeepsSlots) and specs else None
        self.model = model if self.states is None else model.with_states(self.states)
        self.block_size = block_size
        self.table = list(range(-(-max_tokens // block_size)))
        self.kvs = new_kvs(model, len(self.table), block_size)
        self.request_id = request_id
        self.runner: runtime.Runner | None = None  # what computes instead of the model itself

    def span(self, tokens: Sequence[int], start: int = 0, hidden: Sequence[int] = ()) -> PassOutput:
        """Logits of every token of a span."""
        rows = SequenceRows(self.request_id, self.table, start, tokens, start + len(tokens), span_logits=True)
        return self._run(rows, hidden)

    def tree(self, tokens: Sequence[int], parents: Sequence[int], start: int, span: Sequence[int] = ()) -> Tensor:
        """Logits of every node of a tree whose root is at `start`, after a span that ends there."""
        masks, depths = tree_masks(parents)
        rows = SequenceRows(
            self.request_id, self.table, start - len(span), span, start, tokens, range(len(tokens)), masks, depths
        )
        return self._run(rows).logits

    def _run(self, rows: SequenceRows, hidden: Sequence[int] = ()) -> PassOutput:
        batch = ForwardBatch.build([rows], self.block_size)
        return self.model.forward(batch, self.kvs, hidden) if self.runner is None else self.runner.run(batch)

    def root(self, token: int, start: int, span: Sequence[int] = ()) -> Tensor:
        """Logits after one token: plain decoding."""
        return self.tree([token], [-1], start, span)[0]


def tree_masks(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ancestor masks and depths of a tree given by parents (-1 for the root)."""
    masks: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return masks, depths


def greedy(model: Model, prompt: Sequence[int], num_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """Plain greedy decoding over a bare model."""
    from forerun.models.base import CommittedPath

    runner = Runner(model, len(prompt) + num_tokens + 1, block_size=16)
    tokens, span = list(prompt), list(prompt[:-1])
    while len(tokens) < len(prompt) + num_tokens:
        logits = runner.root(tokens[-1], len(tokens) - 1, span)
        model.commit([CommittedPath(runner.request_id, (0,))])
        span = []
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stop:
            break
    model.release(runner.request_id)
    return tokens[len(prompt) :]


def make_kernels(name: str = "auto") -> Kernels:
    """The kernels a user gets, or the torch reference."""
    from forerun.kernels.select import select_kernels

    return select_kernels(name, threads=1)


@torch.no_grad()
def hf_logits(folder: Path, tokens: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What transformers computes for a saved folder in `dtype`, all at once -> [len(tokens), V] float64."""
    return hf_model(folder, dtype)(torch.tensor([list(tokens)])).logits[0].double()


@torch.no_grad()
def hf_logits_stepwise(folder: Path, tokens: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same token by token -> [len(tokens), V] float64."""
    from forerun.models.hf import cache_name

    model, cache, rows = hf_model(folder, dtype), None, []
    name = cache_name(model)
    for token in tokens:
        out = model(torch.tensor([[token]]), **{name: cache}, use_cache=True)
        cache = getattr(out, name)
        rows.append(out.logits[0, -1].double())
    return torch.stack(rows)


def hf_model(folder: Path, dtype: torch.dtype) -> Any:
    """A saved folder in transformers. float64 is the exact arithmetic on the stored weights."""
    from transformers import AutoModelForCausalLM

    if json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "step3p5":
        return StepForCausalLM.from_pretrained(folder, dtype)
    load = partial(AutoModelForCausalLM.from_pretrained, folder, attn_implementation="eager")
    load = partial(load, experts_implementation="eager")  # others have no float64
    if dtype != torch.float64:  # `to` would round the rope frequencies too, which stay float32 when loaded
        return load(dtype=dtype).eval()
    model = load(dtype=torch.float32)
    return model.eval().requires_grad_(False).to(dtype)


def num_needless(module: Any) -> int:
    """Entries of a LongCat's matrices that nothing is multiplied by: those of experts that give back what they read."""
    config = module.config
    if config.model_type != "longcat_flash":
        return 0
    return 2 * config.num_layers * config.zero_expert_num * config.expert_ffn_hidden_size * config.hidden_size


def rms_error(found: Tensor, truth: Tensor) -> float:
    """Root of the mean squared difference."""
    return float((found.double() - truth).pow(2).mean().sqrt())
