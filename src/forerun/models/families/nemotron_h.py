"""Nemotron-H and Nemotron 3: layers of one part each, Mamba-2, attention without rope, or a feed-forward part.

Feed-forward parts have no gate, nor have the experts of those that are mixtures, which may compute in a smaller space.
Source: transformers modeling_nemotron_h.py, which in prefill, but not in decoding, takes time_step_min for the least
step. The code that NVIDIA publishes with the weights does not: its steps are limited by time_step_limit alone, and so
are these.
"""

from __future__ import annotations

from functools import partial

from forerun.errors import UnsupportedError
from forerun.kernels.ops import SQUARED_RELU
from forerun.models.blocks import ExpertsShape
from forerun.models.families.deepseek_v3 import routing_of
from forerun.models.families.granite_hybrid import expect_all_steps
from forerun.models.family import ExpertNames, Family, MambaNames, Parts, TensorNames, unrotated
from forerun.models.fields import THROUGH_TRANSFORMERS, Fields, by_one_name, words
from forerun.models.recurrent_dims import MAX_TAPS, MambaDims, mamba_heads

KINDS = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "linear_attention",  # as transformers wrote it before version 5
    "attention": "full_attention",
}
PARTS: dict[str, Parts] = {"linear_attention": "mixer", "full_attention": "mixer", "mlp": "mlp", "moe": "mlp"}
ONLY = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "residual_in_fp32": False,
    "n_shared_experts": 1,
}
OWN_FIELDS = words(
    "hybrid_override_pattern layers_block_type ssm_state_size n_groups mamba_num_heads mamba_head_dim conv_kernel "
    "use_conv_bias n_routed_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size "
    "num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor"
)
ALIASES = {  # names of an early configuration class, and one that files have twice
    "attention_head_dim": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
}
# How training began, how kernels cut their work, layers for drafting.
OTHER_FIELDS = words(
    "expand chunk_size rescale_prenorm_residual num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype "
    "time_step_min time_step_max time_step_floor time_step_limit time_step_rank rms_norm_eps mtp_layers_block_type "
    "mtp_hybrid_override_pattern num_nextn_predict_layers moe_shared_expert_overlap output_router_logits"
)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """What each layer is; raises UnsupportedError."""
    stated = fields.texts("layers_block_type") or tuple(fields.text("hybrid_override_pattern", default=""))
    kinds = tuple(KINDS.get(kind, kind) for kind in stated)
    unknown = sorted(set(kinds) - set(PARTS))
    if unknown or "full_attention" not in kinds:
        found = f"layers of {', '.join(unknown)}" if unknown else "no layer of full_attention"
        raise UnsupportedError(
            f"config.json: layers_block_type or hybrid_override_pattern asks for {found}; forerun computes layers of "
            f"{', '.join(PARTS)}, with attention in one at least; {THROUGH_TRANSFORMERS}"
        )
    return kinds


def module_kinds(fields: Fields) -> tuple[str, ...]:
    """What each layer of the module for drafting is."""
    pattern = tuple(fields.text("mtp_hybrid_override_pattern", default="*E"))
    return tuple(KINDS.get(kind, kind) for kind in fields.texts("mtp_layers_block_type") or pattern)


def _num_layers(fields: Fields) -> int:
    """As many as have a kind, whatever num_hidden_layers says, which transformers 5 does not write."""
    return len(_kinds(fields))


def _parts(fields: Fields, num_layers: int) -> tuple[Parts, ...]:
    for name, value in ONLY.items():
        fields.expect(name, value)
    return tuple(PARTS[kind] for kind in _kinds(fields))


def _mamba(fields: Fields, num_layers: int) -> MambaDims:
    expect_all_steps(fields)
    heads = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    return MambaDims(
        heads=mamba_heads(*heads, fields.integer("n_groups"), fields.integer("ssm_state_size")),
        taps=fields.integer("conv_kernel", minimum=2, maximum=MAX_TAPS),
        layers=frozenset(layer for layer, kind in enumerate(_kinds(fields)) if kind == "linear_attention"),
        conv_bias=fields.flag("use_conv_bias"),
    )


def _experts(fields: Fields) -> ExpertsShape | None:
    kinds = _kinds(fields)
    if "moe" not in kinds:
        return None
    has_latents = fields.get("moe_latent_size") is not None
    return ExpertsShape(
        routing=routing_of(fields),
        ffn_size=fields.integer("moe_intermediate_size"),
        has_gate=False,
        latent_size=fields.integer("moe_latent_size") if has_latents else 0,
        shared_size=fields.integer("moe_shared_expert_intermediate_size"),
        correction=True,
        dense=frozenset(layer for layer, kind in enumerate(kinds) if kind != "moe"),
    )


NEMOTRON_H = Family(
    model_type="nemotron_h",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "intermediate_size": 21504,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    fields=OWN_FIELDS | OTHER_FIELDS | set(ONLY),
    respelled=partial(by_one_name, aliases=ALIASES),
    names=TensorNames(
        embedding="backbone.embeddings",
        layer="backbone.layers.{index}",
        final_norm="backbone.norm_f",
        attention_norm="norm",
        mlp_norm="",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out="mixer.o_proj",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        experts=ExpertNames(
            expert="mixer.experts.{index}",
            gate_up=("up_proj",),
            router="mixer.gate",
            correction="mixer.gate.e_score_correction_bias",
            shared="mixer.shared_experts",
            stacked="mixer.experts",
            stacked_gate_up=("up_proj",),
            latent_down="mixer.fc1_latent_proj",
            latent_up="mixer.fc2_latent_proj",
        ),
        mamba=MambaNames(
            project="mixer.in_proj",
            conv="mixer.conv1d",
            decay="mixer.A_log",
            bias="mixer.dt_bias",
            skip="mixer.D",
            norm="mixer.norm.weight",
            out="mixer.out_proj",
        ),
    ),
    gate=SQUARED_RELU,
    norm_eps="layer_norm_epsilon",
    num_layers=_num_layers,
    parts=_parts,
    experts=_experts,
    ropes=unrotated,
    recurrent=_mamba,
)
