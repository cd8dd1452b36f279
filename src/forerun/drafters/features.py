"""Drafting from the target's hidden states: what EAGLE heads and MTP modules share.

Knows: how far a head follows each request, the states it has still to read, how trees grow level by level. Does not
know: layouts, verification, who wrote the head.

**Which row lies where.** The head's row of position j reads the token there and the target's state of the token
before: it depends on tokens up to j, so blocks of its KV can be shared by their prefix. It was trained to stand at
position j - 1, that of the state. Position 0 has no row.

**Catch up, then draft.** Rows of known tokens are computed from the target's true states: those that complete a block
at once, so that what is published of a block is valid, the others when next asked to draft. While drafting the head is
fed its own output; those rows are computed again once the tokens are known.

**Trees** grow as in EAGLE-2 (arXiv 2406.16858): a level expands the `width` likeliest of its new nodes, and of all
nodes ever drawn the likeliest are kept. Under the rejection rule likelihood goes by rank alone (see `growth`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import DrafterContext, Observed
from forerun.kernels.ops import LayerKV
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.heads.head import DraftHead, HeadOutput
from forerun.speculation.growth import Draft, Leaf
from forerun.speculation.tree import ROOT, DraftTree

EAGER_LAG = 16  # known rows that are computed at once even where no block is complete


@dataclass(slots=True)
class Follow:
    """How far the head follows a request: rows below `num_ready` are computed from true states.

    `states` [n, W] are the target's, of the tokens from position `first` on; the row of position j needs that of
    j - 1. They begin later than needed where somebody else computed the tokens between; then there is nothing to do.
    """

    num_ready: int
    first: int
    states: Tensor

    def add(self, start: int, states: Tensor) -> None:
        """States of the tokens from position `start` on; what was known from there on is replaced."""
        if self.first <= start <= self.first + len(self.states) and len(self.states):
            self.states = torch.cat([self.states[: start - self.first], states])
        else:
            self.first, self.states = start, states

    def reaches(self, end: int) -> bool:
        """Whether all rows from `num_ready`, or from the last, up to `end` can be computed."""
        start = min(self.num_ready, end - 1)
        return start - 1 >= self.first and end - 1 <= self.first + len(self.states)

    def take(self, start: int, end: int) -> Tensor:
        """The states the rows start .. end-1 need -> [end - start, W]."""
        return self.states[start - 1 - self.first : end - 1 - self.first]

    def advance(self, end: int) -> None:
        """Rows below `end` are computed; only what the last of them read may be needed again."""
        self.num_ready = end
        done = end - 2 - self.first
        if done > 0:
            self.first, self.states = self.first + done, self.states[done:].clone()


class Growth:
    """One request's tree while it grows, larger than what is kept of it in the end."""

    def __init__(self, draft: Draft, width: int) -> None:
        self.draft = draft
        self.scratch = _scratch(draft, width)
        self.places = {ROOT: 0}  # node -> row behind the root where the head's KV of it lies
        self._budget = draft.num_free
        self._width = width

    def next_leaves(self, new: Sequence[int]) -> list[int]:
        """Which of the nodes just drawn to expand: those whose children may be among the kept."""
        kept = self._kept()
        survival, is_full = self.scratch.survival, len(kept) == self._budget
        worst = min((survival[node] for node in kept), default=0.0)
        useful = [node for node in new if node in kept and (not is_full or survival[node] > worst)]
        leaves = sorted(useful, key=lambda node: -survival[node])[: self._width]
        self._place(leaves, kept)
        return sorted(leaves, key=self.places.__getitem__)

    def _kept(self) -> set[int]:
        """The likeliest nodes; every one comes with its parent, since no child is likelier and parents come first."""
        survival = self.scratch.survival
        order = sorted(range(1, len(self.scratch.tree)), key=lambda node: (-survival[node], node))
        return set(order[: self._budget])

    def _place(self, leaves: Sequence[int], kept: set[int]) -> None:
        """Give leaves rows of their own; those of nodes that are not kept are free again."""
        self.places = {node: place for node, place in self.places.items() if node == ROOT or node in kept}
        taken = set(self.places.values())
        free = (place for place in range(self._budget + 1) if place not in taken)
        self.places.update(zip(leaves, free, strict=False))

    def rows(self, nodes: Sequence[int], start: int) -> SequenceRows:
        """Known tokens from `start` on, then these nodes."""
        request, tree = self.draft.request, self.scratch.tree
        return SequenceRows(
            request_id=request.request_id,
            block_table=request.block_ids,
            start=start,
            span=request.token_ids[start : request.root_position],
            tree_start=request.root_position,
            tree_tokens=[tree.tokens[node] for node in nodes],
            tree_rows=[self.places[node] for node in nodes],
            tree_masks=[sum(1 << self.places[i] for i in tree.path(node)) for node in nodes],
            tree_depths=[tree.depths[node] for node in nodes],
        )

    def finish(self) -> None:
        """Hand the kept nodes over, in the order they were drawn, with what they were drawn from."""
        tree, here = self.scratch.tree, {ROOT: ROOT}
        for node in sorted(self._kept()):
            parent = here[tree.parents[node]]
            here[node] = self.draft.add(parent, tree.tokens[node], self.scratch.survival[node], tree.sources[node])
        for node, place in here.items():
            if self.draft.tree.children(place):
                self.draft.tree.adopt_proposal(place, tree.proposal(node))


