"""Trees grown on a device become drafts: at once, or when the step that verifies them reads them.

Knows: how kept nodes are told, which drafts may be pending. Does not know: who grew them, passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.kernels.device import to_host
from forerun.runtime.drawn import EnqueuedDrafts, GrownTrees
from forerun.speculation.draft import Draft, PendingDrafts
from forerun.speculation.growth import TreeGrower
from forerun.speculation.tree import ROOT


def wants_enqueued(grower: TreeGrower, drafts: Sequence[Draft], width: int) -> bool:
    """Whether these drafts can be drawn without the host (nothing but temperatures, nothing to record) and gain by it.

    Chains that are read at once are drawn as such, which takes less.
    """
    gains = width > 1 or may_be_pending(drafts)
    return gains and all(grower.can_rank(draft.request) for draft in drafts)


def may_be_pending(drafts: Sequence[Draft]) -> bool:
    """Whether these drafts may be read with the target's choices.

    Not after reading what a drafter had missed, a prompt most often: what that takes decides whether drafting pays, and
    in the time of the pass it could not be told from it. It happens once a request.
    """
    return all(draft.may_be_pending and draft.num_caught_up == 0 for draft in drafts)


def hand_over(drafts: Sequence[Draft], enqueued: EnqueuedDrafts, source: str) -> list[set[int]]:
    """Hang what was enqueued for these drafts into them, now or when they are read.

    -> of each, the nodes whose KV lies in the row of their number; filled in when they are read.
    """
    computed = [{ROOT} for _ in drafts]

    def finish(unread: Tensor) -> None:
        for nodes, new in zip(computed, adopt_trees(drafts, enqueued.reading(unread), source), strict=True):
            nodes |= new

    if may_be_pending(drafts):
        PendingDrafts(drafts, enqueued.unread, finish, enqueued.tokens, enqueued.depths, enqueued.masks)
    else:
        finish(to_host(enqueued.unread))
    return computed


def adopt_trees(drafts: Sequence[Draft], grown: GrownTrees, source: str) -> list[set[int]]:
    """Hang the kept nodes into the drafts -> of each, the nodes whose KV lies in the row of their number."""
    columns = zip(*(column.tolist() for column in grown), strict=True)
    return [_adopt(draft, own, source) for draft, own in zip(drafts, columns, strict=True)]


def _adopt(draft: Draft, columns: Sequence[Sequence[float]], source: str) -> set[int]:
    nodes, places = [ROOT], [0]
    for token, parent, log_chance, place in zip(*columns, strict=True):
        if token < 0:
            break
        nodes.append(draft.add(nodes[int(parent)], int(token), log_chance, source))
        places.append(int(place))
    return {node for node, place in zip(nodes, places, strict=True) if node == place}
