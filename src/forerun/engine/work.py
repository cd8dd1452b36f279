"""One scheduled request on its way through a step, and the rows it has in the step's pass.

Knows: a request's span, draft and figures, and where they lie in the batch. Does not know: what passes compute, what
becomes of the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.cache.kv_cache import Move
from forerun.core import ScheduledRequest
from forerun.drafters.base import Observed
from forerun.engine.outputs import SampleRecord
from forerun.models.batch import SequenceRows
from forerun.speculation.draft import NO_ROWS, Draft


@dataclass(slots=True)
class Work:
    """One scheduled request on its way through a step."""

    item: ScheduledRequest
    record: SampleRecord
    draft: Draft | None  # None: the span ends before the root
    first_row: int = 0  # of the batch
    first_logit: int = 0  # row of the logits that belongs to the span's first token, or to the root
    span_logits: bool = False

    @property
    def root_logit(self) -> int:
        """Row of the logits that belongs to the root."""
        return self.first_logit + (self.item.num_span if self.span_logits else 0)


def roots_of(work: Sequence[Work]) -> list[tuple[Draft, int]]:
    """Every draft, and the batch's row of its root."""
    return [(draft, e.first_row + e.item.num_span) for e in work if (draft := e.draft) is not None]


def join_rows(span: range, nodes: Sequence[int]) -> Sequence[int]:
    """Rows of a span and of nodes after it, as a range if they are contiguous."""
    if nodes[-1] - span.stop == len(nodes) - 1:
        return range(span.start, span.stop + len(nodes))
    return [*span, *nodes]


def rows_of(entry: Work) -> SequenceRows:
    """What the pass computes of the request."""
    request = entry.item.request
    start, end = request.num_computed, request.num_computed + entry.item.num_span
    tree = NO_ROWS if entry.draft is None else entry.draft.rows()
    span = request.token_ids[start:end]
    return SequenceRows(request.request_id, request.block_ids, start, span, end, *tree, entry.span_logits)


def move_of(seen: Observed, root: int) -> Move:
    """Move accepted nodes to the rows right after the root."""
    return Move(seen.request.block_ids, [root + node for node in seen.nodes], range(root, root + len(seen.nodes)))