def _scratch(draft: Draft, width: int) -> Draft:
    """A draft of the same request with room for everything that is drawn: `width` leaves a level, at most as many
    levels as nodes are kept."""
    room = 1 + width + width * width * draft.num_free
    scratch = Draft(draft.request, room)
    scratch.tree = DraftTree(draft.request.token_ids[-1], room)
    return scratch


class FeatureDrafter:
    """Drafts with a head; `width` children a node (1: a chain)."""

    def __init__(self, head: DraftHead, name: str, context: DrafterContext) -> None:
        options = context.options
        self.name = name
        self.max_nodes = options.max_draft_tokens + 1
        self.hidden_layers = head.hidden_layers
        self.kv_specs = head.kv_specs
        self.weight_bytes = head.weight_bytes
        self._head = head
        self._grower = context.grower
        self._block_size = context.block_size
        self._width = options.tree_width
        self._max_rows = context.max_rows
        self._max_position = context.model.max_position
        self._kvs: Sequence[LayerKV] = ()
        self._follows: dict[str, Follow] = {}

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Where the pool keeps the head's layers."""
        self._kvs = own

    # -- what becomes known --------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Nothing is known of it yet."""

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._follows.pop(request_id, None)

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """How far the head follows."""
        follow = self._follows.get(request.request_id)
        return (min(follow.num_ready, request.num_computed) if follow is not None else 0,)

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Go on behind the rows that others computed, from the state of the token before the first computed one."""
        known = num_ready[0] if num_ready else 0
        states = torch.empty(0, 0) if boundary is None else boundary[None].clone()  # [0 or 1, W]
        self._follows[request.request_id] = Follow(
            max(known, self._first_row), request.num_computed - len(states), states
        )

    @property
    def _first_row(self) -> int:
        """The first position that has a row."""
        return 0 if self._head.sees_slot_zero else 1

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Keep the states of what became known; compute rows that complete a block, or have become many."""
        late = []
        for seen in observed:
            rows = _rows_of(seen)
            if rows:
                follow = self._keep(seen, torch.cat([hidden[layer][rows] for layer in self.hidden_layers], dim=1))
                if self._is_late(follow, seen.request.num_computed):
                    late.append(seen.request)
        self._catch_up({request.request_id: request.num_computed for request in late}, late)

    def _keep(self, seen: Observed, states: Tensor) -> Follow:
        """states [n, W] of the last n computed tokens."""
        request = seen.request
        start = request.num_computed - len(states)
        follow = self._follows.get(request.request_id)
        if follow is None or start == 0:
            follow = self._follows[request.request_id] = self._new_follow(states.shape[1])
        follow.add(start, states)
        return follow

    def _new_follow(self, width: int) -> Follow:
        """Of a request nothing is known of. A row at position 0, where there is one, has a state of zeros before it."""
        first = self._first_row
        return Follow(first, first - 1, torch.zeros(1 - first, width))

    def _is_late(self, follow: Follow, num_computed: int) -> bool:
        completes = num_computed - num_computed % self._block_size > follow.num_ready
        return (completes or num_computed - follow.num_ready > EAGER_LAG) and follow.reaches(num_computed)

    def _catch_up(self, ends: dict[str, int], requests: Sequence[Request]) -> None:
        """Compute the rows of known tokens below each request's end, in passes of at most `max_rows` rows."""
        todo = list(requests)
        while todo:
            room, spans = self._max_rows, []
            for request in todo:
                start = self._follows[request.request_id].num_ready
                end = min(ends[request.request_id], start + room)
                if end > start:
                    spans.append((request, start, end))
                    room -= end - start
            self._compute(spans)
            todo = [
                request for request in todo if self._follows[request.request_id].num_ready < ends[request.request_id]
            ]

    def _compute(self, spans: Sequence[tuple[Request, int, int]]) -> None:
        states = [self._follows[request.request_id].take(start, end) for request, start, end in spans]
        self._forward([_span(request, start, end) for request, start, end in spans], self._head.fuse(torch.cat(states)))
        for request, _, end in spans:
            self._follows[request.request_id].advance(end)

    # -- drafting ------------------------------------------------------------------------------------------------

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Grow all trees level by level, one pass of the head a level for all requests."""
        growths = [Growth(draft, self._width) for draft in drafts if self._can_draft(draft)]
        if not growths:
            return
        self._read_long_lags(growths)
        leaves = [[ROOT] for _ in growths]
        out = self._first_level(growths)
        while out is not None:
            grown = self._grow(growths, leaves, out)
            features = out.features.index_select(0, _parents(growths, leaves, grown))
            leaves = grown
            out = self._next_level(growths, leaves, features)
        for growth in growths:
            growth.finish()

    def _can_draft(self, draft: Draft) -> bool:
        """There is room, and the state of the token before the root is known: not in a request's very first step."""
        request = draft.request
        follow = self._follows.get(request.request_id)
        fits = draft.num_free > 0 and request.root_position + draft.max_nodes <= self._max_position
        return fits and request.root_position > 0 and follow is not None and follow.reaches(request.root_position + 1)

    def _read_long_lags(self, growths: Sequence[Growth]) -> None:
        """Compute known tokens until the rest fits into one pass with the roots."""
        requests = [growth.draft.request for growth in growths]
        lags = [request.root_position - self._follows[request.request_id].num_ready for request in requests]
        for growth, lag in zip(growths, lags, strict=True):
            growth.draft.num_caught_up += lag if lag > self.max_nodes else 0  # less is what every step leaves
        if sum(max(lag, 0) + 1 for lag in lags) > self._max_rows:
            self._catch_up({request.request_id: request.root_position for request in requests}, requests)

    def _first_level(self, growths: Sequence[Growth]) -> HeadOutput | None:
        """Known tokens not computed yet and the roots, all from the target's states."""
        rows, states = [], []
        for growth in growths:
            request = growth.draft.request
            follow, root = self._follows[request.request_id], request.root_position
            start = min(follow.num_ready, root)
            rows.append(growth.rows([ROOT], start))
            states.append(follow.take(start, root + 1))
        out = self._forward(rows, self._head.fuse(torch.cat(states)))
        for growth in growths:
            self._follows[growth.draft.request.request_id].advance(growth.draft.request.root_position + 1)
        return out

    def _next_level(
        self, growths: Sequence[Growth], leaves: Sequence[Sequence[int]], features: Tensor
    ) -> HeadOutput | None:
        """Nodes drawn before, each with what the head put out at its parent; None when there are none."""
        pairs = zip(growths, leaves, strict=True)
        rows = [growth.rows(nodes, growth.draft.request.root_position) for growth, nodes in pairs if nodes]
        return self._forward(rows, features) if rows else None

    def _grow(self, growths: Sequence[Growth], leaves: Sequence[Sequence[int]], out: HeadOutput) -> list[list[int]]:
        """Draw the leaves' children; which of them to expand next, by request."""
        frontier = [Leaf(growth.scratch, node) for growth, nodes in zip(growths, leaves, strict=True) for node in nodes]
        drawn = self._grower.grow(frontier, out.logits, self._width, self.name)
        _judge_greedy(frontier, drawn, out.logits)
        children = iter(drawn)
        return [
            growth.next_leaves([child for _ in nodes for child in next(children)])
            for growth, nodes in zip(growths, leaves, strict=True)
        ]

    def _forward(self, rows: Sequence[SequenceRows], features: Tensor) -> HeadOutput | None:
        """features [M, H]; rows stand at the position before their own."""
        batch = ForwardBatch.build(rows, self._block_size)
        return self._head.forward(replace(batch, positions=(batch.positions - 1).clamp_(min=0)), features, self._kvs)


