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
from time import perf_counter

import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import DrafterContext, Observed
from forerun.drafters.drawing import TreeDrawer, tree_rows
from forerun.drafters.following import Follow, Piece, Thrift
from forerun.kernels.ops import LayerKV
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.heads.head import POSITION_SHIFT, DraftHead
from forerun.runtime.bind import bind
from forerun.runtime.runner import Runner
from forerun.speculation.draft import Draft
from forerun.speculation.tree import ROOT

EAGER_LAG = 16  # known rows that are computed at once even where no block is complete


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
        self._runner: Runner | None = None  # once attached
        self._kernels = context.kernels
        self._drawer = TreeDrawer(context.grower, context.width, name)
        self._block_size = context.block_size
        self._max_rows = context.max_rows
        self._max_position = context.model.max_position
        self._follows: dict[str, Follow] = {}
        self._left: set[str] = set()  # requests that are not followed
        self._thrift = Thrift() if options.adaptive else None
        self._was_wanted = False

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Where the pool keeps the head's layers."""
        self._runner = bind(self._head.passes, self._kernels, own, self._block_size)

    @property
    def _bound(self) -> Runner:
        assert self._runner is not None, "not attached"
        return self._runner

    # -- what becomes known --------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Nothing is known of it yet."""

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._follows.pop(request_id, None)
        self._left.discard(request_id)

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """How far the head follows."""
        follow = self._follows.get(request.request_id)
        return (min(follow.num_ready, request.num_computed) if follow is not None else 0,)

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Go on behind the rows that others computed, from the state of the token before the first computed one."""
        if not self._may_follow():
            self._left.add(request.request_id)
            return
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
        began = perf_counter()
        layers = [hidden[layer] for layer in self.hidden_layers]
        late = [seen.request for seen in observed if self._add(seen, layers)]
        if late:
            self._catch_up({request.request_id: request.num_computed for request in late}, late)
        if self._thrift is not None:
            self._thrift.learn(self._was_wanted, began, perf_counter() - began)
        self._was_wanted = False

    def _add(self, seen: Observed, layers: Sequence[Tensor]) -> bool:
        """Keep a request's states; whether there are rows to compute now."""
        request, rows = seen.request, seen.rows
        follow = self._following(request, request.num_computed - len(rows)) if rows else None
        if follow is None:
            return False
        follow.add(request.num_computed - len(rows), Piece(layers, rows))
        follow.num_idle += 1
        if follow.is_broken(request.num_computed) or (self._thrift is not None and self._thrift.leaves(follow)):
            self._left.add(request.request_id)
            del self._follows[request.request_id]
            return False
        return self._is_late(follow, request.num_computed)

    def _may_follow(self) -> bool:
        return self._thrift is None or self._thrift.allows

    def _following(self, request: Request, start: int) -> Follow | None:
        """How a request is followed, if it is; a row at position 0, where there is one, has a state of zeros before."""
        if request.request_id in self._left:
            return None
        follow = self._follows.get(request.request_id)
        if follow is None or start == 0:
            if not self._may_follow():
                self._left.add(request.request_id)
                return None
            first = self._first_row
            none = torch.zeros(1 - first, self._head.state_size, device=self._kernels.device)  # [1 or 0, W]
            follow = Follow(first, first - 1, none)
            self._follows[request.request_id] = follow
        return follow

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
        states = torch.cat([self._follows[request.request_id].take(start, end) for request, start, end in spans])
        rows = [_span(request, start, end) for request, start, end in spans]
        self._bound.run(ForwardBatch.build(rows, self._block_size, POSITION_SHIFT), states)
        for request, _, end in spans:
            self._follows[request.request_id].advance(end)

    # -- drafting ------------------------------------------------------------------------------------------------

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Draft for all requests together."""
        self._was_wanted = True
        active = [draft for draft in drafts if self._can_draft(draft)]
        for draft in active:
            self._follows[draft.request.request_id].num_idle = 0
        if active:
            self._read_long_lags(active)
            self._drawer.draw(self._bound, active, self._root_rows, self._take_states)

    def _can_draft(self, draft: Draft) -> bool:
        """There is room, and the state of the token before the root is known: not in a request's very first step."""
        request = draft.request
        follow = self._follows.get(request.request_id)
        fits = draft.num_free > 0 and request.root_position + draft.num_wanted < self._max_position
        return fits and request.root_position > 0 and follow is not None and follow.reaches(request.root_position + 1)

    def _read_long_lags(self, drafts: Sequence[Draft]) -> None:
        """Compute known tokens until the rest fits into one pass with the roots."""
        num_rows = 0
        for draft in drafts:
            lag = draft.request.root_position - self._follows[draft.request.request_id].num_ready
            draft.num_caught_up += lag if lag > self.max_nodes else 0  # less is what every step leaves
            num_rows += max(lag, 0) + 1
        if num_rows > self._max_rows:
            requests = [draft.request for draft in drafts]
            self._catch_up({request.request_id: request.root_position for request in requests}, requests)

    def _root_rows(self, draft: Draft) -> SequenceRows:
        """Known tokens not computed yet, then the root."""
        return tree_rows(draft, self._start(draft), draft.request.root_position, (ROOT,))

    def _take_states(self, drafts: Sequence[Draft]) -> Tensor:
        """What the target said of these rows, which count as computed from here on -> [M, W]."""
        taken = []
        for draft in drafts:
            follow, end = self._follows[draft.request.request_id], draft.request.root_position + 1
            taken.append(follow.take(self._start(draft), end))
            follow.advance(end)
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def _start(self, draft: Draft) -> int:
        """The first row to compute; the root's is computed again where others had it."""
        return min(self._follows[draft.request.request_id].num_ready, draft.request.root_position)


def _span(request: Request, start: int, end: int) -> SequenceRows:
    return SequenceRows(request.request_id, request.block_ids, start, request.token_ids[start:end], end)
