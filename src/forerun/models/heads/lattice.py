"""LiLiCorr: how well each of a slot's best tokens follows each of the slot before, all of a block's at once.

Knows: the tensors' names, the arithmetic. Does not know: the layers below, trees.

A candidate is one of a slot's best tokens by their logits: x = P e + S h + F f + s_slot + r_rank, of the token's
embedding e, the slot's hidden state h, and f = (log q, q, log q - that of the best, rank / (ranks - 1), whether it is
the best), normed. All candidates of the block see each other (layers of attention, with a bias for the distance between
slots, and silu), then each makes two unit vectors, `out` and `in`, with the context a = norm(C c) of the last known
token: silu(J [y, a, y * a]) through two matrices; the root has an `out` alone, of a. Score of b behind a: scale *
<out_a, in_b>, in place of the logits.
Sources: LiLiCorr (arXiv 2608.20530); sglang models/lilicorr, pull request 37462; vLLM models/qwen3_lilicorr.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from forerun.errors import CheckpointError, UnsupportedError
from forerun.layers.embedding import Embedding
from forerun.models.base import GuessedBlocks, PassOutput, SlotLogits
from forerun.models.fields import Fields
from forerun.models.heads.reading import HeadReader

MODULE = "lilicorr"
NUM_FEATURES = 5  # f above
LAYER_NORM_EPS = 1e-5  # torch's
MAX_VECTOR_EPS = 0.5  # the published programs refuse this and more


class Affine(NamedTuple):
    """x -> x W^T + b; matrices here are small, and some have five inputs."""

    weight: Tensor  # [N, K] float32
    bias: Tensor  # [N]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return functional.linear(x, self.weight, self.bias)


class LatticeLayer(NamedTuple):
    """Attention among a block's candidates, then silu between two matrices."""

    attention_norm: Tensor  # [H']
    qkv: Affine  # [3 H', H']
    out: Affine
    mlp_norm: Tensor
    up: Affine  # [F, H']
    down: Affine

    def __call__(self, x: Tensor, bias: Tensor, eps: float) -> Tensor:
        """x [R, candidates, H'], bias [heads, candidates, candidates] -> [R, candidates, H']."""
        made = self.qkv(_normed(x, self.attention_norm, eps)).view(*x.shape[:2], 3, len(bias), -1)
        q, k, v = made.permute(2, 0, 3, 1, 4)  # each [R, heads, candidates, D]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(_normed(x, self.mlp_norm, eps))))


class LatticeTables(NamedTuple):
    """What depends on a candidate's place alone."""

    slots: Tensor  # [slots, H']
    ranks: Tensor  # [ranks, H']
    distances: Tensor  # [heads, 2 slots + 1]: the bias by the slots between
    same_slot: Tensor  # [heads]: added to it within a slot


class EdgeVectors(NamedTuple):
    """How candidates and the root become unit vectors."""

    output_norm: Tensor  # [H']
    context_norm: Tensor  # [H']
    context: Affine  # C
    join: Affine  # J [H', 3 H']
    leaving: Affine  # [vector, H']
    entering: Affine
    root: Affine


