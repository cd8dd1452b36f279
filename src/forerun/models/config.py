"""ModelConfig: what config.json says about a decoder, read strictly.

Knows: the fields all families share, which other fields change nothing, and how the rest is refused. Does not know:
files, tensors, or any single family (a Family says how it differs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.ops import SQUARED_RELU, HeadLayout
from forerun.layers.rotary import RopeSpec, score_factor
from forerun.models.blocks import ExpertsShape, LatentDims, LayerShape, PerLayerSizes
from forerun.models.family import Biases, Family, Parts, QkNorm, Scales
from forerun.models.fields import THROUGH_TRANSFORMERS, Fields, words
from forerun.models.recurrent_dims import MambaDims, RecurrentDims
from forerun.models.rope_config import LOCAL_BASE, ROPE_FIELDS, reachable_positions, read_rope, read_window_rope
from forerun.quant.formats import check_quantization

COMMON_FIELDS = words(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim hidden_act rms_norm_eps max_position_embeddings tie_word_embeddings bos_token_id eos_token_id "
    "torch_dtype dtype"
)
# Fields of these names are about training, generation, or how to split the same arithmetic; they change no logit.
# (pretraining_tp computes the same products in slices; dropout is off outside training.)
INERT_FIELDS = words(
    "architectures pad_token_id unk_token_id initializer_range use_cache pretraining_tp attn_implementation "
    "output_attentions output_hidden_states num_labels decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id max_length min_length is_llama_config transformers_version chunk_size_feed_forward "
    "embd_pdrop resid_pdrop hidden_dropout attention_dropout tokenizer_class use_bfloat16 auto_map "
    "attention_probs_dropout_prob"
)
# An unknown field whose name holds one of these words, set to something, is refused: it may change the computation.
TELLING_WORDS = words(
    "scal multiplier bias norm soft rope rotary window expert moe attn attention alibi head layer hidden quant lora "
    "act residual logit cap parallel interleav sparse mask position embed mtp"
)
MASK_TOKENS = ("pard_token", "ptd_token_id")
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and arithmetic of one decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    heads: HeadLayout
    shapes: tuple[LayerShape, ...]  # a layer; those of most layers are `heads` and `ffn_size`
    activation: str  # one of ops.ACTIVATIONS
    norm_eps: float
    rope: RopeSpec  # of layers without a window
    layer_ropes: tuple[RopeSpec, ...]  # a layer
    max_position: int  # positions the checkpoint says it can use
    windows: tuple[int, ...]  # a layer; 0: no window
    chunks: tuple[int, ...]  # a layer: positions that see only each other; 0: all see all
    biases: Biases
    qk_norm: QkNorm
    scales: Scales
    num_norms: int  # of a layer, beside those of queries and keys
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    experts: ExpertsShape | None = None  # None: every feed-forward layer is dense
    latents: LatentDims | None = None  # attention over latents, whose `heads` are those of the latent space
    recurrent: RecurrentDims | None = None  # layers that are recurrent; None: every layer attends
    per_layer: PerLayerSizes | None = None  # what layers are given beside the stream; None: nothing
    value_norms: bool = False
    gated_attention: bool = False
    head_gates: bool = False
    parts: tuple[Parts, ...] = ()  # a layer; layers after the last one are whole
    mask_token_id: int | None = None  # of a draft model that guesses several tokens at once

    @staticmethod
    def read(raw: Mapping[str, Any], family: Family) -> ModelConfig:
        """Read a config.json object; raises CheckpointError (malformed) or UnsupportedError (beyond forerun)."""
        raw = family.respelled(raw)
        _refuse_unknown(raw, family)
        fields = Fields(raw, family.defaults)
        num_layers = family.num_layers(fields)
        windows = family.windows(fields, num_layers)
        latents, recurrent = family.latents(fields), family.recurrent(fields, num_layers)
        heads = _read_heads(fields, family) if latents is None else _latent_heads(fields, latents)
        shapes = family.shapes(fields, LayerShape(heads, family.ffn_size(fields), has_sinks=family.sinks), windows)
        _check_heads(shapes)
        rope = read_rope(raw, fields, family, latents.rope_dim if latents else _rope_head_dim(shapes, windows))
        ropes = _layer_ropes(raw, fields, family, rope, windows)
        starts = fields.token_ids("bos_token_id")
        return ModelConfig(
            model_type=family.model_type,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            ffn_size=family.ffn_size(fields),
            num_layers=num_layers,
            heads=heads if latents is not None else heads._replace(rotary_dim=rope.rotary_dim),
            shapes=shapes,
            activation=family.gate or _read_activation(fields, family),
            norm_eps=fields.number(family.norm_eps),
            rope=rope,
            layer_ropes=ropes,
            max_position=_max_position(fields, family, rope),
            windows=windows,
            chunks=family.chunks(fields, num_layers),
            biases=family.biases(fields),
            qk_norm="" if family.qk_norm_flag and not fields.flag(family.qk_norm_flag) else family.qk_norm,
            scales=family.scales(fields),
            num_norms=family.names.num_norms,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            bos_token_id=starts[0] if starts else None,
            eos_token_ids=fields.token_ids("eos_token_id"),
            experts=family.experts(fields),
            latents=latents,
            recurrent=recurrent if recurrent is not None and recurrent.layers else None,
            per_layer=family.per_layer(fields),
            value_norms=family.value_norms,
            gated_attention=family.gated_attention,
            head_gates=family.head_gates,
            parts=family.parts(fields, num_layers),
            mask_token_id=_mask_token(fields),
        )

    @property
    def attention_scale(self) -> float:
        """What query-key products are multiplied by."""
        if self.scales.attention is not None:
            return self.scales.attention
        if self.latents is None:
            return float(self.heads.head_dim**-0.5)
        return float((self.latents.nope_dim + self.latents.rope_dim) ** -0.5) * score_factor(self.rope)

    @property
    def on_cpus_only(self) -> str:
        """The part that runs on CPUs only so far; "": there is none."""
        experts = self.experts
        parts = {
            "layers with heads of several sizes": any(s.heads.head_dim != self.heads.head_dim for s in self.shapes),
            "experts without a gate": experts is not None and not experts.has_gate,
            "experts whose inputs are weighed": experts is not None and experts.scales_inputs,
        }
        return next((part for part, is_there in parts.items() if is_there), "")

    def window(self, layer: int) -> int:
        """The window of a layer; layers after the last one have that of the last."""
        return self.windows[min(layer, len(self.windows) - 1)]

    def chunk(self, layer: int) -> int:
        """The chunk of a layer, likewise."""
        return self.chunks[min(layer, len(self.chunks) - 1)]

    def shape(self, layer: int) -> LayerShape:
        """The shape of a layer; layers after the last one have that of the last."""
        return self.shapes[min(layer, len(self.shapes) - 1)]

    def rope_of(self, layer: int) -> RopeSpec:
        """The rope of a layer; layers after the last one have that of the last."""
        return self.layer_ropes[min(layer, len(self.layer_ropes) - 1)]

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state in place of keys and values; layers after the last one attend."""
        return self.recurrent is not None and layer in self.recurrent.layers and not self.has_beside(layer)

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer has attention, or what stands in its place."""
        return self.parts[layer] != "mlp" if layer < len(self.parts) else True

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has a feed-forward part."""
        return self.parts[layer] != "mixer" if layer < len(self.parts) else True

    def has_beside(self, layer: int) -> bool:
        """Whether a layer has attention and a recurrent part beside it."""
        return isinstance(self.recurrent, MambaDims) and self.recurrent.beside and layer in self.recurrent.layers

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        return self.experts is not None and self.experts.has(layer)


