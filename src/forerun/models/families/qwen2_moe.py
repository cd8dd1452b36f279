"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2 with experts by softmax and a shared one behind a sigmoid gate."""

from __future__ import annotations

from dataclasses import replace

from forerun.errors import UnsupportedError
from forerun.kernels.ops import Routing
from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import MAX_EXPERTS, TRAINING_FIELDS
from forerun.models.families.qwen2 import QWEN_DEFAULTS, WINDOW_FIELDS, qwen_windows
from forerun.models.family import Biases, ExpertNames, Family, TensorNames
from forerun.models.fields import Fields, words

EXPERT_FIELDS = words(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step "
    "mlp_only_layers"
)
EXPERT_DEFAULTS = {"decoder_sparse_step": 1, "norm_topk_prob": False}


def qwen_experts(fields: Fields) -> ExpertsShape:
    """The experts of a Qwen mixture; which layers have them is said by `decoder_sparse_step` and `mlp_only_layers`."""
    name = "num_local_experts" if fields.given("num_local_experts") else "num_experts"  # transformers writes either
    num_experts = fields.integer(name, maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", maximum=num_experts)
    return ExpertsShape(
        routing=Routing(num_experts, top_k, normalize=fields.flag("norm_topk_prob")),
        ffn_size=fields.integer("moe_intermediate_size"),
        step=fields.integer("decoder_sparse_step"),
        dense=frozenset(fields.integers("mlp_only_layers")),
    )


def _experts(fields: Fields) -> ExpertsShape:
    shared = fields.integer("shared_expert_intermediate_size")
    return replace(qwen_experts(fields), shared_size=shared, shared_gate=True)


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    if fields.flag("use_sliding_window") and fields.texts("layer_types") is None:
        raise UnsupportedError(
            "config.json: use_sliding_window is true but layer_types does not say which layers of a qwen2_moe model "
            "have the window; add layer_types, or set use_sliding_window to false"
        )
    return qwen_windows(fields, num_layers)


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("qkv_bias", default=True))


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    defaults={
        **QWEN_DEFAULTS,
        **EXPERT_DEFAULTS,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    fields=WINDOW_FIELDS | EXPERT_FIELDS | TRAINING_FIELDS | {"shared_expert_intermediate_size", "qkv_bias"},
    names=TensorNames(experts=ExpertNames(shared="mlp.shared_expert")),
    biases=_biases,
    windows=_windows,
    experts=_experts,
)
