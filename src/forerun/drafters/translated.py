"""A draft model with another tokenizer than the target's: what it reads and drafts is text.

Knows: each request's text in the draft's tokens, which of them have KV, the pool that holds it. Does not know: how
texts are tokenized (`weights.translation`), how the model drafts (`drafters.autoregressive`): for that every request
has a stand-in whose tokens are the draft's.

**KV.** A text has other positions in the draft's tokens than in the target's, so its KV lies in a pool of its own,
under block tables of the stand-ins. It has as many blocks as the target's, if memory allows; a request that finds none
left is decoded without drafts. Rows stay valid as far as the tokens they were computed of are still those of the text:
after a rejected draft, or where new text merges with the last token, the model goes on from there.

**Drawing.** Under the coupled rule a token of the draft's that is one token of the target's is drawn with that one's
noise at the position it would have, so both models choose alike as often as with one tokenizer. The rejection rule gets
the likeliest tokens as drafts without a distribution, which is exact, and of all drafts without one accepted most.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from forerun.cache.block_pool import BlockPool
from forerun.cache.kv_cache import KVCache, bytes_per_block
from forerun.cache.prefix_cache import PrefixCache
from forerun.core import Request
from forerun.drafters.autoregressive import AutoregressiveDrafter, binder
from forerun.drafters.base import DrafterContext, Stateless
from forerun.drafters.following import Follower
from forerun.errors import ConfigError, PromptError, UnsupportedError
from forerun.kernels.device import to_device
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import Model, passes_of
from forerun.models.memory import memory_of
from forerun.speculation.draft import Draft
from forerun.speculation.growth import Children, Place, TreeGrower, TreeNoise
from forerun.speculation.tree import MAX_NODES, ROOT
from forerun.weights.translation import Transcript, Translation

MOST_EACH: Final = 4  # drafted tokens for one of the target's
SHARE_OF_MEMORY: Final = 0.5  # of what is free when the target's pool has its memory
MAY_MERGE: Final = math.log(
    0.5
)  # chance that a token at the end of drafted text is complete, where it is no drafted one

log = logging.getLogger("forerun.drafters")


class StandIn:
    """A request in the draft's tokens, and how far the draft model has read it.

    `request` is what drafts are drawn for; `shaped` is the target's request as drafts are shaped by it.
    """

    def __init__(self, request: Request, translation: Translation, coupled: bool) -> None:
        heat = request.params.temperature if coupled else 0.0
        params = replace(request.params, temperature=heat, grammar=None)  # drafted text may be cut anew: no grammar
        self.shaped = copy.copy(request)
        self.shaped.params = params
        self.request = Request(request.request_id, (), params, request.seed, request.sample_index)
        self.transcript = Transcript(translation)
        self.request.token_ids = self.transcript.ids
        self.rows: list[int] = []  # tokens with KV, from the first on
        self._num_same = 0  # leading rows that are known to be tokens of the text
        self._num_known = 0  # tokens of the target

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """All of the target's tokens that are known now; rows of tokens that are no more are forgotten."""
        self._num_same = min(self._num_same, self.transcript.extend(token_ids[self._num_known :]))
        self._num_known = len(token_ids)
        del self.rows[self.num_ready :]

    @property
    def num_ready(self) -> int:
        """Leading tokens of the text that have KV."""
        ids, rows, same = self.transcript.ids, self.rows, self._num_same
        most = min(len(ids), len(rows))
        while same < most and ids[same] == rows[same]:
            same += 1
        self._num_same = same
        return same

    def read(self, end: int) -> None:
        """The tokens below `end` have KV now."""
        del self.rows[self.num_ready :]
        self.rows += self.transcript.ids[len(self.rows) : end]

    def num_tokens_for(self, num_drafts: int) -> int:
        """Drafted tokens that so many of the target's take, by the text so far."""
        each = len(self.transcript.ids) / max(self._num_known, 1)
        return min(math.ceil(num_drafts * min(max(each, 1 / MOST_EACH), MOST_EACH)), MAX_NODES - 1)


