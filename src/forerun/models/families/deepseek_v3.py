"""DeepSeek-V3 and R1: attention over latents; experts by corrected sigmoids within groups, a shared one for all rows.

Layers behind the last one (`num_nextn_predict_layers`) draft; the model itself does not read them.
Source: DeepSeek-V3 (2412.19437) and transformers modeling_deepseek_v3.py.
"""

from __future__ import annotations

from forerun.errors import UnsupportedError
from forerun.kernels.ops import Routing
from forerun.models.blocks import ExpertsShape, LatentDims
from forerun.models.families.mixtral import MAX_EXPERTS
from forerun.models.family import Biases, Family
from forerun.models.fields import Fields, what_is_wrong, words

LATENT_FIELDS = words(
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave attention_bias"
)
EXPERT_FIELDS = words(
    "n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size n_group topk_group "
    "norm_topk_prob routed_scaling_factor first_k_dense_replace moe_layer_freq scoring_func topk_method"
)
# What the layers for drafting are, and fields of training.
OTHER_FIELDS = words("num_nextn_predict_layers num_mtp_layers ep_size aux_loss_alpha seq_aux output_router_logits")
ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


def _latents(fields: Fields) -> LatentDims:
    fields.expect("head_dim", fields.integer("qk_rope_head_dim"))
    return latent_dims(fields)


def latent_dims(fields: Fields) -> LatentDims:
    """Attention over latents."""
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    fields.expect("qk_head_dim", nope + rope)
    has_rank = fields.get("q_lora_rank") is not None
    return LatentDims(
        rank=fields.integer("kv_lora_rank"),
        query_rank=fields.integer("q_lora_rank") if has_rank else 0,
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.integer("v_head_dim"),
        interleaved=fields.flag("rope_interleave", default=True),
    )


def sigmoid_experts(fields: Fields) -> ExpertsShape:
    """Experts chosen by corrected sigmoids within groups, and shared ones of the same size."""
    for name, value in ONLY.items():
        fields.expect(name, value)
    ffn = fields.integer("moe_intermediate_size")
    types = _mlp_types(fields)
    return ExpertsShape(
        routing=routing_of(fields),
        ffn_size=ffn,
        shared_size=ffn * fields.integer("n_shared_experts", default=0, minimum=0),
        correction=True,
        first=fields.integer("first_k_dense_replace", minimum=0) if types is None else 0,
        dense=frozenset(index for index, kind in enumerate(types or ()) if kind == "dense"),
    )


def _mlp_types(fields: Fields) -> tuple[str, ...] | None:
    """Which layers are mixtures, in families whose config.json may name each."""
    types, num_layers = fields.texts("mlp_layer_types"), fields.integer("num_hidden_layers")
    wrong = None if types is None else what_is_wrong(types, ("dense", "sparse"), num_layers)
    if wrong is not None:
        raise UnsupportedError(
            f"config.json: mlp_layer_types must name {num_layers} layers, each dense or sparse; got {wrong}"
        )
    return types


def routing_of(fields: Fields) -> Routing:
    """How rows choose among experts by corrected sigmoids within groups."""
    name = "num_local_experts" if fields.given("num_local_experts") else "n_routed_experts"  # transformers knows both
    num_experts = fields.integer(name, maximum=MAX_EXPERTS)
    num_groups = fields.integer("n_group", maximum=num_experts)
    top_groups = fields.integer("topk_group", maximum=num_groups)
    if num_experts % num_groups:
        raise UnsupportedError(f"config.json: {num_experts} experts cannot be cut into {num_groups} groups (n_group)")
    return Routing(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", maximum=num_experts // num_groups * top_groups),
        sigmoid=True,
        normalize=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        num_groups=num_groups,
        top_groups=top_groups,
    )


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    defaults={
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "moe_intermediate_size": 2048,
    },
    fields=LATENT_FIELDS | EXPERT_FIELDS | OTHER_FIELDS,
    biases=_biases,
    experts=sigmoid_experts,
    latents=_latents,
)
