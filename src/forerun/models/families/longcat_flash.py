"""LongCat-Flash: each layer of config.json is two of latent attention and a dense part; experts read what the first
dense part reads and are added behind the second; some of them give back what they read.

Source: LongCat-Flash (2509.01322) and transformers modeling_longcat_flash.py.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.kernels.ops import Routing
from forerun.models.blocks import ExpertsShape, LatentDims
from forerun.models.families.deepseek_v3 import DEEPSEEK_V3, LATENT_FIELDS
from forerun.models.families.mixtral import MAX_EXPERTS, TRAINING_FIELDS
from forerun.models.family import MAX_LAYERS, ExpertNames, Family, LatentNames, TensorNames
from forerun.models.fields import Fields, words

OWN_FIELDS = words(
    "num_layers ffn_hidden_size expert_ffn_hidden_size n_routed_experts moe_topk zero_expert_num zero_expert_type "
    "routed_scaling_factor router_dtype num_nextn_predict_layers"
)
ONLY = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "norm_topk_prob": False,
    "rope_interleave": True,
    "router_bias": False,
    "ngram_vocab_size_ratio": None,  # of models whose embedding reads several tokens
    "oe_vocab_size_ratio": None,
    "nextn_use_scmoe": False,
    "zero_expert_type": "identity",
}


def _num_layers(fields: Fields) -> int:
    return 2 * fields.integer("num_layers", maximum=MAX_LAYERS)


def _ffn_size(fields: Fields) -> int:
    return fields.integer("ffn_hidden_size")


def _latents(fields: Fields) -> LatentDims:
    dims, hidden, query_rank = DEEPSEEK_V3.latents(fields), fields.integer("hidden_size"), fields.integer("q_lora_rank")
    assert dims is not None
    return replace(dims, query_scale=(hidden / query_rank) ** 0.5, scale=(hidden / dims.rank) ** 0.5)


def _experts(fields: Fields) -> ExpertsShape:
    for name, value in ONLY.items():
        fields.expect(name, value)
    num_zero = fields.integer("zero_expert_num", default=0, minimum=0, maximum=MAX_EXPERTS)
    num_experts = num_zero + fields.integer("n_routed_experts", maximum=MAX_EXPERTS)
    num_layers = _num_layers(fields)
    fields.expect("num_hidden_layers", num_layers)
    return ExpertsShape(
        routing=Routing(
            num_experts,
            fields.integer("moe_topk", maximum=num_experts),
            normalize=False,
            scale=fields.number("routed_scaling_factor"),
        ),
        ffn_size=fields.integer("expert_ffn_hidden_size"),
        correction=True,
        num_zero=num_zero,
        shortcut=True,
        dense=frozenset(range(1, num_layers, 2)),
    )


def _names_of(names: TensorNames, layer: int) -> TensorNames:
    """Those of the first or the second half of a layer of config.json."""
    half, latents = layer % 2, LatentNames()
    own = {
        name: getattr(latents, name).replace("self_attn", f"self_attn.{half}")
        for name in ("query", "query_down", "query_norm", "query_up", "down", "norm", "up")
    }
    return replace(
        names,
        layer=f"model.layers.{layer // 2}",
        attention_norm=f"input_layernorm.{half}",
        mlp_norm=f"post_attention_layernorm.{half}",
        out=f"self_attn.{half}.o_proj",
        gate_up=(f"mlps.{half}.gate_proj", f"mlps.{half}.up_proj"),
        down=f"mlps.{half}.down_proj",
        latents=LatentNames(**own),
    )


LONGCAT_FLASH = Family(
    model_type="longcat_flash",
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "num_layers": 28,
        "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "routed_scaling_factor": 6.0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
    },
    fields=LATENT_FIELDS | TRAINING_FIELDS | OWN_FIELDS | set(ONLY),
    names=TensorNames(
        experts=ExpertNames(router="mlp.router.classifier", correction="mlp.router.e_score_correction_bias")
    ),
    names_of=_names_of,
    rope_kinds=("default",),
    num_layers=_num_layers,
    ffn_size=_ffn_size,
    biases=DEEPSEEK_V3.biases,
    experts=_experts,
    latents=_latents,
)
