"""The op contract: what every kernel backend computes, on which shapes, and what may alias.

Knows: signatures, layouts, meanings. Does not know: who implements an op, nor models, requests or trees.

Two rules hold for every op and every backend:

* **Row invariance.** A row's result depends on that row's inputs alone: not on how many rows are in the call, in
  which order, or on where in the cache its visible keys lie. Reductions run in a fixed order that depends only on
  the row's own length. Tests compare bits.
* **Functional style.** An op returns fresh tensors and writes only to arguments named "in place": it can be replayed.

Activations are float32 and contiguous unless stated otherwise. Weights keep the checkpoint's precision; a pool of KV
has the precision it was made with.

Shape legend: M rows (tokens) of the batch, S sequences, R rows with logits, H hidden size, K/N linear input/output,
V vocabulary, Q/G query/KV heads, D head size, B positions a block, E experts, L entries of a latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels import pages
from forerun.kernels.coded import CodedMatrix
from forerun.kernels.draws import PlainTree
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.recurrent_ops import RecurrentOps
from forerun.kernels.tree_growth import NodeRows, TreeNodes, TreeRoom


class HeadLayout(NamedTuple):
    """How a fused qkv row is cut: `num_q` query heads, then `num_kv` key heads, then `num_kv` value heads."""

    num_q: int
    num_kv: int
    head_dim: int
    rotary_dim: int  # the first rotary_dim entries of a head are rotated
    interleaved: bool = False  # rotated pairs are stored as neighbours, else in two halves (the "neox" pairing)

    @property
    def row_size(self) -> int:
        """Entries in one fused qkv row."""
        return (self.num_q + 2 * self.num_kv) * self.head_dim


class LatentLayout(NamedTuple):
    """Heads that all attend over one vector a position: a latent, then the rotated part of the key.

    Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1) in absorbed form: queries are brought into the
    latent space, so that a position's key is the whole vector and its value the latent.
    """

    num_heads: int  # Q
    rank: int  # L: entries of the latent
    rope_dim: int  # entries behind it, which are rotated
    interleaved: bool  # rotated pairs are stored as neighbours, else in two halves

    @property
    def key_dim(self) -> int:
        """Entries of a key, and of a query head."""
        return self.rank + self.rope_dim


class Routing(NamedTuple):
    """How a row chooses its experts from E logits; see `Kernels.route`."""

    num_experts: int  # E
    top_k: int  # experts a row gets
    sigmoid: bool = False  # scores are the logits' sigmoids, else their softmax
    normalize: bool = True  # the chosen scores are divided by their sum
    scale: float = 1.0  # what the weights are multiplied by at the end
    num_groups: int = 1  # equal runs of experts
    top_groups: int = 1  # groups a row may choose from
    smallest_sum: float = 1e-20  # added to the sum that normalizes, which sigmoids may leave at 0


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One attention layer's share of the paged pool.

    Keys lie transposed, so that one load reads the same coordinate of neighbouring positions. A latent pool (see
    `LatentLayout`) has no keys apart: G is 1, `keys` has no entries, and `values` holds the vectors, not as int8.

    An int8 pool keeps a scale for each key and each value vector (one position, one KV head), of its own so that it
    depends on nothing else that is or will be in the pool. A vector x [D] is stored as

        scale = max|x| / 127, or NaN if any coordinate is NaN or infinite   (float32, rounded)
        codes = clamp(round_half_even(x / scale), -127, 127)                (the quotient rounded to float32 first)
        codes = 0 where the scale is 0 or NaN

    and stands for codes * scale. A vector that is not finite therefore becomes NaN as a whole.
    """

    keys: Tensor  # [num_blocks, G, D, B] float32, bfloat16 or int8; [num_blocks, 1, 0, B] of a latent pool
    values: Tensor  # [num_blocks, G, B, D] same dtype
    key_scales: Tensor | None = None  # [num_blocks, G, B] float32 of an int8 pool, else None
    value_scales: Tensor | None = None  # likewise

    def __post_init__(self) -> None:
        num_blocks, num_kv, block_size, head_dim = self.values.shape
        if self.is_latent and (num_kv != 1 or self.is_scaled):
            raise KernelError(f"a latent pool has one head, not {num_kv}, and is float32 or bfloat16")
        head_dim = 0 if self.is_latent else head_dim
        if self.keys.shape != (num_blocks, num_kv, head_dim, block_size) or self.keys.dtype is not self.values.dtype:
            raise KernelError(
                f"keys {self.keys.dtype} {list(self.keys.shape)} do not go with values {self.values.dtype} "
                f"{list(self.values.shape)}: they are [num_blocks, G, D, B] and [num_blocks, G, B, D] of one dtype"
            )
        for scales in (self.key_scales, self.value_scales):
            if (scales is not None) != self.is_scaled:
                raise KernelError(f"an int8 pool has scales, any other has none; this one is {self.keys.dtype}")
            if scales is not None and (scales.dtype, scales.shape) != (torch.float32, (num_blocks, num_kv, block_size)):
                raise KernelError(f"the scales of a pool are float32 [num_blocks, G, B], not {list(scales.shape)}")

    @classmethod
    def zeros(
        cls, num_blocks: int, num_kv: int, head_dim: int, block_size: int, dtype: torch.dtype, latent: bool = False,
        device: torch.device | None = None,
    ) -> LayerKV:  # fmt: skip
        """An empty pool of `dtype`, with scales if it is int8, without keys if it is for latents; None: on the host."""
        on_host = device is None or device.type == "cpu"
        make = pages.zeros if on_host else partial(torch.zeros, device=device)
        scales = (num_blocks, num_kv, block_size) if dtype is torch.int8 else None
        return cls(
            make((num_blocks, num_kv, 0 if latent else head_dim, block_size), dtype=dtype),
            make((num_blocks, num_kv, block_size, head_dim), dtype=dtype),
            None if scales is None else make(scales, dtype=torch.float32),
            None if scales is None else make(scales, dtype=torch.float32),
        )

    @property
    def is_latent(self) -> bool:
        """Whether a position has one vector, whose first entries are its value."""
        return self.keys.shape[2] == 0

    @property
    def is_scaled(self) -> bool:
        """Whether vectors are codes with a scale."""
        return self.keys.dtype is torch.int8

    @property
    def block_size(self) -> int:
        """Positions a block holds."""
        return self.values.shape[2]


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Which keys each row sees.

    Logical row s of sequence b lies at block `block_tables[b, s // B]`, offset `s % B`. Row j sees, in this order,
    logical rows 0 .. prefix_lens[j]-1, then `tree_starts[b] + i` for every set bit i of tree_masks[j], ascending.
    The index in that order is the key's *visible index*; every reduction is laid out by it, never by where the key
    lies, so a tree path gives the bits of the same tokens decoded one by one. A row sees at least itself.
    """

    seq_ids: Tensor  # [M] int32, row -> sequence
    prefix_lens: Tensor  # [M] int32
    tree_masks: Tensor  # [M] int64, 64 bits; 0 for rows outside a tree
    tree_starts: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32
    max_visible: int  # an upper bound of visible keys over all rows (for sizing work space only)


class NoiseKeys(NamedTuple):
    """What a row's Gumbel noise is a function of, besides the token id (see `forerun.speculation.noise`)."""

    seeds: Tensor  # [R] int64 (read as 64 unsigned bits)
    positions: Tensor  # [R] int64: absolute position of the token to be chosen
    streams: Tensor  # [R] int64: which of several samples (`n`), and the purpose


