"""What distinguishes one family of decoders from another, as data.

Knows: the questions (which fields, which biases, which windows, which tensor names). Does not know: the answers,
which are one small file a family in `models/families`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from forerun.layers.rotary import RopeSpec
from forerun.models.blocks import ExpertsShape, LatentDims, LayerShape, PerLayerSizes
from forerun.models.fields import Fields
from forerun.models.recurrent_dims import RecurrentDims

MAX_LAYERS = 10_000  # an absurd value must not become an absurd allocation
# Norms of queries and keys: none, of each head, of all heads of a row together, of each rotated head without a weight.
QkNorm = Literal["", "head", "row", "unit"]
Parts = Literal["both", "mixer", "mlp"]  # of a layer: a mixer is attention, or what stands in its place


class Biases(NamedTuple):
    """Which linear layers add a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


class Scales(NamedTuple):
    """Numbers that activations are multiplied with, and soft caps: 0 for none."""

    embedding: float = 1.0
    per_layer: float = 1.0  # the table of parts for each layer
    attention: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    of_attention: float = 1.0  # of what attention gives
    gate: float = 1.0  # of what goes through the activation of feed-forward parts
    of_mlp: float = 1.0  # of what these give
    logits: float = 1.0
    attention_cap: float = 0.0
    logits_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture of experts' tensors within a layer; `gate_up` and `down` are names within an expert."""

    expert: str = "mlp.experts.{index}"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts"
    shared_gate_up: tuple[str, ...] = ()  # within it, as is the next; (): the names within any expert
    shared_down: str = ""
    latent_down: str = ""  # into the space that experts compute in, where that is another one
    latent_up: str = ""  # and out of it
    shared_gate: str = "mlp.shared_expert_gate"
    stacked: str = "mlp.experts"  # where all experts are in two or three tensors, these are here
    stacked_gate_up: tuple[str, ...] = ("gate_up_proj",)
    stacked_down: str = "down_proj"
    is_transposed: bool = False  # those are stored by inputs, unless they are blocks
    is_interleaved: bool = False  # their gate and up rows alternate
    router_scale: str = "router.scale"  # this and the next beside a dense part
    factors: str = "router.per_expert_scale"
    before: str = "pre_feedforward_layernorm_2"
    after: str = "post_feedforward_layernorm_2"
    after_dense: str = "post_feedforward_layernorm_1"


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of latent attention's tensors within a layer."""

    query: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"
    up_keys: str = "self_attn.k_b_proj"  # with up_values instead of `up` in GGUF files: its halves, keys transposed
    up_values: str = "self_attn.v_b_proj"


@dataclass(frozen=True, slots=True)
class DeltaNames:
    """Names of a gated delta net's tensors within a layer.

    `project` has the modules of queries, keys, values, gate, b and a in this order, or those of two matrices that hold
    the rows of [query, key, values, gate] and of [b, a] for one head of keys after the other. Of three, the last one
    holds b, then a. Of six, queries, keys and values have one each, and the ones for gate and a are of a low rank:
    `gate` and `forget` make the two of what these give.
    """

    project: tuple[str, ...] = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    gate: str = ""
    forget: str = ""
    conv: tuple[str, ...] = ("linear_attn.conv1d.weight",)  # of queries, keys and values together or of each
    decay: str = "linear_attn.A_log"
    bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm.weight"
    out: str = "linear_attn.out_proj"
    is_tiled: bool = False  # columns of `out`: first those of the first head of values of every head of keys


@dataclass(frozen=True, slots=True)
class ConvNames:
    """Names of a short convolution's tensors within a layer."""

    project: str = "conv.in_proj"
    conv: str = "conv.conv.weight"
    out: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class MambaNames:
    """Names of Mamba-2's tensors within a layer."""

    project: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    decay: str = "mamba.A_log"
    bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    norm: str = "mamba.norm.weight"
    out: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class PerLayerNames:
    """Names of what gives every layer its part of a token, the last three within a layer."""

    table: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    after: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a family's tensors are, below `model.layers.N.` for those of a layer.

    Several names in `qkv` or `gate_up` are joined by rows in this order; one name is a matrix already joined. Norms
    stand before and after attention and feed-forward part; "": there is none.
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{index}"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    after_attention: str = ""
    mlp_norm: str = "post_attention_layernorm"
    after_mlp: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # a tensor, not a module
    head_gate: str = "self_attn.g_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    saved_mlp: str = ""  # how transformers saves the "mlp." of these, if otherwise than as published
    running: tuple[tuple[str, str], ...] = ()  # parts of names while transformers runs a model, and as published
    scale: str = ""  # a tensor: what the stream is multiplied by at the end of a layer; "": nothing
    unread: str = ""  # what is in the names of a layer's tensors that are not needed; "": all are
    experts: ExpertNames = ExpertNames()
    latents: LatentNames = LatentNames()
    delta: DeltaNames = DeltaNames()
    conv: ConvNames = ConvNames()
    mamba: MambaNames = MambaNames()
    per_layer: PerLayerNames = PerLayerNames()

    @property
    def num_norms(self) -> int:
        """Norms around the parts of a layer."""
        return sum(map(bool, (self.attention_norm, self.after_attention, self.mlp_norm, self.after_mlp)))


