"""Prompt lookup: what followed the same last tokens earlier in the text.

Knows: token ids of each request. Does not know: any model. Source: Saxena, "Prompt lookup decoding", 2023.

The latest earlier occurrence of the longest matching tail wins. Where the C++ extension is installed its suffix
automaton finds it; without it every n-gram's last end is kept in a table. Both grow as tokens arrive, so a step
costs the same whatever the context's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, Protocol

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Stateless
from forerun.kernels.suffix import SuffixKit, select_suffix
from forerun.speculation.draft import Draft

Gram = tuple[int, ...]
Copy = tuple[int, Sequence[int]]  # length of the tail that was found, what followed it

# The odds that the token after a match of l tokens is wrong are about DOUBT / l^1.5, measured on text and answers.
DOUBT: Final = 4.0


def build(context: DrafterContext) -> Drafter:
    """Prompt lookup with the options' sizes, on the fastest index that is installed."""
    options = context.options
    return NgramDrafter(options.max_draft_tokens, options.ngram_min, options.ngram_max, select_index())


SPEC = DrafterSpec(
    name="ngram",
    build=build,
    help="what followed the same last tokens in this request",
    options=("ngram_min", "ngram_max"),
    vllm_names=("ngram",),
)


class Index(Protocol):
    """Where each n-gram of one growing text last ended."""

    def continuation(self, tokens: Sequence[int], num: int) -> Copy:
        """`num` tokens that followed the longest known tail of `tokens`, which has only grown; (0, ()) if none."""


NewIndex = Callable[[int, int], Index]  # (ngram_min, ngram_max)


def select_index() -> NewIndex:
    """The suffix automaton where it is in C++, else the table; both find the same."""
    kit = select_suffix()
    return GramTable if kit.name == "reference" else automaton_index(kit)


def automaton_index(kit: SuffixKit) -> NewIndex:
    """Indexes that are suffix automata of this kit."""
    return lambda shortest, longest: _AutomatonIndex(kit, shortest, longest)


class NgramDrafter(Stateless):
    """Copies the tokens that followed the longest tail of ngram_max .. ngram_min tokens where it last occurred."""

    name = SPEC.name

    def __init__(self, max_draft_tokens: int, ngram_min: int, ngram_max: int, new_index: NewIndex) -> None:
        self.max_nodes = max_draft_tokens + 1
        self._sizes = (ngram_min, ngram_max)
        self._new_index = new_index
        self._indexes: dict[str, Index] = {}

    def begin(self, request: Request) -> None:
        """Start an empty index; it catches up when the request first drafts."""
        self._indexes[request.request_id] = self._new_index(*self._sizes)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Add the continuation of the last match as a chain."""
        for draft in drafts:
            index = self._indexes.get(draft.request.request_id) or self._restart(draft.request)
            self._add(draft, *index.continuation(draft.request.token_ids, draft.num_free))

    def _add(self, draft: Draft, length: int, tokens: Sequence[int]) -> None:
        """Hang a copy below the root; each right token makes the match, and with it the trust in it, longer."""
        doubts = [math.log1p(DOUBT / (length + place) ** 1.5) for place in range(len(tokens))]
        draft.add_chain(tokens, [-doubt for doubt in accumulate(doubts)])

    def _restart(self, request: Request) -> Index:
        self.begin(request)
        return self._indexes[request.request_id]

    def end(self, request_id: str) -> None:
        """Drop the index."""
        self._indexes.pop(request_id, None)


class _AutomatonIndex:
    """The suffix automaton of the text."""

    def __init__(self, kit: SuffixKit, shortest: int, longest: int) -> None:
        self._text = kit.text(longest, None)
        self._sizes = (shortest, longest)

    def continuation(self, tokens: Sequence[int], num: int) -> Copy:
        """See `Index`."""
        self._text.extend(tokens[self._text.size :])
        return self._text.copy(*self._sizes, num)


class GramTable:
    """Where each n-gram of one text last ended, without the text's own tail."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[Gram, int] = {}
        self._num_indexed = 0  # grams ending before this are in the table

    def continuation(self, tokens: Sequence[int], num: int) -> Copy:
        """See `Index`."""
        self._catch_up(tokens)
        for size in self._sizes:
            end = self._ends.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if end is not None:
                return size, self._copy(tokens, end, num)
        return 0, ()

    def _copy(self, tokens: Sequence[int], end: int, num: int) -> Sequence[int]:
        """`num` tokens from `end` on; a copy that reaches the tail continues with its own beginning."""
        period = len(tokens) - end
        return [tokens[end + i % period] for i in range(num)]

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Index every gram that ends before the last token (the tail itself is what we look for)."""
        for end in range(max(1, self._num_indexed), len(tokens)):
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = len(tokens)