class _TextFollower(Follower):
    """Follows for the draft model, by the stand-ins' tokens."""

    def __init__(self, stand_ins: Mapping[str, StandIn]) -> None:
        self._stand_ins = stand_ins

    def start(self, request: Request) -> int:
        """Behind the tokens of the text that have KV."""
        return self._stand_ins[request.request_id].num_ready

    def can_draft(self, request: Request) -> bool:
        """All tokens are known."""
        return True

    def read(self, request: Request, end: int) -> None:
        """Note them."""
        self._stand_ins[request.request_id].read(end)

    def drew(self, request: Request, nodes: set[int]) -> None:
        """The text has been read to its end; the nodes are known to whoever asked for them."""
        self.read(request, request.root_position + 1)


class _ColumnGrower(TreeGrower):
    """Draws the draft's tokens with the noise and the parameters that the target has for their texts."""

    def __init__(
        self, kernels: Kernels, coupled: bool, translation: Translation, stand_ins: Mapping[str, StandIn]
    ) -> None:
        super().__init__(kernels, coupled)
        self._translation, self._stand_ins = translation, stand_ins
        columns = torch.tensor(translation.columns, dtype=torch.int64)
        self._token_of = torch.empty(translation.num_columns, dtype=torch.int64).fill_(-1)
        self._token_of[columns] = torch.arange(len(columns))
        self._columns = to_device(columns, kernels.device)  # [V of the draft]

    def noise(self, drafts: Sequence[Draft]) -> TreeNoise:
        """By the draft's own tokens only where no noise is drawn: there chains take one native call."""
        noise = super().noise(drafts)
        is_greedy = all(request.params.temperature == 0.0 for request in noise.requests)
        return noise if is_greedy else replace(noise, by_depth=None)

    def draw(self, places: Sequence[Place], logits: Tensor, width: int) -> list[Children]:
        """As the target's request is shaped, at the position the target would be at."""
        shaped = [self._in_target(place) for place in places]
        wide = logits.new_full((len(places), len(self._token_of)), -torch.inf)  # [places, columns]
        wide.index_copy_(1, self._columns, logits)
        found = super().draw(shaped, wide, width)
        return [drawn._replace(tokens=[int(self._token_of[column]) for column in drawn.tokens]) for drawn in found]

    def _in_target(self, place: Place) -> Place:
        shaped = self._stand_ins[place.request.request_id].shaped
        said = self._translation.in_target(shaped.token_ids, place.path) if place.path else None
        return Place(shaped, place.node, said.tokens if said is not None else ())


