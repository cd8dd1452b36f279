"""Prompt lookup: what followed the same last tokens earlier in the text.

Knows: token ids of each request. Does not know: any model. Source: Saxena, "Prompt lookup decoding", 2023.

The latest earlier occurrence of the longest matching tail wins. Every n-gram's last end is kept in a table that
grows as tokens arrive, so a step costs a few look-ups whatever the context's length.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, Stateless
from forerun.speculation.growth import Draft

Gram = tuple[int, ...]


def build(context: DrafterContext) -> Drafter:
    """Prompt lookup with the options' sizes."""
    options = context.options
    return NgramDrafter(options.max_draft_tokens, options.ngram_min, options.ngram_max)


class NgramDrafter(Stateless):
    """Copies the tokens that followed the longest tail of ngram_max .. ngram_min tokens where it last occurred."""

    name = "ngram"

    def __init__(self, max_draft_tokens: int, ngram_min: int, ngram_max: int) -> None:
        self.max_nodes = max_draft_tokens + 1
        self._sizes = range(ngram_max, ngram_min - 1, -1)
        self._indexes: dict[str, _GramIndex] = {}

    def begin(self, request: Request) -> None:
        """Start an empty index; it catches up when the request first drafts."""
        self._indexes[request.request_id] = _GramIndex(self._sizes)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Add the continuation of the last match as a chain."""
        for draft in drafts:
            index = self._indexes.get(draft.request.request_id) or self._restart(draft.request)
            draft.add_chain(index.continuation(draft.request.token_ids, draft.num_free), self.name)

    def _restart(self, request: Request) -> _GramIndex:
        self.begin(request)
        return self._indexes[request.request_id]

    def end(self, request_id: str) -> None:
        """Drop the index."""
        self._indexes.pop(request_id, None)


class _GramIndex:
    """Where each n-gram of one text last ended, but for the text's own tail."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[Gram, int] = {}
        self._num_indexed = 0  # grams ending before this are in the table

    def continuation(self, tokens: Sequence[int], num: int) -> Sequence[int]:
        """Up to `num` tokens that followed the longest known tail, () if none is known."""
        self._catch_up(tokens)
        for size in self._sizes:
            end = self._ends.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if end is not None:
                return self._copy(tokens, end, num)
        return ()

    def _copy(self, tokens: Sequence[int], end: int, num: int) -> Sequence[int]:
        """`num` tokens from `end` on; a copy that runs into the tail goes on with its own beginning."""
        period = len(tokens) - end
        return [tokens[end + i % period] for i in range(num)]

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Index every gram that ends before the last token (the tail itself is what we look for)."""
        for end in range(max(1, self._num_indexed), len(tokens)):
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = len(tokens)
