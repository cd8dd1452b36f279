"""A drafter of one's own: guesses the token that most often followed the last one, in all texts seen so far.

forerun verify mini --drafters docs/examples/bigram.py:Bigram
forerun bench speed --drafters none,docs/examples/bigram.py:Bigram
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from forerun.core import Request
from forerun.drafters.base import DrafterContext, DrafterSpec, Stateless
from forerun.speculation.draft import Draft
from forerun.speculation.tree import ROOT

LEAST_CHANCE = 0.1  # of a whole chain; a guess below that is not worth a row


class Bigram(Stateless):
    """Chains of likeliest successors, with their chances."""

    name = "bigram"  # under which its drafts are counted

    def __init__(self, context: DrafterContext) -> None:
        self.max_nodes = context.options.max_draft_tokens + 1  # the root is a node too
        self._successors: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._num_read: dict[str, int] = {}  # tokens of each request that were learned from

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Read what is new of every request, then guess on from its last token."""
        for draft in drafts:
            self._catch_up(draft.request)
            self._guess(draft)

    def _catch_up(self, request: Request) -> None:
        start = self._num_read.get(request.request_id, 0)
        new = request.token_ids[max(start - 1, 0) :]  # the last one read has a successor now
        for token, successor in pairwise(new):
            self._successors[token][successor] += 1
        self._num_read[request.request_id] = len(request.token_ids)

    def _guess(self, draft: Draft) -> None:
        node, token, chance = ROOT, draft.request.token_ids[-1], 1.0
        while draft.num_free > 0 and (counts := self._successors.get(token)):
            [(token, count)] = counts.most_common(1)
            chance *= count / (counts.total() + 1)
            if chance < LEAST_CHANCE:
                return
            node = draft.add(node, token, math.log(chance))

    def end(self, request_id: str) -> None:
        """The request is over or starts again: forget how far it was read, keep what was learned."""
        self._num_read.pop(request_id, None)


SPEC = DrafterSpec(name="bigram", build=Bigram, help="what most often followed the last token", max_draft_tokens=4)