def num_parameters(config: ModelConfig) -> int:
    """Entries of all matrices and norms; a tied output layer is counted once, corrections of routers not at all."""
    hidden = config.hidden_size
    layers = config.num_layers * config.num_norms * hidden
    layers += sum(_mixer_parameters(config, layer) for layer in range(config.num_layers))
    layers += sum(_feed_forward_parameters(config, layer) for layer in range(config.num_layers))
    layers += config.per_layer.num_parameters(hidden, config.num_layers) if config.per_layer else 0
    return layers + config.vocab_size * hidden * (1 if config.tie_embeddings else 2) + hidden


def active_parameters(config: ModelConfig) -> int:
    """How many of `num_parameters` the pass of one token reads: of all experts only the chosen ones."""
    shape, mixtures = config.experts, sum(config.has_experts(layer) for layer in range(config.num_layers))
    if shape is None:
        return num_parameters(config)
    idle = (shape.num_real - shape.routing.top_k) * shape.expert_parameters(config.hidden_size)
    return num_parameters(config) - mixtures * idle


def _mixer_parameters(config: ModelConfig, layer: int) -> int:
    if not config.has_mixer(layer):
        return 0
    dims = config.recurrent
    recurrent = dims.num_parameters(config.hidden_size) if dims is not None and layer in dims.layers else 0
    return recurrent + (0 if config.is_recurrent(layer) else _attention_parameters(config, layer))


