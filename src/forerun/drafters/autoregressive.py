"""Drafts of a network with KV in the pool: a draft model, a head on the target's states, the target's layers.

Knows: how to catch up with the requests and then draw, level by level or a block at once. Does not know: whose network
it is, who executes it (`runtime`), how far it has read each request and its other inputs (`drafters.following`),
verification.

Trees grow as in EAGLE-2 (arXiv 2406.16858): a level expands the `width` likeliest of its new nodes, and of all nodes
ever drawn the likeliest are kept. Under the rejection rule likelihood goes by rank alone (see `speculation.growth`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import DrafterContext, Observed
from forerun.drafters.following import FeatureFollower, Follower, RootFollower, Span
from forerun.kernels.ops import LayerKV
from forerun.models.base import BlockPasses, LayerSpec, Passes
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.heads.block import BlockHead
from forerun.models.heads.head import DraftHead
from forerun.runtime.bind import bind, bind_block
from forerun.runtime.runner import Runner
from forerun.speculation.draft import Draft, hand_over
from forerun.speculation.tree import ROOT

LEAST_TREE = 4  # with fewer drafts a chain is used: its levels cost less and a tree would find no more

Bind = Callable[[Sequence[LayerKV], Sequence[LayerKV]], Runner]  # given the target's layers in the pool, and its own


class AutoregressiveDrafter:
    """Drafts with the network that `make_runner` binds, with the name and options of its context.

    `shift` is added to the position of each of its rows; `max_position` bounds the positions. rereads_last: the known
    token before the root is given to every draw, computed or not.
    """

    runner: Runner  # once attached

    def __init__(
        self, context: DrafterContext, follower: Follower, make_runner: Bind, max_position: int,
        weight_bytes: int = 0,
        kv_specs: tuple[LayerSpec, ...] = (), shift: int = 0, rereads_last: bool = False,
    ) -> None:  # fmt: skip
        self.name = context.spec.name
        self.max_nodes = context.options.max_draft_tokens + 1
        self.hidden_layers = follower.hidden_layers
        self.kv_specs = kv_specs
        self.weight_bytes = weight_bytes
        self.grower = context.grower
        self._width, self._block_size, self._max_rows = context.width, context.block_size, context.max_rows
        self._follower, self._make_runner = follower, make_runner
        self._max_position, self._shift = max_position, shift
        self._rereads_last = rereads_last

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Bind the network to the pool's layers: the target's and its own."""
        self.runner = self._make_runner(target, own)

    def begin(self, request: Request) -> None:
        """Nothing is computed yet."""

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Let the follower see it, and read what should not wait until drafts are wanted."""
        self._follower.observe(observed, hidden, self._read)

    def reads(self, request: Request) -> bool:
        """See `StatesReader`."""
        return self._follower.reads(request)

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """How far the network has read."""
        return self._follower.num_ready(request)

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Continue after the rows that others computed."""
        self._follower.resume(request, num_ready[0] if num_ready else 0, boundary)

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._follower.end(request_id)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Catch up, then grow all trees together."""
        self._follower.wanted(drafts)
        active = [draft for draft in drafts if self._can_draft(draft)]
        if active:
            self._catch_up(active)
            self._draw(sorted(active, key=lambda draft: -draft.num_free))

    def _can_draft(self, draft: Draft) -> bool:
        fits = draft.num_free > 0 and draft.request.root_position + draft.num_wanted < self._max_position
        return fits and self._follower.can_draft(draft.request)

    def _catch_up(self, drafts: Sequence[Draft]) -> None:
        """Read known tokens until the rest fits into one pass with the roots."""
        num_rows = 0
        for draft in drafts:
            lag = draft.request.root_position - self._follower.start(draft.request)
            draft.num_caught_up = lag if lag > self.max_nodes else 0  # every step leaves a smaller lag
            num_rows += max(lag, self._rereads_last) + 1
        if num_rows > self._max_rows:
            self._read((draft.request, draft.request.root_position) for draft in drafts)

    def _read(self, ends: Iterable[tuple[Request, int]]) -> None:
        """Compute the rows of known tokens below each request's end, in passes of at most `max_rows` rows."""
        ends = list(ends)
        while True:
            spans, room = list[Span](), self._max_rows
            for request, end in ends:
                start = self._follower.start(request)
                num = min(end - start, room)
                if num > 0:
                    spans.append((request, start, start + num))
                    room -= num
            if not spans:
                return
            rows = [_rows(*span) for span in spans]
            self.runner.run(ForwardBatch.build(rows, self._block_size, self._shift), self._follower.features(spans))
            for request, _, end in spans:
                self._follower.read(request, end)

    def _draw(self, drafts: Sequence[Draft]) -> None:
        """Grow all trees, the largest first, from the known tokens still to be read and the roots."""
        roots = [(draft.request, draft.request.root_position) for draft in drafts]
        # the row of the root, or of the token before, is computed again where it was
        spans = [
            (request, min(self._follower.start(request), root - self._rereads_last), root + 1)
            for request, root in roots
        ]
        rows, features = [_rows(*span) for span in spans], self._follower.features(spans)
        noise = self.grower.noise(drafts)
        is_small = drafts[0].num_free < LEAST_TREE and (noise.by_depth is not None or features is not None)
        drawn = self.runner.draw(rows, features, noise, 1 if is_small else self._width)
        for draft, computed in zip(drafts, hand_over(drafts, drawn), strict=True):
            self._follower.drew(draft.request, computed)


