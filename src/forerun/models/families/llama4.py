"""Llama 4, text: heads of neighbouring pairs rotated, normalised without a weight, in chunks of positions; every few
layers (`no_rope_layers`) neither; experts that read what their weight multiplied. Queries that grow with the position
(`attn_temperature_tuning`) are not computed: positions end where they would begin to.

Source: transformers modeling_llama4.py. A row's experts are told apart by their sigmoids, there by the logits: these
differ only where a sigmoid in float32 is 1.
"""

from __future__ import annotations

from forerun.errors import UnsupportedError
from forerun.kernels.ops import Routing
from forerun.layers.rotary import RopeSpec
from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import MAX_EXPERTS, TRAINING_FIELDS
from forerun.models.family import UNROTATED, Biases, ExpertNames, Family, TensorNames
from forerun.models.fields import Fields, what_is_wrong, words

OWN_FIELDS = words(
    "intermediate_size_mlp num_experts_per_tok num_local_experts moe_layers interleave_moe_layer_step use_qk_norm "
    "no_rope_layers no_rope_layer_interval attention_chunk_size layer_types attn_temperature_tuning floor_scale "
    "attn_scale attention_bias for_llm_compressor"
)


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


def _rotated(fields: Fields) -> tuple[bool, ...]:
    """Whether a layer's heads are rotated."""
    num_layers, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval")
    given = fields.integers("no_rope_layers") or tuple(int((i + 1) % interval != 0) for i in range(num_layers))
    if len(given) != num_layers or not set(given) <= {0, 1}:
        raise UnsupportedError(f"config.json: no_rope_layers must hold a 1 or 0 for each of {num_layers} layers")
    return tuple(map(bool, given))


def _ropes(fields: Fields, rope: RopeSpec, windows: tuple[int, ...]) -> tuple[RopeSpec, ...]:
    return tuple(rope if rotated else UNROTATED for rotated in _rotated(fields))


def _chunks(fields: Fields, num_layers: int) -> tuple[int, ...]:
    size = fields.integer("attention_chunk_size") if fields.get("attention_chunk_size") is not None else 0
    natural = tuple("chunked_attention" if rotated else "full_attention" for rotated in _rotated(fields))
    types = fields.texts("layer_types") or natural
    if (wrong := what_is_wrong(types, ("chunked_attention", "full_attention"), num_layers)) is not None:
        raise UnsupportedError(
            f"config.json: layer_types must name {num_layers} layers, each chunked_attention or full_attention; got "
            f"{wrong}"
        )
    return tuple(size if kind == "chunked_attention" else 0 for kind in types)


def _position_limit(fields: Fields) -> int:
    """From `floor_scale` positions on, layers that do not rotate multiply their queries."""
    is_tuned = fields.flag("attn_temperature_tuning", default=True)
    return fields.integer("floor_scale", minimum=2) - 1 if is_tuned else 0


def _experts(fields: Fields) -> ExpertsShape:
    num_layers, step = fields.integer("num_hidden_layers"), fields.integer("interleave_moe_layer_step")
    natural = range(step - 1, num_layers, step)
    mixtures = natural if fields.get("moe_layers") is None else fields.integers("moe_layers")
    num_experts, ffn = fields.integer("num_local_experts", maximum=MAX_EXPERTS), fields.integer("intermediate_size")
    top_k = fields.integer("num_experts_per_tok", maximum=num_experts)
    return ExpertsShape(
        routing=Routing(num_experts, top_k, sigmoid=True, normalize=False),
        ffn_size=ffn,
        shared_size=ffn,
        scales_inputs=True,
        dense=frozenset(range(num_layers)) - frozenset(mixtures),
    )


def _ffn_size(fields: Fields) -> int:
    return fields.integer("intermediate_size_mlp")


LLAMA4_TEXT = Family(
    model_type="llama4_text",
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size_mlp": 16384,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
    },
    fields=TRAINING_FIELDS | OWN_FIELDS,
    names=TensorNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        experts=ExpertNames(
            expert="feed_forward.experts.{index}",
            router="feed_forward.router",
            shared="feed_forward.shared_expert",
            stacked="feed_forward.experts",
            is_transposed=True,
        ),
    ),
    qk_norm="unit",
    qk_norm_flag="use_qk_norm",
    interleaved_rope=True,
    ffn_size=_ffn_size,
    biases=_biases,
    chunks=_chunks,
    ropes=_ropes,
    position_limit=_position_limit,
    experts=_experts,
)