def _attention_parameters(config: ModelConfig, layer: int) -> int:
    shape = config.shape(layer)
    hidden, heads, biases = config.hidden_size, shape.heads, config.biases
    out = hidden * biases.out
    if config.latents is not None:
        down = config.latents.query_rank + config.latents.rank + config.latents.rope_dim
        return config.latents.num_parameters(hidden, heads.num_q) + down * biases.qkv + out
    made = 0 if shape.kv_layer is not None else heads.num_kv * (2 - shape.keys_are_values)
    rows = (heads.num_q * (1 + config.gated_attention) + made) * heads.head_dim
    missing = heads.head_dim - shape.value_dim if shape.value_dim else 0  # entries of a value head
    rows -= heads.num_kv * missing
    matrices = hidden * (rows + heads.num_q * (heads.head_dim - missing + config.head_gates))
    of_heads = 1 + (shape.kv_layer is None)
    normed = {"": 0, "unit": 0, "head": of_heads, "row": heads.num_q + heads.num_kv}[config.qk_norm]
    vectors = normed * heads.head_dim + heads.num_q * shape.has_sinks
    return matrices + rows * biases.qkv + out + vectors


def _feed_forward_parameters(config: ModelConfig, layer: int) -> int:
    hidden, ffn = config.hidden_size, config.shape(layer).ffn_size
    if not config.has_mlp(layer):
        return 0
    dense = (2 + (config.activation != SQUARED_RELU)) * hidden * ffn + (2 * ffn + hidden) * config.biases.mlp
    if config.experts is not None and config.experts.has(layer):
        return config.experts.num_parameters(hidden) + dense * (config.experts.beside_dense or config.experts.shortcut)
    return dense


def mask_token_field(fields: Fields, *others: str) -> str | None:
    """The field that names the token read in place of tokens not known yet: `others` first; None if there is none."""
    return next((name for name in (*others, *MASK_TOKENS) if fields.given(name)), None)


def _mask_token(fields: Fields) -> int | None:
    """What PARD's draft models read in place of tokens not known yet; None for other models."""
    name = mask_token_field(fields)
    return None if name is None else fields.integer(name, minimum=0, maximum=fields.integer("vocab_size") - 1)


