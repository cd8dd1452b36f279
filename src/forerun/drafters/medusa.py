"""Medusa: heads beside the target's output layer, each of which guesses a token further ahead.

Knows: the state each request's newest token was chosen from, and when that state is outdated. Does not know: layouts of
checkpoints, verification, paging. Without a KV cache and without a state of its own beyond one row a request, there
is nothing to catch up with: where that row is not known (a request's first step, the step after a preemption) the
root stays alone, and the step itself brings the row.

Source: Medusa, arXiv 2401.10774. Trees are grown anew for every step, by what the heads say; the fixed trees that
checkpoints come with are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Observed, Stateless
from forerun.errors import UnsupportedError
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.decoder import Decoder
from forerun.models.medusa_files import holds_medusa
from forerun.models.medusa_heads import MedusaHeads, load_medusa
from forerun.runtime.bind import bind_rows
from forerun.runtime.runner import Drawer
from forerun.speculation.draft import Draft, hand_over
from forerun.speculation.growth import TreeGrower


def build(context: DrafterContext) -> Drafter:
    """The heads the options name, for the target."""
    options, model = context.options, context.model
    assert options.model is not None  # checked by registry.check
    if not isinstance(model, Decoder):
        raise UnsupportedError(
            "Medusa heads read the target's state after its final norm, which a model that runs through transformers "
            "does not give; choose another drafter, or a target of a family that forerun implements"
        )
    heads = load_medusa(options.model, model, context.kernels, options.head_weights)
    state_layer = model.num_layers + 1
    owned = sum(linear.nbytes for linear in heads.linears if linear is not model.parts.lm_head)
    return MedusaDrafter(
        heads, context.kernels, context.grower, state_layer, options.max_draft_tokens, context.width, owned
    )


SPEC = DrafterSpec(
    name="medusa",
    build=build,
    help="heads on the target's last state",
    options=("model", "tree_width", "head_weights"),
    max_draft_tokens=12,
    tree_width=16,  # candidates of heads cost nothing
    model="Medusa heads trained for this model",
    holds_heads=holds_medusa,
    needs_layers=True,
    auto=7,
    vllm_names=("medusa",),
)


class _State(NamedTuple):
    """The target's state that a token was chosen from."""

    position: int  # of that token
    states: Tensor  # [M, H] of a step
    row: int  # of these

    def read(self) -> Tensor:
        """The state [H]."""
        return self.states[self.row]


class MedusaDrafter(Stateless):
    """Drafts with heads; `width` children a node (1: a chain of as many tokens as there are heads)."""

    name = SPEC.name
    runner: Drawer  # once attached

    def __init__(
        self, heads: MedusaHeads, kernels: Kernels, grower: TreeGrower, state_layer: int, max_draft_tokens: int,
        width: int, weight_bytes: int,
    ) -> None:  # fmt: skip
        """`state_layer`: the index of the states after the target's final norm."""
        self.hidden_layers = (state_layer,)
        self.max_nodes = 1 + (max_draft_tokens if width > 1 else min(max_draft_tokens, heads.num_heads))
        self.weight_bytes = weight_bytes
        self._heads = heads
        self._kernels = kernels
        self._grower = grower
        self._width = width
        self._states: dict[str, _State] = {}

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Nothing of it is in the pool."""
        self.runner = bind_rows(self._heads.passes, self._kernels)

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Keep the state of each request's last known row, which the token after it was chosen from."""
        states = hidden[self.hidden_layers[0]]  # [M, H]
        for seen in observed:
            if seen.rows:
                self._states[seen.request.request_id] = _State(seen.request.num_computed, states, seen.rows[-1])

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Keep the boundary state, from which the first token to be computed was chosen."""
        self._states.pop(request.request_id, None)
        if boundary is not None:
            self._states[request.request_id] = _State(request.num_computed, boundary[None], 0)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """One small pass for all requests, and trees of what the heads say."""
        ready = [draft for draft in drafts if draft.num_free > 0 and self._knows(draft.request)]
        if not ready:
            return
        largest_first = sorted(ready, key=lambda draft: -draft.num_free)
        noise = self._grower.noise(largest_first)
        hand_over(largest_first, self.runner.draw((), self._states_of(largest_first), noise, self._width))

    def _states_of(self, drafts: Sequence[Draft]) -> Tensor:
        """[num_drafts, H]."""
        return torch.stack([self._states[draft.request.request_id].read() for draft in drafts])

    def _knows(self, request: Request) -> bool:
        """Whether the root's own state is known, not that of an earlier token."""
        state = self._states.get(request.request_id)
        return state is not None and state.position == request.root_position

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._states.pop(request_id, None)