@dataclass(frozen=True, slots=True)
class Lattice:
    """Implements `models.base.SlotOrder`."""

    num_candidates: int
    scale: float
    eps: float  # of norms
    vector_eps: float  # least length of vectors
    embedding: Embedding  # the head's own, or the target's
    fuse: Callable[[Tensor], Tensor]  # the target's states of a token -> c, see `heads.head.Fusion`
    token: Affine | None  # P; None: the identity
    hidden: Affine  # S
    features: tuple[Affine, Affine, Affine]  # F: the norm's weight and bias, then two matrices with silu between
    tables: LatticeTables
    layers: tuple[LatticeLayer, ...]
    edges: EdgeVectors

    reads_before: ClassVar[bool] = True

    @property
    def nbytes(self) -> int:
        """Bytes of matrices and tables."""
        parts = (self.token or (), self.hidden, *self.features, self.tables, *self.layers, self.edges)
        return sum(_nbytes(part) for part in parts)

    @torch.no_grad()
    def __call__(self, blocks: GuessedBlocks) -> SlotLogits:
        """See `models.base.SlotOrder`; slots hand on nothing: the token above names the candidate."""
        best = blocks.logits.topk(self.num_candidates, dim=-1).indices  # [R, depths, ranks]
        begins, pairs = self._scores(blocks, best)

        @torch.no_grad()
        def logits_of(chosen: Tensor, depth: int, above: Tensor, given: Tensor | None) -> PassOutput:
            if depth == 0:
                scores = begins[chosen]
            else:
                rank = (best[chosen, depth - 1] == above[:, None]).int().argmax(1)
                scores = pairs[chosen, depth - 1, rank]
            wide = scores.new_full((len(chosen), blocks.logits.shape[2]), -torch.inf)
            return PassOutput(wide.scatter_(1, best[chosen, depth], scores))

        return logits_of

    def _scores(self, blocks: GuessedBlocks, best: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the first slot's candidates [R, ranks] and of each behind each [R, depths - 1, ranks, ranks]."""
        assert blocks.features is not None
        edges, (num, depths, ranks) = self.edges, best.shape
        x = self._entered(blocks, best).flatten(1, 2)  # [R, candidates, H']
        bias = self._bias(depths, ranks)
        for layer in self.layers:
            x = layer(x, bias, self.eps)
        x = _normed(x, edges.output_norm, self.eps)
        context = _normed(edges.context(self.fuse(blocks.features)), edges.context_norm, self.eps)  # [R, H']
        beside = context[:, None].expand_as(x)
        joined = functional.silu(edges.join(torch.cat([x, beside, x * beside], dim=2)))
        leaving, entering = (
            self._unit(affine(joined)).view(num, depths, ranks, -1) for affine in (edges.leaving, edges.entering)
        )
        begins = (entering[:, 0] @ self._unit(edges.root(context))[:, :, None])[..., 0]
        return self.scale * begins, self.scale * (leaving[:, :-1] @ entering[:, 1:].mT)

    def _entered(self, blocks: GuessedBlocks, best: Tensor) -> Tensor:
        """x above [R, depths, ranks, H']."""
        num, depths, ranks = best.shape
        log_q = blocks.logits.log_softmax(-1).gather(-1, best)
        places = torch.arange(ranks, device=best.device).expand_as(best)
        seen = (log_q, log_q.exp(), log_q - log_q[..., :1], places / max(ranks - 1, 1), (places == 0).float())
        norm, inner, outer = self.features
        feature = functional.layer_norm(torch.stack(seen, dim=-1), (NUM_FEATURES,), *norm, LAYER_NORM_EPS)
        embedded = self.embedding(best.flatten()).view(num, depths, ranks, -1)
        token = embedded if self.token is None else self.token(embedded)
        slot = self.hidden(blocks.states[:, blocks.first_slot :]) + self.tables.slots[:depths]
        return token + outer(functional.silu(inner(feature))) + slot[:, :, None] + self.tables.ranks

    def _bias(self, depths: int, ranks: int) -> Tensor:
        """What is added to attention scores of a block's candidates [heads, candidates, candidates]."""
        slots = torch.arange(depths, device=self.tables.distances.device).repeat_interleave(ranks)
        apart = slots[:, None] - slots
        zero = self.tables.distances.shape[1] // 2
        return self.tables.distances[:, apart + zero] + (apart == 0) * self.tables.same_slot[:, None, None]

    def _unit(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1, eps=self.vector_eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _nbytes(part: Tensor | tuple[object, ...]) -> int:
    if isinstance(part, Tensor):
        return part.nbytes
    return sum(_nbytes(inner) for inner in part if isinstance(inner, Tensor | tuple))


def read_lattice(reader: HeadReader, fields: Fields, embedding: Embedding, fuse: Callable[[Tensor], Tensor]) -> Lattice:
    """The head in a checkpoint, over the table its blocks read; raises CheckpointError and UnsupportedError."""
    return _LatticeReader(reader, fields, embedding).lattice(fuse)


class _LatticeReader:
    """Reads one head."""

    def __init__(self, reader: HeadReader, fields: Fields, embedding: Embedding) -> None:
        self._reader, self._fields, self._embedding = reader, fields, embedding
        size = fields.integer(f"{MODULE}_hidden_size", minimum=0)  # 0: as wide as the layers below
        self._size = size or reader.hidden_size
        self._heads = fields.integer(f"{MODULE}_num_heads")
        if self._size % self._heads or not fields.flag(f"{MODULE}_enabled", default=True):
            raise CheckpointError(
                f"{reader.source.folder}: lilicorr_num_heads {self._heads} in config.json must divide "
                f"lilicorr_hidden_size {self._size}, and lilicorr_enabled be true; copy the file again"
            )
        self._scale, self._vector_eps = fields.number(f"{MODULE}_logit_scale"), fields.number(f"{MODULE}_vector_eps")
        if not self._scale or not 0 < self._vector_eps < MAX_VECTOR_EPS:
            raise CheckpointError(
                f"{reader.source.folder}: lilicorr_logit_scale {self._scale:g} in config.json must not be 0, and "
                f"lilicorr_vector_eps {self._vector_eps:g} lie between 0 and {MAX_VECTOR_EPS}; copy the file again"
            )
        for name in ("is_causal", "causal"):
            if fields.flag(name):
                raise UnsupportedError(
                    f"{reader.source.folder}: {name} in config.json of a LiLiCorr head; supported are heads whose "
                    "slots see their whole block"
                )
        if embedding.scale != 1.0:
            raise UnsupportedError(
                f"{reader.source.folder} holds a LiLiCorr head, and this target multiplies its embeddings with "
                f"{embedding.scale:g}: whether such heads read them so is not published; choose another head"
            )

    def lattice(self, fuse: Callable[[Tensor], Tensor]) -> Lattice:
        """The head."""
        fields, size, wide = self._fields, self._size, self._reader.hidden_size
        ranks = fields.integer(f"{MODULE}_candidate_topk", maximum=self._reader.target.vocab_size)
        slots, vector = fields.integer("block_size") - 1, fields.integer(f"{MODULE}_factor_dim")
        tables = LatticeTables(
            self._tensor("slot_embedding", 1, 1, slots, 1, size).view(slots, size),
            self._tensor("rank_embedding", 1, 1, 1, ranks, size).view(ranks, size),
            self._tensor("relative_slot_bias", self._heads, 2 * slots + 1),
            self._tensor("same_slot_bias", self._heads),
        )
        edges = EdgeVectors(
            self._tensor("output_norm.weight", size),
            self._tensor("anchor_norm.weight", size),
            self._affine("context_proj", size, wide),
            self._affine("factor_input_proj", size, 3 * size),
            *(self._affine(f"{name}_head", vector, size) for name in ("out", "in", "anchor_out")),
        )
        norm = Affine(
            self._tensor("feature_mlp.0.weight", NUM_FEATURES), self._tensor("feature_mlp.0.bias", NUM_FEATURES)
        )
        return Lattice(
            num_candidates=ranks,
            scale=self._scale,
            eps=self._reader.config.norm_eps,
            vector_eps=self._vector_eps,
            embedding=self._embedding,
            fuse=fuse,
            token=None if size == wide else self._affine("token_proj", size, wide),
            hidden=self._affine("pass_hidden_proj", size, wide),
            features=(
                norm, self._affine("feature_mlp.1", size, NUM_FEATURES), self._affine("feature_mlp.3", size, size),
            ),
            tables=tables,
            layers=tuple(self._layer(index) for index in range(fields.integer(f"{MODULE}_num_layers"))),
            edges=edges,
        )  # fmt: skip

    def _layer(self, index: int) -> LatticeLayer:
        size, prefix = self._size, f"layers.{index}"
        inner = int(size * self._fields.number(f"{MODULE}_mlp_ratio"))
        attention = f"{prefix}.attn.in_proj_"
        return LatticeLayer(
            self._tensor(f"{prefix}.attn_norm.weight", size),
            Affine(self._tensor(f"{attention}weight", 3 * size, size), self._tensor(f"{attention}bias", 3 * size)),
            self._affine(f"{prefix}.attn.out_proj", size, size),
            self._tensor(f"{prefix}.mlp_norm.weight", size),
            self._affine(f"{prefix}.mlp.0", inner, size),
            self._affine(f"{prefix}.mlp.2", size, inner),
        )

    def _affine(self, module: str, rows: int, columns: int) -> Affine:
        return Affine(self._tensor(f"{module}.weight", rows, columns), self._tensor(f"{module}.bias", rows))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        stored = self._reader.source.tensor(f"{MODULE}.{name}", shape)
        return stored.float().to(self._reader.target.device)
