"""Token recycling: the candidates the target ranked next to its choices are next step's guesses.

Knows: the target's best successors of each token, as last seen, over all requests that may learn from each other. Does
not know: texts, contexts.

Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of LLMs with Token Recycling", arXiv
2408.08696: a table of the top 8 successors of every token, overwritten from every verified row whether it was
accepted or not, and a fixed tree of ranks that is filled from it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Lessons, Observed, Stateless
from forerun.kernels.device import to_host
from forerun.kernels.ops import Kernels, NoiseKeys
from forerun.speculation.draft import Draft
from forerun.speculation.tree import MAX_NODES, ROOT

NUM_SUCCESSORS: Final = 8
PATIENCE: Final = 2  # after so many steps without drafts,
# only one in so many steps is learned from: ranking logits costs time, and so do steps in which somebody reads them.
# A step of `mini` at rest with `auto` takes 721 us, with 8 here 781, without drafters 640 (EPYC, Zen 5).
SELDOM: Final = 32
UNKNOWN: Final = -1  # a successor nobody has seen yet
# Chances that a token is followed by its successor of each rank. Measured on the embedded model, between those at
# temperature 0 (0.74, 0.07, 0.02 ..) and 1 (0.20, 0.07, 0.03 ..); they shape the tree and are the nodes' survival.
RANK_CHANCE: Final = (0.45, 0.09, 0.04, 0.025, 0.018, 0.013, 0.01, 0.008)


class Branch(NamedTuple):
    """A node of the fixed tree: which successor of which node it holds."""

    parent: int
    rank: int
    log_survival: float


def build(context: DrafterContext) -> Drafter:
    """Token recycling over the target's vocabulary."""
    options = context.options
    return RecyclingDrafter(
        options.max_draft_tokens, context.model.vocab_size, context.kernels, options.across_requests
    )


SPEC = DrafterSpec(
    name="recycling",
    build=build,
    help="what the target ranked next to each token when it was last computed",
    options=("across_requests",),
    max_draft_tokens=16,
    auto=2,
)


class RecyclingDrafter(Stateless):
    """Fills a tree of ranks from the table of each token's last seen successors.

    All requests of one adapter and salt share a table; without `across_requests` the tables are emptied when a request
    begins and no other is running.
    """

    name = SPEC.name

    def __init__(self, max_draft_tokens: int, vocab_size: int, kernels: Kernels, across_requests: bool = True) -> None:
        self.max_nodes = max_draft_tokens + 1
        self._across_requests = across_requests
        self._running: set[str] = set()
        self._kernels = kernels
        self._num_idle = 0  # steps since drafts were wanted
        self._num_successors = min(NUM_SUCCESSORS, vocab_size)
        shape = vocab_size, self._num_successors
        self._tables = Lessons(lambda _: np.full(shape, UNKNOWN, dtype=np.int32), np.copy, _fill)  # best first
        self.lessons = self._tables if across_requests else None

    def begin(self, request: Request) -> None:
        """Empty the table if requests must not learn from earlier ones."""
        if not self._across_requests and not self._running:
            self._tables.clear()
        self._running.add(request.request_id)
        self._tables.of(request)

    def end(self, request_id: str) -> None:
        """One request less."""
        self._running.discard(request_id)

    @property
    def wants_logits(self) -> bool:
        """Not in every step while nobody wants drafts."""
        return self._num_idle <= PATIENCE or self._num_idle % SELDOM == 0

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Count the step."""
        self._num_idle += 1

    def observe_logits(self, token_ids: Tensor, logits: Tensor, firsts: Sequence[tuple[Request, int]]) -> None:
        """Overwrite the successors of token_ids [R] by the best of logits [R, vocab_size]; later rows win."""
        num_rows = token_ids.shape[0]
        none = torch.zeros(num_rows, dtype=torch.int64)
        plain = torch.zeros(num_rows, dtype=torch.float64)  # temperature 0: the logits themselves
        best, _ = self._kernels.gumbel_topk(logits, plain, NoiseKeys(none, none, none), self._num_successors)
        ids, successors = token_ids.numpy(), to_host(best).numpy()
        for (request, first), end in zip(firsts, [*[first for _, first in firsts[1:]], num_rows], strict=True):
            if (table := self._tables.find(request)) is not None:
                table[ids[first:end]] = successors[first:end]

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Fill as much of the fixed tree as there is room for and successors are known."""
        self._num_idle = 0
        for draft in drafts:
            self._fill(draft)

    def _fill(self, draft: Draft) -> None:
        table = self._tables.find(draft.request)
        if table is None:
            return
        nodes: list[int | None] = [ROOT]  # where the branches went, None for those nothing is known for
        for parent, rank, log_survival in islice(template(), 1, draft.num_wanted + 1):
            node = nodes[parent]
            token = UNKNOWN if node is None else self._successor(table, draft.tree.tokens[node], rank)
            if node is None or token == UNKNOWN:
                nodes.append(None)
            else:
                nodes.append(draft.add(node, token, log_survival))

    def _successor(self, table: Any, token: int, rank: int) -> int:
        return int(table[token, rank]) if rank < self._num_successors else UNKNOWN


def _fill(table: Any, earlier: Any) -> None:
    """Take over a table. Raises ValueError for one of another vocabulary."""
    if earlier.shape != table.shape or earlier.min() < UNKNOWN or earlier.max() >= len(table):
        raise ValueError("a table of another vocabulary")
    table[:] = earlier


@cache
def template() -> tuple[Branch, ...]:
    """The fixed tree of MAX_NODES nodes, most probable first: its first n nodes are the best tree of n nodes."""
    branches: list[Branch] = []
    waiting = [(0.0, -1, 0)]  # (-log survival, parent, rank); the root is nobody's successor
    while len(branches) < MAX_NODES:
        cost, parent, rank = heapq.heappop(waiting)
        node = len(branches)
        branches.append(Branch(parent, rank, -cost))
        for child_rank, chance in enumerate(RANK_CHANCE):
            heapq.heappush(waiting, (cost - math.log(chance), node, child_rank))
    return tuple(branches)