class TranslatedDrafter(Stateless):
    """Drafts with a model that has another tokenizer. Chains only."""

    def __init__(self, context: DrafterContext, model: Model, translation: Translation) -> None:
        self.name = context.spec.name
        self.max_nodes = context.options.max_draft_tokens + 1
        self.weight_bytes = model.weight_bytes
        self._model, self._translation = model, translation
        self._kernels, self._block_size = context.kernels, context.block_size
        self._coupled = context.grower.coupled
        self._longest = min(context.model.max_position, model.max_position)
        self.stand_ins: dict[str, StandIn] = {}
        self._unreadable: set[str] = set()  # requests with a text that the draft's tokenizer has no tokens for
        own = replace(
            context,
            options=replace(context.options, tree_width=1, max_draft_tokens=min(2 * self.max_nodes, MAX_NODES - 1)),
            grower=_ColumnGrower(context.kernels, self._coupled, translation, self.stand_ins),
        )
        bind = binder(passes_of(model), own)
        self.inner = AutoregressiveDrafter(own, _TextFollower(self.stand_ins), bind, model.max_position)
        self.layers: Sequence[LayerKV] = ()  # once attached
        self._pool: BlockPool
        self._prefixes: PrefixCache

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Make the pool: as many blocks as the target's has, or the memory holds."""
        specs, size = self._model.kv_specs, self._block_size
        wanted = target[0].values.shape[0] if target else -(-self._longest // size)
        memory = memory_of(self._kernels.device)
        room = wanted if memory is None else int(memory * SHARE_OF_MEMORY) // bytes_per_block(specs, size)
        kv_cache = KVCache(self._kernels, specs, max(min(wanted, room), 1), size)
        self._pool = BlockPool(kv_cache.num_blocks)
        self._prefixes = PrefixCache(self._pool, size)
        self.layers = kv_cache.layers
        self.inner.attach((), self.layers)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Catch up with the texts, draft on in the draft's tokens, and add what that is in the target's."""
        asked = [(draft, own) for draft in drafts if (own := self._own_draft(draft)) is not None]
        if not asked:
            return
        self.inner.propose([own for _, own in asked])
        for draft, own in asked:
            stand_in = self.stand_ins[own.request.request_id]
            if stand_in.num_ready > own.request.root_position:  # else it could not draft
                stand_in.rows += own.tree.tokens[1:-1]  # the last was drawn, not read
            stand_in.request.num_computed = min(len(stand_in.rows), stand_in.transcript.num_settled)
            self._prefixes.publish(stand_in.request, ())
            draft.num_caught_up = own.num_caught_up
            self._add(draft, own)

    def end(self, request_id: str) -> None:
        """Forget the request; blocks that others may share stay as long as there is room."""
        self._unreadable.discard(request_id)
        stand_in = self.stand_ins.pop(request_id, None)
        if stand_in is not None:
            self._prefixes.close(stand_in.request)
            self._pool.release(stand_in.request.block_ids)
            self._model.release(request_id)

    def _own_draft(self, draft: Draft) -> Draft | None:
        """A draft in the draft's tokens, for which there is room; None if there is not, or nothing to go on from."""
        request_id = draft.request.request_id
        if request_id in self._unreadable:
            return None
        stand_in = self.stand_ins.get(request_id)
        try:
            if stand_in is None:
                stand_in = self._open(draft.request)
            else:
                stand_in.catch_up(draft.request.token_ids)
        except PromptError as error:
            self.end(request_id)
            self._unreadable.add(request_id)
            log.warning("request %s is decoded without drafts: %s", request_id, error)
            return None
        ids, num_drafts = stand_in.transcript.ids, stand_in.num_tokens_for(draft.num_free)
        num_rows = len(ids) + num_drafts
        if not ids or num_rows > self._model.max_position or not self._has_blocks(stand_in.request, num_rows):
            return None
        return Draft(stand_in.request, num_drafts + 1, least=draft.least, member=self.name)

    def _open(self, request: Request) -> StandIn:
        """Follow the request from now on, from the blocks that its text has in common with others."""
        stand_in = StandIn(request, self._translation, self._coupled)
        stand_in.catch_up(request.token_ids)
        known = stand_in.transcript.ids[: stand_in.transcript.num_final + 1]  # lookups leave out the last token
        hit = self._prefixes.lookup(known, salt=request.cache_salt).without_copy()
        self._pool.share(hit.blocks)
        self._prefixes.open(stand_in.request, hit)
        stand_in.request.block_ids = list(hit.blocks)
        stand_in.rows = stand_in.transcript.ids[: len(hit.blocks) * self._block_size]
        self.stand_ins[request.request_id] = stand_in
        return stand_in

    def _has_blocks(self, request: Request, num_rows: int) -> bool:
        blocks = self._pool.allocate(max(-(-num_rows // self._block_size) - len(request.block_ids), 0))
        request.block_ids += blocks or ()
        return blocks is not None

    def _add(self, draft: Draft, own: Draft) -> None:
        """Give the target's draft what was drafted, in its tokens."""
        drafted = own.tree.tokens[1:]
        told = self._translation.in_target(draft.request.token_ids, drafted)
        whole = max((index for index, is_whole in enumerate(told.is_whole) if is_whole), default=-1)
        node = ROOT
        for index, (token, last) in enumerate(zip(told.tokens, told.last, strict=True)):
            if draft.num_free == 0:
                return
            chance = own.survival[1 + last] + MAY_MERGE * max(index - whole, 0)
            node = draft.add(node, token, min(chance, 0.0))


def build_translated(context: DrafterContext, model: Model, translation: Translation) -> TranslatedDrafter:
    """The drafter. Raises ConfigError for options of one tokenizer, and UnsupportedError for a model with own state."""
    if (context.options.tree_width or 1) > 1:
        raise ConfigError(
            f"tree_width {context.options.tree_width} was asked for, but the draft model {context.options.model} has "
            "another tokenizer than the target, with which drafts are chains: leave tree_width out, or make it 1"
        )
    if context.options.draft_vocabulary is not None:
        raise ConfigError(
            f"draft_vocabulary {context.options.draft_vocabulary} lists tokens of the target, but the draft model "
            f"{context.options.model} has tokens of its own: leave draft_vocabulary out"
        )
    if not model.kv_specs:
        raise UnsupportedError(
            f"the draft model {context.options.model} has another tokenizer than the target and runs through "
            "transformers row by row, which cannot go back in a text: choose a draft model that forerun runs itself, "
            "or one with the target's tokenizer"
        )
    return TranslatedDrafter(context, model, translation)
