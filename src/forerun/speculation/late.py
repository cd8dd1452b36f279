"""Drafts whose tokens still lie on a device while the pass that verifies them is given to it.

Knows: which row of a batch stands for which drafted node, and how trees are filled in once they were read. Does not
know: who draws, what a pass computes, acceptance.

**Who may be late.** A step that looks at drafts before it verifies them must wait for them: a policy that prunes, a
portfolio that joins trees, parameters that shape logits by what was drafted, a rule that needs q. Whoever runs the step
says so by `Draft.may_be_late`; a drafter then may leave its trees to be read with the target's choices, in one piece.
Until then a tree is a chain of zeros as long as the tree may have nodes: rows of nodes that were not drawn are computed
in vain, into places nobody reads. A portfolio asks its members for drafts of their own: the step's drafts then wait for
those (`hand_on`), and what was drawn is hung into both when it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forerun.kernels.device import to_device
from forerun.speculation.tree import DraftTree

if TYPE_CHECKING:
    from forerun.speculation.growth import Draft


class LateRows(NamedTuple):
    """Rows of a batch and what they hold, on the device; None where the host knew it."""

    rows: Tensor  # [n] int64
    token_ids: Tensor  # [n] int64
    depths: Tensor | None  # [n] int64, below the roots
    tree_masks: Tensor | None  # [n] int64


class LateDrafts:
    """Trees of several drafts; everything by columns of [number of drafts, most nodes] on the device."""

    def __init__(
        self, drafts: Sequence[Draft], unread: Tensor, finish: Callable[[Tensor], None], tokens: Tensor,
        depths: Tensor | None = None, masks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`finish` hangs the nodes into the drafts, given `unread` on the host. tokens: -1 for none; without `depths`
        and `masks` all are chains."""
        self.unread = unread
        self._drafts = {id(draft): index for index, draft in enumerate(drafts)}
        self._finish = finish
        self._columns = (tokens.clamp(min=0), depths, masks)
        for draft in drafts:
            draft.late = self
            draft.add_chain([0] * draft.num_free, "")
        self._all = list(drafts)
        self._then: list[Callable[[], None]] = []

    def hand_on(self, pairs: Sequence[tuple[Draft, Draft]], then: Callable[[], None]) -> None:
        """Let drafts of the step wait for drafts of a member: pairs of both, the step's being roots alone.

        `then` hangs the member's trees into the step's drafts; it is called when they are known.
        """
        for draft, own in pairs:
            assert own.late is self and draft.late is None and len(draft.tree) == 1
            self._drafts[id(draft)] = self._drafts[id(own)]
            draft.late = self
            draft.add_chain([0] * (len(own.tree) - 1), "")
        self._all += [draft for draft, _ in pairs]
        self._then.append(then)

    def rows(self, firsts: Sequence[tuple[Draft, int]], vocab_size: int) -> LateRows:
        """The rows of these drafts' nodes, given the row of each root.

        Tokens that only a draft model's longer vocabulary has, which the target never chooses, are fed as its last: a
        row of no token would be numbers that are none, in a place that other rows skip by a weight of zero.
        """
        width, rows, places = self._columns[0].shape[1], list[int](), list[int]()
        for draft, first in firsts:
            num, index = len(draft.tree) - 1, self._drafts[id(draft)]
            rows += range(first + 1, first + 1 + num)
            places += range(index * width, index * width + num)
        both = to_device(torch.tensor([rows, places], dtype=torch.int64), self.unread.device)  # [2, n]
        picked = [None if c is None else c.flatten().index_select(0, both[1]) for c in self._columns]
        assert picked[0] is not None
        return LateRows(both[0], picked[0].clamp(max=vocab_size - 1), picked[1], picked[2])

    def finish(self, host: Tensor) -> None:
        """What `unread` held is known: the trees are what they are from here on."""
        for draft in self._all:
            draft.late, draft.tree, draft.survival = None, DraftTree(draft.request.token_ids[-1]), [0.0]
        self._finish(host)
        for then in self._then:
            then()


def late_of(drafts: Sequence[Draft]) -> LateDrafts | None:
    """What some of these drafts wait for; one drafter leaves all of a step in one piece."""
    return next((draft.late for draft in drafts if draft.late is not None), None)
