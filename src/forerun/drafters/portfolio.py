"""Several drafters at once: their trees grafted into one.

Knows: its members, which nodes of a shared tree came from whom. Does not know: who should draft, and how much; a
guide (the engine's policy) tells for each request and member. Members are asked in their order, so that the guide of
a later one sees what the earlier ones found.

Under the rejection rule a node's children must come from one recorded distribution, so there a request takes the
first tree that has any drafts; which member that is depends on the text alone, never on what was drawn.

A member may leave its drafts on a device (`speculation.late`) where nobody else would look at them: they are the first
of their requests, and no member behind it could be asked for these. So a portfolio of one passes lateness on, and of
several the last, in steps in which the others found nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Observed, logits_reader
from forerun.drafters.registry import build_drafter, spec_of
from forerun.kernels.ops import LayerKV
from forerun.speculation.growth import Draft, Part
from forerun.speculation.late import late_of


def build_portfolio(context: DrafterContext) -> Portfolio:
    """The members of `context.options`, or the one drafter it names, under a guide; raises whatever they raise."""
    options = context.options
    contexts = [replace(context, spec=spec_of(each.name), options=each) for each in options.members or (options,)]
    members = [build_drafter(each) for each in contexts]
    return Portfolio(members, options.name, options.max_draft_tokens + 1, context.grower.coupled)


SPEC = DrafterSpec(
    name="portfolio",
    build=build_portfolio,
    help="several of these",
    options=("members",),
    max_draft_tokens=16,
)


class Guide(Protocol):
    """Decides which member drafts for whom, and learns what that cost."""

    def quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        """Nodes, the root included, the member may draft for each request; 1: it is not asked."""

    def least_chance(self, member: str) -> float:
        """See `Draft.least`."""

    def log_survival(self, part: Part, draft: Draft) -> list[float]:
        """Log chance of each node of a member's tree, from its own estimates and how those fared."""

    def learn_member_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """The member took this long for these drafts of its own."""

    def learn_late_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """The member was given work for so long, for these drafts, which were read with the target's choices.

        What a device took to draw them is in the time of the pass.
        """


class Everyone:
    """The guide without a policy: every member drafts as much as there is room for, and is believed."""

    def quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        """All the room."""
        return [draft.num_free + 1 for draft in drafts]

    def least_chance(self, member: str) -> float:
        """Every level is drawn."""
        return 0.0

    def log_survival(self, part: Part, draft: Draft) -> list[float]:
        """The member's own estimates."""
        return list(part.survival)

    def learn_member_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """Nothing to learn."""

    def learn_late_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """Nothing to learn."""