def ignored_fields(raw: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Fields of a config.json that can be read which forerun does not know, and nothing in whose names is telling."""
    return tuple(sorted(_unknown(family.respelled(raw), family) - {"quantization_config", *MASK_TOKENS}))


def _refuse_unknown(raw: Mapping[str, Any], family: Family) -> None:
    unknown = _unknown(raw, family)
    for name in (name for name in raw if name in unknown):  # in the file's order
        if name == "quantization_config":
            check_quantization(raw[name])
        elif any(word in name for word in TELLING_WORDS):
            raise UnsupportedError(_refusal(name, raw[name], family))


def _unknown(raw: Mapping[str, Any], family: Family) -> set[str]:
    """Fields that say something which is not known of the family."""
    known = COMMON_FIELDS | INERT_FIELDS | ROPE_FIELDS | family.fields
    known |= {family.activation, family.norm_eps, family.kv_heads}
    if family.window_rope:
        known |= {LOCAL_BASE}
    told = {name for name, value in raw.items() if not _says_nothing(value)}
    return {name for name in told - known if not name.startswith("_") and "dropout" not in name}


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _refusal(name: str, value: Any, family: Family) -> str:
    fields = ", ".join(sorted(family.fields)) or "none beyond the common ones"
    return (
        f"config.json sets {name} = {str(value)[:60]!r}, which forerun does not know for {family.model_type} models "
        f"and which may change what they compute; known special fields: {fields}; remove the field if it changes "
        f"nothing, or {THROUGH_TRANSFORMERS}"
    )


def _max_position(fields: Fields, family: Family, rope: RopeSpec) -> int:
    stated = fields.integer("max_position_embeddings")
    if family.within_original and rope.original_max_position:
        return min(stated, rope.original_max_position)
    reachable = stated if family.counts_stretched and rope.kind == "linear" else reachable_positions(rope, stated)
    return min(reachable, family.position_limit(fields) or reachable)


def _layer_ropes(
    raw: Mapping[str, Any], fields: Fields, family: Family, rope: RopeSpec, windows: tuple[int, ...]
) -> tuple[RopeSpec, ...]:
    if not family.window_rope:
        return family.ropes(fields, rope, windows)
    own = read_window_rope(raw, fields, family, _head_dim(fields))
    return tuple(own if window else rope for window in windows)


def _rope_head_dim(shapes: tuple[LayerShape, ...], windows: tuple[int, ...]) -> int:
    """The head size of layers without a window, which differ in nothing that a rope depends on."""
    sizes = {shape.heads.head_dim for shape, window in zip(shapes, windows, strict=True) if not window}
    return sizes.pop() if len(sizes) == 1 else shapes[0].heads.head_dim


def _head_dim(fields: Fields) -> int:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    given = fields.get("head_dim") is not None
    if not given and hidden % heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is no "
            "head_dim; correct the file"
        )
    return fields.integer("head_dim") if given else hidden // heads


def _read_heads(fields: Fields, family: Family) -> HeadLayout:
    head_dim, num_q = _head_dim(fields), fields.integer("num_attention_heads")
    num_kv = fields.integer(family.kv_heads, default=num_q)
    if num_q % num_kv:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_q} is not a multiple of {family.kv_heads} {num_kv}; "
            "correct the file"
        )
    return HeadLayout(num_q, num_kv, head_dim, head_dim, family.interleaved_rope)


def _check_heads(shapes: tuple[LayerShape, ...]) -> None:
    """Every key head is read by as many query heads, in layers of each shape."""
    for num_q, num_kv, *_ in (shape.heads for shape in shapes):
        if num_q % num_kv:
            raise CheckpointError(
                f"config.json: some layers have {num_q} query heads, which is not a multiple of their {num_kv} key "
                "heads; correct the file"
            )


def _latent_heads(fields: Fields, latents: LatentDims) -> HeadLayout:
    num_heads = fields.integer("num_attention_heads")
    num_kv = fields.integer("num_key_value_heads", default=num_heads)
    if num_kv != num_heads:
        raise UnsupportedError(
            f"config.json: num_key_value_heads is {num_kv}, num_attention_heads {num_heads}; in latent attention each "
            "head has its own keys and values, so the two must be the same number: correct the file if the weights "
            f"have them for {num_heads} heads, or {THROUGH_TRANSFORMERS}"
        )
    return latents.heads(num_heads)


def _read_activation(fields: Fields, family: Family) -> str:
    field = family.activation
    name = fields.text(field, default=family.defaults.get(field, "silu"))
    if name not in ACTIVATION_NAMES:
        raise UnsupportedError(
            f"config.json: {field} is {name!r}; supported are {', '.join(ACTIVATION_NAMES)}; {THROUGH_TRANSFORMERS}"
        )
    return ACTIVATION_NAMES[name]
