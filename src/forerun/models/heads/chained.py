"""ChainedHeads: MTP modules that were trained for one depth each, and draft one behind the other.

Knows: which module computes which rows of a level, what each of them is fed, where that is kept. Does not know: what a
module computes (`heads.head`), files, requests.

Module k = 0, 1, ... reads in the row of position j the token there and what module k-1 gave in the row before, module 0
the target's state of the token before; it stands at position j-1-k and gives logits of the token at j+1. (DeepSeek-V3,
arXiv 2412.19437, equations 21 to 23, where i = j-1-k.) Rows before its first, which have no such state, are fed zeros
and stand at position 0: layers in windows see them.

**Known tokens.** Every module has KV of its own for each. What a module gives there is what the next one is fed in the
row behind: the pool keeps it beside the KV, so that whoever goes on from a row finds it there, after a prefix hit, too.

**Drafts.** The root's row gives the logits of module 0, the first draft's row those of module 1, and so on; rows below
the last module's depth are its own, fed with what it gave itself. The modules behind compute a level's rows, too, for
the KV that they will see below: module k sees of each draft above the row that its formula asks for. vLLM (pull
requests 48892 and 50062) computes the same, and drafts no further than there are modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.errors import UnsupportedError
from forerun.kernels.device import indices_on
from forerun.kernels.ops import LayerKV
from forerun.models.base import LayerSpec, Passes, PassOutput
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.heads.head import POSITION_SHIFT, DraftHead


class ChainedHeads(DraftHead):
    """Several modules over the target's pool; to drafters it is one head."""

    def __init__(self, modules: Sequence[DraftHead]) -> None:
        """`modules`: two or more, of one hidden size. Raises UnsupportedError if their layers have no windows."""
        if not all(each.sees_slot_zero for each in modules):
            raise UnsupportedError(
                "these MTP modules, of which each one drafts one depth, have layers that see everything; supported are "
                "several modules with layers in a window (Step-3.5, MiMo-V2): choose another drafter"
            )
        first = modules[0]
        super().__init__(
            replace(
                first.parts,
                kv_specs=(*(spec for each in modules for spec in each.kv_specs), _kept_spec(modules)),
                weight_bytes=sum(each.weight_bytes for each in modules),
            )
        )
        self.modules = tuple(modules)

    @property
    def passes(self) -> Passes:
        """Rows read what was computed for the rows before them, so that passes run op by op."""
        return Passes(
            self._read_known,
            self._read_drafts,
            vocab_size=self.vocab_size,
            feature_size=self.state_size,
            fed_size=(len(self.modules) - 1) * self.hidden_size,
            shift=POSITION_SHIFT,
            mixes_rows=True,
        )

    @torch.no_grad()
    def _read_known(self, batch: ForwardBatch, states: Tensor | None, kvs: Sequence[LayerKV]) -> PassOutput:
        """The roots' pass: rows of known tokens and their states [M, W] of the target, by all modules."""
        assert states is not None
        before = indices_on(_slots_before(batch), states.device)  # [M]
        batch, kept, size = batch.on(states.device), _rows_of(kvs[-1]), self.hidden_size
        known = self.parts.fuse(states)  # [M, H]

        def fed(index: int, made: Tensor | None) -> Tensor:
            """What a module reads, after the one before gave `made` in these rows."""
            if made is None:
                return known
            columns = kept[:, (index - 1) * size : index * size]
            columns.index_copy_(0, batch.slots.long(), made)
            return columns.index_select(0, before.clamp(min=0)).masked_fill_(before[:, None] < 0, 0.0)

        return self._level(batch, 0, fed, kvs, batch.logit_rows)

    @torch.no_grad()
    def _read_drafts(self, batch: ForwardBatch, features: Tensor | None, kvs: Sequence[LayerKV]) -> PassOutput:
        """A level's pass: each row by the last modules, as many as there are columns [M, H] of features for."""
        assert features is not None
        given = features.chunk(features.shape[1] // self.hidden_size, dim=1)
        first = len(self.modules) - len(given)
        batch = batch.on(features.device)
        return self._level(batch, first, lambda index, _: given[index - first].contiguous(), kvs, batch.logit_rows)

    def _level(
        self, batch: ForwardBatch, first: int, fed: Callable[[int, Tensor | None], Tensor], kvs: Sequence[LayerKV],
        wanted: Tensor,
    ) -> PassOutput:  # fmt: skip
        """The modules from `first` on over all rows; logits of `first`, and what the level below is fed, of `wanted`.

        fed(index, made): what module `index` reads in these rows, where the one before it gave `made`.
        """
        last, made, given = len(self.modules) - 1, None, list[Tensor]()
        logits = torch.empty(0, self.vocab_size, device=wanted.device)
        for index in range(first, last + 1):
            module, at = self.modules[index], _moved_back(batch, index)
            is_silent = index == last and index > first  # no row here reads what it gives
            rows = wanted[:0] if is_silent else None
            x, residual = module.stream(at, fed(index, made), self._own(kvs, index), rows)
            if is_silent:
                break
            normed, made = module.parts.exit.states(x, residual)  # [M, H]
            if index == first and wanted.shape[0]:
                logits = module.parts.exit.logits(normed.index_select(0, wanted))
            given.append(made.index_select(0, wanted))
        return PassOutput(logits, features=torch.cat(given, dim=1) if wanted.shape[0] else None)

    def _own(self, kvs: Sequence[LayerKV], index: int) -> Sequence[LayerKV]:
        """A module's layers of the pool."""
        first = sum(len(module.kv_specs) for module in self.modules[:index])
        return kvs[first : first + len(self.modules[index].kv_specs)]


def _kept_spec(modules: Sequence[DraftHead]) -> LayerSpec:
    """What the pool keeps of a known token beside KV: what every module but the last gives there, as one vector."""
    return LayerSpec(1, (len(modules) - 1) * modules[0].hidden_size, torch.float32, latent=True)


def _rows_of(kept: LayerKV) -> Tensor:
    """The vectors of a latent layer -> [slots, width], a view."""
    return kept.values.view(-1, kept.values.shape[-1])


def _moved_back(batch: ForwardBatch, num: int) -> ForwardBatch:
    """The batch with positions less by `num`, at least 0."""
    return replace(batch, positions=(batch.positions - num).clamp_(min=0)) if num else batch


def _slots_before(batch: ForwardBatch) -> list[int]:
    """The slot of the token before each row's, -1 before the first; rows are known tokens and roots."""
    return [slot for rows in batch.sequences for slot in _slots(rows, batch.block_size)]


def _slots(rows: SequenceRows, block_size: int) -> list[int]:
    known = [*range(rows.start, rows.start + len(rows.span)), *[rows.tree_start] * len(rows.tree_tokens)]
    places = [divmod(position - 1, block_size) for position in known]
    return [-1 if block < 0 else rows.block_table[block] * block_size + offset for block, offset in places]
