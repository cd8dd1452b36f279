"""The reference of a mixture of experts: how a row chooses, and what its experts add up to.

Knows: the arithmetic of `Kernels.route` and `Kernels.experts`, a row at a time. Does not know: layers, storage formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import ExpertBiases, PackedExperts, PackedLinear, Routing

GROUP_VOTES = 2  # best scores of a group that decide about it


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """Pairs of packed matrices, an expert each."""

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    activation: str
    biases: ExpertBiases | None
    scales_inputs: bool

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.gate_up)


def check_routing(routing: Routing, num_logits: int) -> None:
    """Refuse a choice that no row could make."""
    size, rest = divmod(routing.num_experts, routing.num_groups)
    if num_logits != routing.num_experts or rest:
        raise KernelError(
            f"{num_logits} logits for {routing.num_experts} experts in {routing.num_groups} groups: there must be one "
            "for each expert, and groups of one size"
        )
    if not 1 <= routing.top_groups <= routing.num_groups or not 1 <= routing.top_k <= routing.top_groups * size:
        raise KernelError(
            f"{routing.top_k} experts of {routing.top_groups} of {routing.num_groups} groups of {size} cannot be chosen"
        )


def route_row(logits: Tensor, correction: Tensor | None, routing: Routing) -> Tensor:
    """`Kernels.route` for one row: logits [E] -> weights [E]."""
    scores = torch.sigmoid(logits) if routing.sigmoid else torch.softmax(logits, 0)  # [E]
    choice = _within_groups(scores if correction is None else scores + correction, routing)
    chosen = torch.zeros(routing.num_experts, dtype=torch.bool)
    chosen[_largest(choice, routing.top_k)] = True
    weights = torch.where(chosen, scores, 0.0)
    if routing.normalize:
        weights = weights / (weights[chosen].sum() + routing.smallest_sum)
    return weights * routing.scale


def _within_groups(choice: Tensor, routing: Routing) -> Tensor:
    """The scores [E], -inf in the groups that are not chosen."""
    if routing.top_groups == routing.num_groups:
        return choice
    groups = choice.view(routing.num_groups, -1)
    votes = groups.topk(min(GROUP_VOTES, groups.shape[1]), dim=1).values.sum(1)  # [num_groups]
    kept = torch.full_like(groups, -torch.inf)
    best = _largest(votes, routing.top_groups)
    kept[best] = groups[best]
    return kept.view(-1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the largest, ties to the lower index."""
    return values.argsort(descending=True, stable=True)[:count]


def expert_sum(
    row: Tensor, weights: Tensor, base: Tensor, compute: Callable[[int, Tensor], Tensor], scales_inputs: bool
) -> Tensor:  # fmt: skip
    """`Kernels.experts` for one row: base [H] and every chosen expert's output [H], in their order.

    compute(index, row) is an expert's output.
    """
    total = base.clone()
    for index in weights.nonzero()[:, 0].tolist():
        weight = weights[index]
        total += compute(index, weight * row) if scales_inputs else weight * compute(index, row)
    return total


def reference_experts(experts: PackedExperts) -> ReferenceExperts:
    """The experts, if they were packed for the reference."""
    if not isinstance(experts, ReferenceExperts):
        raise KernelError(f"experts packed by {type(experts).__name__} given to the reference kernels")
    return experts