def _judge_greedy(leaves: Sequence[Leaf], drawn: Sequence[Sequence[int]], logits: Tensor) -> None:
    """Without randomness a child's chance is the head's own probability, as EAGLE-2 has it; logits [num_leaves, V]."""
    greedy = [i for i, leaf in enumerate(leaves) if leaf.draft.request.params.temperature == 0.0 and drawn[i]]
    if not greedy:
        return
    rows = logits if len(greedy) == len(leaves) else logits[greedy]
    totals = rows.logsumexp(dim=1).tolist()
    for i, total in zip(greedy, totals, strict=True):
        draft, node = leaves[i]
        values = logits[i, [draft.tree.tokens[child] for child in drawn[i]]].tolist()
        for child, value in zip(drawn[i], values, strict=True):
            draft.survival[child] = draft.survival[node] + min(value - total, 0.0)


def _rows_of(seen: Observed) -> list[int]:
    """Rows of the step that became known of a request."""
    first_node = seen.first_row + seen.num_span
    return [*range(seen.first_row, first_node), *(first_node + node for node in seen.nodes)]


def _span(request: Request, start: int, end: int) -> SequenceRows:
    return SequenceRows(request.request_id, request.block_ids, start, request.token_ids[start:end], end)


def _parents(growths: Sequence[Growth], leaves: Sequence[Sequence[int]], grown: Sequence[Sequence[int]]) -> Tensor:
    """Which row of the last pass each new leaf hangs from -> [number of new leaves] int64."""
    found, first = [], 0
    for growth, old, new in zip(growths, leaves, grown, strict=True):
        rows = {node: first + index for index, node in enumerate(old)}
        found += [rows[growth.scratch.tree.parents[node]] for node in new]
        first += len(old)
    return torch.tensor(found, dtype=torch.int64)