NUM_RIVALS = 8  # how many of a row's best scores (logits / T + noise) tell how sure the best is
RIVALS_SCALE = 0.85  # what these scores are divided by before their softmax


class PackedLinear(Protocol):
    """A weight matrix in the layout its backend reads; opaque to everyone else."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""

    @property
    def nbytes(self) -> int:
        """Bytes the packed weights occupy."""


class PackedHeads(Protocol):
    """A matrix for every head in the layout its backend reads."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(Q, N, K): heads, outputs, inputs."""

    @property
    def nbytes(self) -> int:
        """Bytes the packed matrices occupy."""


class PackedExperts(Protocol):
    """The matrices of all experts of a layer, made ready for `experts`."""

    @property
    def num_experts(self) -> int:
        """E."""


class ExpertBiases(NamedTuple):
    """What a layer's experts add to their products."""

    gate_up: Tensor  # [E, 2F] float32
    down: Tensor  # [E, H] float32


class Kernels(RecurrentOps, Protocol):
    """A backend: every method but `describe` is an op. Chosen once by `kernels.select`, passed through constructors."""

    name: str
    device: torch.device  # where an op's tensors lie; keys and temperatures of noise may come from the host
    reason: str = ""  # why this backend was chosen, for people to read
    float_activations: bool  # True: products with integers do not round activations; set before packing

    def describe(self) -> dict[str, str]:
        """Op name -> where it runs ("reference", "avx2", "avx512", "portable", ...)."""
        return dict.fromkeys(OPS, self.name)

    def pack_linear(self, weight: Tensor) -> PackedLinear:
        """Pack `weight` [N, K] (float32, bfloat16 or float16; float16 is widened exactly) for `linear`."""

    def pack_grouped(self, matrix: GroupedMatrix) -> PackedLinear:
        """Pack small integers with group scales for `linear`: rounding x as `kernels.grouped` says, or as `coded`."""

    def pack_coded(self, matrix: CodedMatrix) -> PackedLinear:
        """Pack codes of floats for `linear`, whose result is that of the float32 matrix, to the bit; or KernelError."""

    def linear(self, x: Tensor, weight: PackedLinear, bias: Tensor | None = None) -> Tensor:
        """x [M, K] times weight transposed, plus bias [N] float32, accumulated in float32 -> [M, N]."""

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear) -> Tensor:
        """Rows `token_ids` [M] int64 of `table` [V, H] (float32 or bfloat16) widened to float32 -> [M, H].

        One packed by `pack_linear` may be a tied output layer's; others give their `dequantize`, exactly.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight [H] float32, of x or of x minus its mean if `centered` -> [M, H]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
        """In place residual += x, then `rms_norm(residual)` -> [M, H]."""

    def scaled(self, x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
        """x [M, N] times `factor`; with cap > 0 then cap * tanh(that / cap), a soft cap -> [M, N]."""

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) * up of rows [gate | up] of 2F entries, of SQUARED_RELU of rows of F -> [M, F]; see ACTIVATIONS."""

    def rope_and_cache(
        self, qkv: Tensor, heads: HeadLayout, rope_table: Tensor, positions: Tensor, slots: Tensor, kv: LayerKV,
        q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        """Normalise (optional, per head, weights [D]) and rotate q and k, then write k and v into the pool.

        qkv [M, row_size] is changed in place (only its q part means something afterwards), neighbours that rotate are
        left in halves. rope_table [max_position, rotary_dim] float32: cosines, then sines. positions [M] int32; slots
        [M] int32 is block * B + offset, pairwise different. kv is written in place; with num_kv = 0 it is not.
        """

    def attention(
        self, qkv: Tensor, heads: HeadLayout, kv: LayerKV, rows: AttentionRows, scale: float, window: int = 0,
        chunk: int = 0, sinks: Tensor | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Softmax attention of the q part of qkv [M, row_size] over each row's visible keys -> [M, Q * D].

        window > 0: only the last `window` visible keys count (the row itself included). window < 0: the first
        -window visible keys do not count (the row itself always does). chunk > 0, without a window: visible keys
        below the last multiple of `chunk` that is not above the row's own visible index do not count.
        sinks [Q] float32: a head's weights are divided by their sum plus e^sink, as if there were one more key of that
        score and without a value; it joins last. Source: gpt-oss; Xiao et al. 2023 (2309.17453).
        cap > 0: scores, `scale` included, become cap * tanh(score / cap); sinks stay.
        The softmax is split every 256 visible keys (aligned to the visible index) and combined in that order.
        In an int8 pool a score is ((q . codes) * key_scale) * scale and a key adds (p * value_scale) * codes to the
        sum of values, p being its weight relative to the split's largest; the weights are summed without value scales.
        """

    def pack_heads(self, weight: Tensor) -> PackedHeads:
        """Pack `weight` [Q, N, K] (float32, bfloat16 or float16; float16 is widened exactly) for `linear_heads`."""

    def linear_heads(self, x: Tensor, weight: PackedHeads) -> Tensor:
        """Every head's first K of K + passed entries in x times its own matrix transposed -> [M, Q * (N + passed)]."""

    def latent_rope_and_cache(
        self, queries: Tensor, latents: Tensor, layout: LatentLayout, rope_table: Tensor, positions: Tensor,
        slots: Tensor, kv: LayerKV, norm: Tensor, eps: float,
    ) -> None:  # fmt: skip
        """Rotate the queries, normalise and rotate the latents, write these into the pool.

        queries [M, Q * key_dim] and latents [M, key_dim] are changed in place: the last rope_dim entries of each head
        and of each latent are rotated (and left as two halves), the first `rank` entries of a latent become their RMS
        norm times `norm` [rank]. rope_table, positions and slots as in `rope_and_cache`; kv is a latent pool.
        """

    def latent_attention(
        self, queries: Tensor, layout: LatentLayout, kv: LayerKV, rows: AttentionRows, scale: float
    ) -> Tensor:
        """Softmax attention of every head over the vectors each row sees in a latent pool -> [M, Q * rank].

        queries [M, Q * key_dim] are multiplied with whole vectors; the first `rank` entries of these are summed up.
        The softmax is split as in `attention`.
        """

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Tensor:
        """logits [M, E] -> the weight of every expert [M, E], 0 for those a row did not choose.

        Scores s are softmax or sigmoid of the logits. A row chooses by c = s + correction [E] (if given): first the
        top_groups groups whose two best c have the largest sum, then the top_k largest c in these, ties to the lower
        index each time. Their weights are s, divided by (their sum + smallest_sum) if `normalize`, times `scale`.
        Source: DeepSeek-V3 (2412.19437) section 2.1.2; with one group and softmax, Mixtral (2401.04088).
        """

    def pack_experts(
        self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: str,
        biases: ExpertBiases | None = None, scales_inputs: bool = False,
    ) -> PackedExperts:  # fmt: skip
        """Get E packed pairs of matrices, [2F, H] (SQUARED_RELU: [F, H]) and [H, F], ready for `experts`, not copied.

        scales_inputs: an expert's weight multiplies what it reads instead of what it gives (Llama 4).
        """

    def experts(self, x: Tensor, weights: Tensor, experts: PackedExperts, base: Tensor | None = None) -> Tensor:
        """base (or 0) plus, over the experts whose weight is not 0, weight * down(gated_act(gate_up(x))) -> [M, H].

        x and base [M, H]; weights [M, E], few of a row other than 0; addends are rounded one by one, experts in order.
        """

    def move_rows(self, kvs: list[LayerKV], sources: Tensor, targets: Tensor) -> None:
        """In every layer copy the KV of slot sources[i] to slot targets[i], in order of i (both [n] int32).

        In place, scales included. A source may be a later target, never an earlier one.
        """

    def gumbel_argmax(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys) -> Tensor:
        """argmax over v of float64(logits[r, v]) / temperature + G(keys[r], v), ties to the lower id -> [R] int64.

        logits [R, V] float32, -inf allowed. temperatures [R] float64; 0 means no noise: argmax(logits).
        A row holding NaN or +inf, or nothing above -inf, gives -1.
        """

    def gumbel_topk(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, k: int) -> tuple[Tensor, Tensor]:
        """The k best of the same scores, best first, ties to the lower id -> ids [R, k] int64, scores [R, k] float64.

        Places with a score of -inf (and whole rows that `gumbel_argmax` answers -1 for) hold id -1.
        """

    def walk_trees(self, logits: Tensor, trees: Sequence[PlainTree]) -> list[tuple[tuple[int, ...], int]]:
        """Follow the tokens that `gumbel_argmax` chooses at the nodes of every tree, until one has no node.

        logits [R, V]. -> each tree's nodes, the root first, and the token chosen after the last of them, which is -1
        where `gumbel_argmax` gives that. Here the host waits for a device.
        """

    def gumbel_chances(
        self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, width: int
    ) -> tuple[Tensor, Tensor]:
        """The ids of `gumbel_topk` and each one's estimated log chance of being accepted -> each [R, width].

        The log softmax of the NUM_RIVALS best scores over RIVALS_SCALE (`forerun.speculation.growth` says why), with
        the same denominator for further scores; -inf beside id -1.
        """

    def grow_trees(
        self, nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, room: TreeRoom, last: NodeRows | None
    ) -> tuple[TreeNodes, NodeRows]:
        """Hang children below the leaves of R trees, keep the likeliest `budgets` [R] nodes, choose the next leaves.

        ids (-1 for none) and log_chances (float64; above 0 counts as 0) [R, leaves, width], best first. Also returns
        the rows of the pass over the next leaves, `width` a tree. `last`: those of the last such pass, if any.
        """

    def keep_trees(self, nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, num_nodes: int) -> Tensor:
        """Hang the last children -> the nodes kept below the root, in the order drawn, [6, R, num_nodes] int64.

        Six each: token; parent (0: root, else its column plus 1); log chance (bits of a float64); place; depth; mask
        of ancestors and self, bit i for column i - 1. Unused columns: -1 four times, then as a child of the root.
        """


OPS = tuple(n for n in (*vars(Kernels), *vars(RecurrentOps)) if n not in ("describe", "reason") and n[0] != "_")
SQUARED_RELU = "squared_relu"  # max(x, 0)^2, without a gate; `reference` says what the others are
ACTIVATIONS = ("silu", "gelu_tanh", "clipped_swiglu", "sigmoid", "silu_within_7", "silu_within_16", SQUARED_RELU)
ATTENTION_SPLIT = 256  # visible keys a split of the softmax covers, in every backend
KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
