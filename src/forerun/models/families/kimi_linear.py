"""Kimi-Linear: Kimi Delta Attention in most layers, in the others attention over latents without rope; experts.

Kimi Delta Attention is a gated delta net with a gate for each channel of keys. Kimi K3, which adds to it, is refused by
the names of the fields that do.
Source: Kimi Linear (2510.26692) and transformers modeling_kimi_linear.py.
"""

from __future__ import annotations

from functools import partial

from forerun.errors import CheckpointError
from forerun.kernels.recurrent_ops import DeltaHeads
from forerun.models.blocks import ExpertsShape, LatentDims
from forerun.models.families.deepseek_v3 import EXPERT_FIELDS, LATENT_FIELDS, OTHER_FIELDS, latent_dims, sigmoid_experts
from forerun.models.families.qwen3_next import LAYER_KINDS
from forerun.models.family import DeltaNames, ExpertNames, Family, TensorNames, unrotated
from forerun.models.fields import Fields, by_one_name, words
from forerun.models.recurrent_dims import MAX_TAPS, DeltaDims, layers_of

ALIASES = {  # the hub's names -> DeepSeek's
    "model_max_length": "max_position_embeddings",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
}
SECTION = "linear_attn_config"  # of the hub's files; the other fields of the next line are how transformers writes it
OWN_FIELDS = words(
    f"{SECTION} layer_types mlp_layer_types linear_head_dim linear_num_heads linear_conv_kernel_dim mla_use_nope "
    "use_grouped_topk"
)
IN_SECTION = words("kda_layers full_attn_layers num_heads head_dim short_conv_kernel_size")
ONLY = {  # and what newer configurations spell out: Kimi K3 sets these otherwise
    "attention_bias": False,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "attn_res_block_size": 0,
    "use_grouped_topk": True,
}


def _latents(fields: Fields) -> LatentDims:
    for name, value in ONLY.items():
        fields.expect(name, value)
    return latent_dims(fields)


def _delta(fields: Fields, num_layers: int) -> DeltaDims:
    fields.expect("hidden_act", "silu")  # the convolution's, too
    section = fields.section(SECTION, IN_SECTION)
    num_heads = section.integer("num_heads", default=fields.integer("linear_num_heads"))
    head_dim = section.integer("head_dim", default=fields.integer("linear_head_dim"))
    taps = section.integer(
        "short_conv_kernel_size", default=fields.integer("linear_conv_kernel_dim"), minimum=2, maximum=MAX_TAPS
    )
    return DeltaDims(
        heads=DeltaHeads(num_heads, num_heads, head_dim, head_dim),
        taps=taps,
        layers=layers_of(_kinds(fields, section, num_layers), *LAYER_KINDS, num_layers),
        gate_rank=head_dim,
    )


def _kinds(fields: Fields, section: Fields, num_layers: int) -> tuple[str, ...]:
    """What each layer is. The hub's files count layers from 1."""
    recurrent, attends = LAYER_KINDS
    stated, lists = fields.texts("layer_types"), (section.integers("kda_layers"), section.integers("full_attn_layers"))
    if not any(lists):
        if stated is None:
            raise CheckpointError(f"config.json says in neither {SECTION} nor layer_types which layers attend")
        return stated
    if sorted((*lists[0], *lists[1])) != list(range(1, num_layers + 1)):
        raise CheckpointError(
            f"config.json: kda_layers and full_attn_layers of {SECTION} must name each of {num_layers} layers once, "
            "counted from 1; correct the file"
        )
    kinds = tuple(recurrent if layer in lists[0] else attends for layer in range(1, num_layers + 1))
    if stated not in (None, kinds):
        raise CheckpointError(f"config.json: layer_types and {SECTION} differ in which layers attend; correct the file")
    return kinds


def _experts(fields: Fields) -> ExpertsShape | None:
    return None if fields.get("n_routed_experts") is None else sigmoid_experts(fields)


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    defaults={
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    fields=LATENT_FIELDS | EXPERT_FIELDS | OTHER_FIELDS | OWN_FIELDS | set(ONLY),
    respelled=partial(by_one_name, aliases=ALIASES),
    names=TensorNames(
        saved_mlp="block_sparse_moe.",
        running=(("self_attn.forget_gate", "self_attn"), ("mlp.shared_experts", "block_sparse_moe.shared_experts")),
        experts=ExpertNames(
            expert="block_sparse_moe.experts.{index}",
            gate_up=("w1", "w3"),
            down="w2",
            router="block_sparse_moe.gate",
            correction="block_sparse_moe.gate.e_score_correction_bias",
            shared="block_sparse_moe.shared_experts",
            shared_gate_up=("gate_proj", "up_proj"),
            shared_down="down_proj",
            stacked="block_sparse_moe.experts",
        ),
        delta=DeltaNames(
            project=tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "g_a", "b", "f_a")),
            gate="self_attn.g_b_proj",
            forget="self_attn.f_b_proj",
            conv=tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
            decay="self_attn.A_log",
            bias="self_attn.dt_bias",
            norm="self_attn.o_norm.weight",
            out="self_attn.o_proj",
        ),
    ),
    rope_kinds=("default",),
    ropes=unrotated,
    latents=_latents,
    experts=_experts,
    recurrent=_delta,
)
