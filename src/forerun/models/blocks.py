"""The shapes of the blocks that only some families have: mixtures of experts, attention over latents.

Knows: their sizes, which layers have them, how many parameters they hold. Does not know: config.json's spelling (a
Family does), tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forerun.kernels.ops import HeadLayout, LatentLayout, Routing


class LayerShape(NamedTuple):
    """What the layers of one model may differ in, beside windows and ropes."""

    heads: HeadLayout  # all of which its rope may turn
    ffn_size: int  # of its dense feed-forward part, if it has one
    kv_layer: int | None = None  # the earlier layer whose keys and values it reads; None: it has its own
    keys_are_values: bool = False  # one matrix makes both; norms and rotation come after
    has_sinks: bool = False  # a score of each query head beside its keys'
    value_dim: int = 0  # entries of a value head, where these are fewer than a key head's; 0: as many
    bound: int = 0  # of what the gate of its dense part, or of its shared expert, gives and multiplies; 0: none
    experts_bound: int = 0  # likewise of its other experts


class PerLayerSizes(NamedTuple):
    """What every layer is given of each token, beside the residual stream (Gemma 3n)."""

    vocab_size: int  # rows of the table that a part of it is read from
    size: int  # entries a layer

    def num_parameters(self, hidden_size: int, num_layers: int) -> int:
        """Entries of the table and projection for all layers, of their norm, and of what layers do with their parts."""
        for_all = (self.vocab_size + hidden_size) * num_layers * self.size + self.size
        return for_all + num_layers * (2 * hidden_size * self.size + hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The feed-forward layers that are mixtures of experts, and which layers these are."""

    routing: Routing
    ffn_size: int  # of one expert
    has_gate: bool = True  # each expert
    latent_size: int = 0  # of the space that experts compute in; 0: that of the stream
    shared_size: int = 0  # of the expert that every row gets; 0: there is none
    shared_gate: bool = False  # the shared expert's output is weighed by a sigmoid of its own
    biases: bool = False  # of the router and the experts
    scales_inputs: bool = False  # weights multiply what experts read, not what they give
    num_zero: int = 0  # of the routed experts, the last ones: they give back what they read
    shortcut: bool = False  # beside a dense part, which reads the same; added behind the next layer
    beside_dense: bool = False  # a dense part is added to them, with norms for both, and weights have factors
    correction: bool = False  # a stored vector is added to the scores that experts are chosen by
    first: int = 0  # layers before this one are dense
    step: int = 1  # layers whose number, counted from 1, is no multiple of it are dense
    dense: frozenset[int] = frozenset()  # further dense layers

    def has(self, layer: int) -> bool:
        """Whether the layer of that index is a mixture; layers after the last one follow the same rule."""
        return layer >= self.first and (layer + 1) % self.step == 0 and layer not in self.dense

    @property
    def num_real(self) -> int:
        """Experts with matrices."""
        return self.routing.num_experts - self.num_zero

    def expert_parameters(self, hidden_size: int) -> int:
        """Entries of one expert's matrices."""
        return (2 + self.has_gate) * (self.latent_size or hidden_size) * self.ffn_size

    def num_parameters(self, hidden_size: int) -> int:
        """Entries of one such layer's matrices."""
        router = self.routing.num_experts + self.shared_gate
        always = router + 2 * self.latent_size + (2 + self.has_gate) * self.shared_size
        biases = self.routing.num_experts * (1 + 2 * self.ffn_size + hidden_size) * self.biases
        vectors = (4 * hidden_size + self.routing.num_experts) * self.beside_dense
        experts = self.num_real * self.expert_parameters(hidden_size)
        return hidden_size * always + experts + biases + vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDims:
    """Attention whose keys and values are projections of one latent vector a position (DeepSeek-V2, 2405.04434)."""

    rank: int  # of the latent
    query_rank: int  # of what queries are projected from; 0: from the hidden state itself
    nope_dim: int  # entries of a query and key head that are not rotated
    rope_dim: int  # those that are; in the key they are the same for all heads
    value_dim: int
    interleaved: bool  # rotated pairs are neighbours
    query_scale: float = 1.0  # of what queries are projected from
    scale: float = 1.0  # of the latent

    def heads(self, num_heads: int) -> HeadLayout:
        """The heads as attention sees them: a query per head, and one key that is also the value."""
        return HeadLayout(num_heads, 1, self.rank + self.rope_dim, self.rope_dim)

    def layout(self, num_heads: int) -> LatentLayout:
        """The layout the kernels are given."""
        return LatentLayout(num_heads, self.rank, self.rope_dim, self.interleaved)

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Entries of one layer's matrices and of the norms inside."""
        query = num_heads * (self.nope_dim + self.rope_dim)
        queries = self.query_rank * (hidden_size + query + 1) if self.query_rank else hidden_size * query
        latents = hidden_size * (self.rank + self.rope_dim) + self.rank
        heads = self.rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden_size
        return queries + latents + num_heads * heads