def head_drafter(head: DraftHead, context: DrafterContext) -> AutoregressiveDrafter:
    """Drafts with a head that is fed the target's states."""
    passes, places, max_position = head.passes, head.kv_places, context.model.max_position
    if head.blocks is not None:
        return block_drafter(head, head.blocks, context)
    follower = FeatureFollower(head, context) if places is None else RootFollower(head)
    bind_layers = binder(passes, context, places)
    return AutoregressiveDrafter(
        context, follower, bind_layers, max_position, head.weight_bytes, head.kv_specs, passes.shift
    )


def block_drafter(
    head: BlockHead | DraftHead, passes: BlockPasses, context: DrafterContext
) -> AutoregressiveDrafter:  # fmt: skip
    """Drafts with a head that guesses a block of tokens in one pass; a chain is as long as a block at most."""
    follower, max_position = FeatureFollower(head, context), context.model.max_position
    bind_layers = block_binder(passes, context)
    made = AutoregressiveDrafter(
        context, follower, bind_layers, max_position, head.weight_bytes, head.kv_specs, passes.block.shift,
        passes.rereads_last,
    )  # fmt: skip
    made.max_nodes = made.max_nodes if context.width > 1 else min(made.max_nodes, passes.shape.num_depths + 1)
    return made


def binder(passes: Passes, context: DrafterContext, places: Sequence[int] | None = None) -> Bind:
    """Binds passes to layers of their own, or to the target's at these places."""

    def bind_layers(target: Sequence[LayerKV], own: Sequence[LayerKV]) -> Runner:
        kvs = own if places is None else [target[place] for place in places]
        return bind(passes, context.kernels, kvs, context.block_size)

    return bind_layers


def block_binder(passes: BlockPasses, context: DrafterContext) -> Bind:
    """Binds the passes of a network that guesses a block of tokens in one pass to layers of its own."""

    def bind_layers(target: Sequence[LayerKV], own: Sequence[LayerKV]) -> Runner:
        return bind_block(passes, context.kernels, own, context.block_size)

    return bind_layers


def _rows(request: Request, start: int, end: int) -> SequenceRows:
    """Rows of known tokens start .. end-1; the request's last known token is the root of a tree."""
    root = request.root_position
    has_root = end > root
    tree = ((ROOT,) * has_root, (1,) * has_root, (0,) * has_root)  # rows, masks, depths
    span, tokens = request.token_ids[start : min(end, root)], request.token_ids[root:end]
    return SequenceRows(request.request_id, request.block_ids, start, span, min(end, root), tokens, *tree)
