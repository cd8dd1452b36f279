"""Falcon-H1: attention and Mamba-2 beside each other in every layer, and multipliers of everything.

Source: transformers modeling_falcon_h1.py.
"""

from __future__ import annotations

from forerun.models.families.granite_hybrid import MAMBA_DEFAULTS, MAMBA_FIELDS, mamba_dims
from forerun.models.family import Family, Scales, TensorNames
from forerun.models.fields import Fields, words
from forerun.models.recurrent_dims import MambaDims

MULTIPLIERS = words(
    "embedding_multiplier lm_head_multiplier mlp_multipliers key_multiplier attention_in_multiplier "
    "attention_out_multiplier ssm_multipliers ssm_in_multiplier ssm_out_multiplier"
)
BIASES = ("attention_bias", "mlp_bias", "projectors_bias")
# What another field says as well, or nobody reads.
OTHER_FIELDS = words(
    "mamba_d_ssm mamba_norm_before_gate mamba_rms_norm num_logits_to_keep mamba_use_mlp mlp_expansion_factor "
    "layers_block_type layer_types"
)


def _factor(fields: Fields, name: str) -> float:
    return fields.number(name, default=1.0, minimum=-1e6, maximum=1e6)


def _factors(fields: Fields, name: str, length: int) -> tuple[float, ...]:
    return fields.numbers(name, length) if fields.given(name) else (1.0,) * length


def _scales(fields: Fields) -> Scales:
    """Without biases, what queries, keys and values are multiplied with goes into the scores and the output."""
    for name in BIASES:
        fields.expect(name, False)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", default=hidden // heads)
    entering, (gate, down) = _factor(fields, "attention_in_multiplier"), _factors(fields, "mlp_multipliers", 2)
    return Scales(
        embedding=_factor(fields, "embedding_multiplier"),
        attention=head_dim**-0.5 * entering**2 * _factor(fields, "key_multiplier"),
        of_attention=entering * _factor(fields, "attention_out_multiplier"),
        gate=gate,
        of_mlp=down,
        logits=_factor(fields, "lm_head_multiplier"),
    )


def _mamba(fields: Fields, num_layers: int) -> MambaDims:
    size = fields.integer("mamba_d_ssm") if fields.get("mamba_d_ssm") is not None else 0
    entering = _factor(fields, "ssm_in_multiplier")
    norm = "before_gate" if fields.flag("mamba_norm_before_gate") else "after_gate"
    return mamba_dims(
        fields,
        frozenset(range(num_layers)),
        size,
        beside=True,
        norm=norm if fields.flag("mamba_rms_norm") else "",
        factors=tuple(entering * factor for factor in _factors(fields, "ssm_multipliers", 5)),
        out_factor=_factor(fields, "ssm_out_multiplier"),
    )


FALCON_H1 = Family(
    model_type="falcon_h1",
    defaults={
        **MAMBA_DEFAULTS,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
    },
    fields=MULTIPLIERS | MAMBA_FIELDS | OTHER_FIELDS | set(BIASES),
    names=TensorNames(
        final_norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
    scales=_scales,
    recurrent=_mamba,
)
