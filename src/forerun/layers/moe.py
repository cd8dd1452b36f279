"""A mixture of experts: each row is computed by a few of many feed-forward layers.

Knows: the router, the experts and an expert for all rows, that each rank may have some rows of every expert, and that
adapters may add to a lone one. Does not know: how matrices are stored, which layers of a model are mixtures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.kernels.ops import ExpertBiases, Kernels, PackedExperts, Routing
from forerun.kernels.ranks import ALONE, Ranks
from forerun.layers.linear import Linear
from forerun.layers.lora import ADAPTED
from forerun.layers.mlp import GatedMLP
from forerun.layers.norm import RMSNorm


class SharedExpert(Protocol):
    """What is computed for every row beside its experts."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix."""

    def bytes_read(self, num_rows: int) -> int:
        """Bytes of matrices that a pass over `num_rows` rows reads at most."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, H]."""


class LatentSpace(NamedTuple):
    """The way into the space that experts compute in, and out of it, where it is not that of the stream."""

    down: Linear  # [L, H]
    up: Linear  # [H, L]


class MixtureOfExperts:
    """shared(x) + the sum of weight * expert(x) over the experts a row chose, in the order of their indices.

    Which experts a row gets, and the order of the sum, are functions of the row alone.
    """

    def __init__(
        self, kernels: Kernels, routing: Routing, router: Linear, experts: Sequence[GatedMLP],
        correction: Tensor | None = None, shared: SharedExpert | None = None, scales_inputs: bool = False,
        factors: Tensor | None = None, num_zero: int = 0, latent: LatentSpace | None = None, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        """`router` [E, H]; `correction` [E] float32 is added to the scores that experts are chosen by.

        scales_inputs: see `Kernels.pack_experts`. factors [E]: what the experts' weights are multiplied by. num_zero:
        how many of the E, the last ones, give back what they read; no recorder can write them down. latent: what
        experts read is brought there, their sum back; router and `shared` read x. ranks: the experts' matrices are the
        shares of this one of inner entries and of outputs; all others are whole.
        """
        assert len(experts) == routing.num_experts - num_zero, (len(experts), routing)
        self._kernels = kernels
        self.routing = routing
        self.router = router
        self.experts = tuple(experts)
        self.correction = correction
        self.shared = shared
        self._scales_inputs = scales_inputs
        self.factors = factors
        self.latent = latent
        self._diagonal = None if factors is None else kernels.pack_linear(torch.diag(factors))
        ones = torch.ones(1, num_zero, device=kernels.device)
        self._total = kernels.pack_linear(ones) if num_zero else None
        self._ranks = ranks
        self._packed = _pack(kernels, self.experts, scales_inputs) if ranks.size == 1 else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix of the layer."""
        experts = (linear for expert in self.experts for linear in expert.linears)
        return (self.router, *(self.latent or ()), *experts, *(() if self.shared is None else self.shared.linears))

    def bytes_read(self, num_rows: int) -> int:
        """Bytes of matrices that a pass over `num_rows` rows reads at most: no row chooses what another did."""
        chosen = min(num_rows * self.routing.top_k, len(self.experts))
        largest = max(expert.bytes_read(num_rows) for expert in self.experts)
        shared = 0 if self.shared is None else self.shared.bytes_read(num_rows)
        around = sum(linear.nbytes for linear in self.latent or ())
        return self.router.nbytes + around + chosen * largest + shared

    def __call__(self, x: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """x [M, H] -> [M, H]; `routed_by` [M, H] is what the router reads, if not x."""
        scores = self.router(x if routed_by is None else routed_by)  # [M, E]
        weights = self._kernels.route(scores, self.correction, self.routing)  # [M, E]
        weights = weights if self._diagonal is None else self._kernels.linear(weights, self._diagonal)
        base = None if self.shared is None else self.shared(x)  # [M, H]
        if self._total is not None:
            given = self._kernels.linear(weights[:, len(self.experts) :].contiguous(), self._total) * x  # [M, H]
            base, weights = given if base is None else base + given, weights[:, : len(self.experts)].contiguous()
        if self.latent is None:
            return self._sum(x, weights, base)
        out = self.latent.up(self._sum(self.latent.down(x), weights, None))
        return out if base is None else out + base

    def _sum(self, x: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
        """base, or 0, plus what the experts make of x."""
        if self._ranks.size > 1:
            return self._on_ranks(x, weights, base)
        if self._packed is None or self._is_adapted:
            return self._one_by_one(x, weights, base)
        return self._kernels.experts(x, weights, self._packed, base)

    @property
    def _is_adapted(self) -> bool:
        """Whether an adapter of the pass adds to a lone expert, a shared one behind a gate."""
        linears = self.experts[0].linears if len(self.experts) == 1 else ()
        return any(linear in adapted.updates for adapted in ADAPTED.get() for linear in linears)

    def _rows(self, weights: Tensor, index: int) -> Tensor:
        """Those that chose an expert; all of them for a lone one, since adapters know passes of whole batches."""
        if len(self.experts) == 1:
            return torch.arange(weights.shape[0], device=weights.device)
        return weights[:, index].nonzero()[:, 0]

    def _one_by_one(self, x: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
        """`Kernels.experts`, with its bits, for adapted matrices and those that are several; no recorder takes it."""
        out = torch.zeros_like(x) if base is None else base  # [M, H]
        for index in weights.any(dim=0).nonzero()[:, 0].tolist():
            rows = self._rows(weights, index)
            given, expert = weights[rows, index, None], self.experts[index]
            out[rows] += expert(given * x[rows]) if self._scales_inputs else given * expert(x[rows])
        return out

    def _on_ranks(self, x: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
        """The same sum by several ranks: inner entries of all experts are gathered at once, then the sums' columns.

        A column is added up by one rank, over the experts in their order.
        """
        ranks, pairs = self._ranks, list[tuple[GatedMLP, Tensor, Tensor]]()
        for index in weights.any(dim=0).nonzero()[:, 0].tolist():
            rows = self._rows(weights, index)
            pairs.append((self.experts[index], rows, weights[rows, index, None]))
        read = [given * x[rows] if self._scales_inputs else x[rows] for _, rows, given in pairs]
        inner = [expert.inner(part) for (expert, *_), part in zip(pairs, read, strict=True)]
        size, width = self.experts[0].down.weight.shape[1], x.shape[1]
        own = ranks.share(width)
        out = x.new_zeros(x.shape[0], own.stop - own.start) if base is None else base[:, own].contiguous()
        if inner:
            gathered = ranks.gather(torch.cat(inner), ranks.shares(size))
            parts = gathered.split_with_sizes([len(part) for part in inner])
            for (expert, rows, given), part in zip(pairs, parts, strict=True):
                out[rows] += expert.down(part) if self._scales_inputs else given * expert.down(part)
        return ranks.gather(out, ranks.shares(width))


@dataclass(frozen=True, slots=True)
class NormsBesideDense:
    """The norms of experts and of the dense part beside them."""

    before_dense: RMSNorm
    after_dense: RMSNorm
    router: RMSNorm
    before_experts: RMSNorm
    after_experts: RMSNorm


@dataclass(frozen=True, slots=True)
class ExpertsBesideDense:
    """A dense part plus experts, each between norms of its own (Gemma 4)."""

    dense: GatedMLP
    experts: MixtureOfExperts
    norms: NormsBesideDense

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix of the layer."""
        return (*self.dense.linears, *self.experts.linears)

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """The weights of the norms, and the experts' factors."""
        norms = self.norms
        inside = (norms.before_dense, norms.after_dense, norms.router, norms.before_experts, norms.after_experts)
        factors = () if self.experts.factors is None else (self.experts.factors,)
        return (*(norm.weight for norm in inside), *factors)

    def bytes_read(self, num_rows: int) -> int:
        """Bytes of matrices that a pass over `num_rows` rows reads at most."""
        return self.dense.bytes_read(num_rows) + self.experts.bytes_read(num_rows)

    def __call__(self, x: Tensor) -> Tensor:
        """The stream x [M, H] -> [M, H]."""
        norms = self.norms
        dense = norms.after_dense(self.dense(norms.before_dense(x)))
        routed = self.experts(norms.before_experts(x), norms.router(x))
        return norms.after_experts(routed).add_(dense)


def _pack(kernels: Kernels, experts: Sequence[GatedMLP], scales_inputs: bool) -> PackedExperts | None:
    """All experts as the kernels take them; None where a matrix is not one packed matrix."""
    gate_up = [expert.gate_up.weight.packed for expert in experts]
    down = [expert.down.weight.packed for expert in experts]
    given_up, given_down = [w for w in gate_up if w is not None], [w for w in down if w is not None]
    if len(given_up) < len(experts) or len(given_down) < len(experts):
        return None
    return kernels.pack_experts(given_up, given_down, experts[0].activation, _biases(experts), scales_inputs)


def _biases(experts: Sequence[GatedMLP]) -> ExpertBiases | None:
    gate_up = [expert.gate_up.bias for expert in experts if expert.gate_up.bias is not None]
    down = [expert.down.bias for expert in experts if expert.down.bias is not None]
    return ExpertBiases(torch.stack(gate_up), torch.stack(down)) if gate_up and down else None