class Portfolio:
    """Holds several drafters and grafts their trees. With one member it is that drafter under a guide."""

    def __init__(self, members: Sequence[Drafter], name: str, max_nodes: int, coupled: bool) -> None:
        """`coupled`: trees of several members may share a root."""
        assert members
        self.name = name
        self.members = tuple(members)
        self.max_nodes = max_nodes
        self.hidden_layers = tuple(sorted({layer for member in members for layer in member.hidden_layers}))
        self.kv_specs = tuple(spec for member in members for spec in member.kv_specs)
        self.weight_bytes = sum(member.weight_bytes for member in members)
        self._readers = [reader for member in members if (reader := logits_reader(member)) is not None]
        self.wants_logits = bool(self._readers)
        self.guide: Guide = Everyone()
        self._coupled = coupled
        self._drafts: dict[str, Draft] = {}  # of the current step

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Hand every member its share of the pool."""
        start = 0
        for member in self.members:
            end = start + len(member.kv_specs)
            member.attach(target, own[start:end])
            start = end

    def begin(self, request: Request) -> None:
        """Tell every member."""
        for member in self.members:
            member.begin(request)

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Tell every member which of the accepted nodes were its own, in its own numbers."""
        for member in self.members:
            own = [self._as_seen_by(member, seen) for seen in observed] if self._drafts else observed
            member.observe(own, hidden)
        self._drafts.clear()

    def _as_seen_by(self, member: Drafter, seen: Observed) -> Observed:
        if len(seen.nodes) <= 1:
            return seen  # nothing drafted was accepted
        draft = self._drafts.get(seen.request.request_id)
        if draft is None:
            return replace(seen, num_own=1)
        sources, births = draft.tree.sources, draft.births
        own = takewhile(lambda node: node == 0 or (sources[node] == member.name and births[node] == node), seen.nodes)
        return replace(seen, num_own=sum(1 for _ in own))

    def observe_logits(self, token_ids: Tensor, logits: Tensor) -> None:
        """Show them to the members that want to see them."""
        for reader in self._readers:
            reader.observe_logits(token_ids, logits)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Ask the members one after the other, as far as the guide allows, and graft what they give."""
        self._drafts = {draft.request.request_id: draft for draft in drafts}
        for member in self.members:
            self._ask(member, drafts)

    def _ask(self, member: Drafter, drafts: Sequence[Draft]) -> None:
        open_ones = [draft for draft in drafts if self._is_open(member, draft)]
        if not open_ones:
            return
        start = perf_counter()
        quotas = self.guide.quotas(member.name, open_ones)
        wanted = [(draft, min(n, member.max_nodes)) for draft, n in zip(open_ones, quotas, strict=True) if n > 1]
        if not wanted:
            return
        may_be_late = self._may_be_late(member, [draft for draft, _ in wanted])
        least = self.guide.least_chance(member.name)
        own = [Draft(draft.request, size, least=least, may_be_late=may_be_late) for draft, size in wanted]
        member.propose(own)
        pairs = [(draft, proposed) for (draft, _), proposed in zip(wanted, own, strict=True)]
        waiting = late_of(own)
        if waiting is None:
            self._graft(member, pairs)
            self.guide.learn_member_cost(member.name, perf_counter() - start, own)
        else:
            take = partial(self._take_late, member, pairs, perf_counter() - start)
            waiting.hand_on([pair for pair in pairs if pair[1].late], take)

    def _may_be_late(self, member: Drafter, drafts: Sequence[Draft]) -> bool:
        """Whether nobody will look at its drafts before they are verified; a step waits for one member's at most."""
        behind = self.members[self.members.index(member) + 1 :]
        is_last = not any(self._is_open(other, draft) for other in behind for draft in drafts)
        is_first = all(draft.may_be_late and len(draft.tree) == 1 for draft in drafts)
        return is_last and is_first and late_of(list(self._drafts.values())) is None

    def _is_open(self, member: Drafter, draft: Draft) -> bool:
        """The request wants this member, and its tree may still take drafts."""
        only, failed = draft.request.drafter, member.name in draft.request.failed_drafters
        exclusive = not self._coupled and draft.request.params.temperature > 0.0 and len(draft.tree) > 1
        return draft.num_free > 0 and (only is None or only == member.name) and not exclusive and not failed

    def _graft(self, member: Drafter, pairs: Sequence[tuple[Draft, Draft]]) -> None:
        """Add what the member proposed to each of the step's drafts."""
        for draft, proposed in pairs:
            draft.num_caught_up += proposed.num_caught_up
            part = Part(member.name, proposed.tree, tuple(proposed.survival))
            draft.graft(part, self.guide.log_survival(part, draft))

    def _take_late(self, member: Drafter, pairs: Sequence[tuple[Draft, Draft]], seconds: float) -> None:
        """The same when the member's trees are known at last; to enqueue them took so long."""
        self._graft(member, pairs)
        self.guide.learn_late_cost(member.name, seconds, [proposed for _, proposed in pairs])

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """The members' numbers, one after the other."""
        return tuple(position for member in self.members for position in member.num_ready(request))

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Tell every member what was said of its own KV, and the states it asked for."""
        start = 0
        for member in self.members:
            end = start + len(member.num_ready(request))
            member.resume(request, num_ready[start:end], self._own_states(member, boundary))
            start = end

    def _own_states(self, member: Drafter, boundary: Tensor | None) -> Tensor | None:
        """Those of the boundary's states, all of one width, that the member asked for."""
        if boundary is None or not member.hidden_layers:
            return None
        width = boundary.shape[-1] // len(self.hidden_layers)
        places = [self.hidden_layers.index(layer) for layer in member.hidden_layers]
        return torch.cat([boundary[..., place * width : (place + 1) * width] for place in places], dim=-1)

    def end(self, request_id: str) -> None:
        """Tell every member."""
        self._drafts.pop(request_id, None)
        for member in self.members:
            member.end(request_id)