def as_written(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Families whose config.json has the names of transformers."""
    return raw


def same_names(names: TensorNames, layer: int) -> TensorNames:
    """Families whose layers all name their tensors alike."""
    return names


def num_hidden_layers(fields: Fields) -> int:
    """Families that say how many layers they have as most do."""
    return fields.integer("num_hidden_layers", maximum=MAX_LAYERS)


def intermediate_size(fields: Fields) -> int:
    """Families that name the width of their feed-forward layers as most do."""
    return fields.integer("intermediate_size")


def no_biases(fields: Fields) -> Biases:
    """Families without biases."""
    return Biases()


def no_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Families whose layers all see everything."""
    return (0,) * num_layers


def no_experts(fields: Fields) -> ExpertsShape | None:
    """Families whose feed-forward layers are all dense."""
    return None


def no_limit(fields: Fields) -> int:
    """Families that compute the same at all positions."""
    return 0


def no_recurrence(fields: Fields, num_layers: int) -> RecurrentDims | None:
    """Families whose layers all attend."""
    return None


def no_latents(fields: Fields) -> LatentDims | None:
    """Families whose layers keep keys and values."""
    return None


def no_scales(fields: Fields) -> Scales:
    """Families that multiply with nothing."""
    return Scales()


def alike(fields: Fields, shape: LayerShape, windows: tuple[int, ...]) -> tuple[LayerShape, ...]:
    """Families whose layers are of one shape."""
    return (shape,) * len(windows)


def no_inputs(fields: Fields) -> PerLayerSizes | None:
    """Families whose layers read the residual stream alone."""
    return None


def one_rope(fields: Fields, rope: RopeSpec, windows: tuple[int, ...]) -> tuple[RopeSpec, ...]:
    """Families whose layers all rotate alike."""
    return (rope,) * len(windows)


def rope_in_windows(fields: Fields, rope: RopeSpec, windows: tuple[int, ...]) -> tuple[RopeSpec, ...]:
    """Families whose layers rotate only where they have a window."""
    return tuple(rope if window else UNROTATED for window in windows)


def unrotated(fields: Fields, rope: RopeSpec, windows: tuple[int, ...]) -> tuple[RopeSpec, ...]:
    """Families without rope."""
    return (UNROTATED,) * len(windows)


def whole_layers(fields: Fields, num_layers: int) -> tuple[Parts, ...]:
    """Families whose layers all have attention (or what stands in its place) and a feed-forward part."""
    parts: tuple[Parts, ...] = ("both",)
    return parts * num_layers


UNROTATED = RopeSpec(rotary_dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`.

    `defaults` are transformers' values for fields a config.json may leave out. `fields` are the names this family
    understands beyond the common ones (`models.config.COMMON_FIELDS`). `rope_kinds` are the rope scalings it uses.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fields: frozenset[str] = frozenset()
    names: TensorNames = TensorNames()
    names_of: Callable[[TensorNames, int], TensorNames] = same_names  # a layer
    qk_norm: QkNorm = ""
    qk_norm_flag: str = ""  # if config.json says false to this field, there are no norms of queries and keys
    norm_offset: float = 0.0  # added to the stored weights of norms
    log_decay: bool = True  # of recurrent layers, logarithms are stored; False: what these are turned into
    centered_norms: bool = False  # layer norms
    parallel: bool = False  # attention and feed-forward part read the same norm
    sinks: bool = False  # a score of each head beside its keys'
    gate: str = ""  # one of ops.ACTIVATIONS that config.json has no name for; "": what that says
    activation: str = "hidden_act"  # the field that names it
    norm_eps: str = "rms_norm_eps"  # the field
    kv_heads: str = "num_key_value_heads"  # the field
    respelled: Callable[[Mapping[str, Any]], Mapping[str, Any]] = as_written  # config.json in transformers' names
    value_norms: bool = False  # each value head is normalised without a weight
    gated_attention: bool = False  # each head's output is weighed by a sigmoid, entry by entry
    head_gates: bool = False  # likewise, a number a head
    partial_rotary: bool = False
    interleaved_rope: bool = False  # rotated pairs are neighbours
    window_rope: bool = False  # layers with a window have a plain rope of their own
    within_original: bool = False  # attention beyond the original context is computed otherwise, which is not done
    num_layers: Callable[[Fields], int] = num_hidden_layers
    ffn_size: Callable[[Fields], int] = intermediate_size  # of layers that are no mixtures
    counts_stretched: bool = False  # max_position_embeddings includes the factor of linear scaling
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
    biases: Callable[[Fields], Biases] = no_biases
    windows: Callable[[Fields, int], tuple[int, ...]] = no_windows
    chunks: Callable[[Fields, int], tuple[int, ...]] = no_windows  # a layer: positions that see only each other
    position_limit: Callable[[Fields], int] = no_limit  # positions beyond which it computes something else; 0: none
    experts: Callable[[Fields], ExpertsShape | None] = no_experts
    latents: Callable[[Fields], LatentDims | None] = no_latents
    scales: Callable[[Fields], Scales] = no_scales
    ropes: Callable[[Fields, RopeSpec, tuple[int, ...]], tuple[RopeSpec, ...]] = one_rope  # a layer
    parts: Callable[[Fields, int], tuple[Parts, ...]] = whole_layers  # a layer
    recurrent: Callable[[Fields, int], RecurrentDims | None] = no_recurrence
    shapes: Callable[[Fields, LayerShape, tuple[int, ...]], tuple[LayerShape, ...]] = alike
    per_layer: Callable[[Fields], PerLayerSizes | None] = no_inputs
