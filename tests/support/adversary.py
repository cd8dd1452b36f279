"""A drafter that lies in every way it can: random trees, duplicates, garbage, and the truth with one token wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Observed, Stateless
from forerun.speculation.draft import Draft

Truth = Callable[[Request], Sequence[int]]  # what plain decoding goes on to say


class Adversary(Stateless):
    """Proposes whatever a seeded generator says; `truth` makes some of it right."""

    name = "adversary"

    def __init__(self, seed: int, vocab_size: int, max_nodes: int, truth: Truth | None = None) -> None:
        self.max_nodes = max_nodes
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._truth = truth

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        for seen in observed:
            assert len(seen.tokens) in (0, len(seen.nodes), len(seen.nodes) - 1)

    def propose(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            kind = self._random.choice(["nothing", "tree", "duplicates", "almost", "truth"])
            if kind == "tree":
                self._tree(draft)
            elif kind == "duplicates":
                self._duplicates(draft)
            elif kind in ("almost", "truth") and self._truth is not None:
                self._almost(draft, wrong=kind == "almost")

    def _token(self) -> int:
        return self._random.randrange(self._vocab_size)

    def _tree(self, draft: Draft) -> None:
        for _ in range(self._random.randint(0, draft.num_free)):
            draft.add(self._random.randrange(len(draft.tree)), self._token(), 0.0)

    def _duplicates(self, draft: Draft) -> None:
        token = self._token()
        for _ in range(draft.num_free):
            draft.add(self._random.randrange(len(draft.tree)), token, 0.0)

    def _almost(self, draft: Draft, wrong: bool) -> None:
        assert self._truth is not None
        known = draft.request.num_output
        tokens = list(self._truth(draft.request)[known : known + draft.num_free])
        if wrong and tokens:
            place = self._random.randrange(len(tokens))
            tokens[place] = (tokens[place] + 1) % self._vocab_size
        for _ in range(self._random.randint(0, 2)):  # siblings before the truth, so that its nodes are scattered
            if draft.num_free > len(tokens):
                draft.add(0, self._token(), 0.0)
        node = 0
        for token in tokens:
            if draft.num_free > 0:
                node = draft.add(node, token, 0.0)
