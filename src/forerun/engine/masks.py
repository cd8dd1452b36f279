"""Which requests a step can choose tokens for: those whose grammar mask has arrived or arrives in a moment.

Knows: requests and their masks. Does not know: grammars, what else a step needs. Masks are computed in other
processes; a request that has to wait longer for one is left out of steps until it arrives, so that others do not wait.

Where a grammar leaves one text to go on with, its tokens are drafts that nobody has to guess (jump-forward decoding:
Zheng et al., SGLang, arXiv 2312.07104). They stand in the tree before any drafter is asked, in the name of GRAMMAR. The
target checks them like all drafts, because a text can be cut into tokens in several ways.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from operator import index
from time import perf_counter
from typing import Final

from forerun.core import Request
from forerun.drafters.base import EngineDrafter
from forerun.errors import LogitsError
from forerun.speculation.draft import Draft
from forerun.speculation.sampling import WAIT_S, AsyncGrammarMask, give_up_at, grammar_ready, mask_ready
from forerun.speculation.tree import ROOT

GRAMMAR: Final = "grammar"  # who is said to have drafted forced tokens
MAX_FORCED: Final = 16  # forced tokens drafted in a step; the others follow in the next
# How likely a forced token is until some were seen. The last one may be cut otherwise, together with what follows.
FORCED_CHANCE, LAST_CHANCE = 0.95, 0.6

log = logging.getLogger("forerun.engine")


class MaskWaits:
    """Tracks which requests wait for a mask. Only those of the last step delay a step: a first mask may take long."""

    def __init__(self) -> None:
        self._late: set[str] = set()  # requests that were left out of a step
        self._failed: list[tuple[Request, LogitsError]] = []
        self._unforced: set[str] = set()  # requests whose grammars could not say what is forced

    def begin_step(self, running: Sequence[Request]) -> None:
        """Wait a moment for masks that no step has waited for yet."""
        asked = [request for request in running if not self._ready(request, 0.0)]
        if not asked:
            return
        give_up = give_up_at()
        for request in asked:
            if request.request_id not in self._late and not self._ready(request, max(0.0, give_up - perf_counter())):
                self._late.add(request.request_id)

    def may_choose(self, request: Request) -> bool:
        """Whether the request's next token can be chosen in this step."""
        is_ready = self._ready(request, 0.0)
        (self._late.discard if is_ready else self._late.add)(request.request_id)
        return is_ready

    def wait(self, running: Iterable[Request]) -> None:
        """No request can continue: wait for a mask, but not for long, since new requests may arrive."""
        late = next((request for request in running if not self._ready(request, 0.0)), None)
        if late is not None:
            self._ready(late, WAIT_S)

    def _ready(self, request: Request, wait_s: float) -> bool:
        try:
            return grammar_ready(request, request.output_token_ids, wait_s)
        except LogitsError as error:
            self._failed.append((request, error))
            return False

    def take_failed(self) -> list[Request]:
        """Unfinished requests whose masks will never come, ended with their errors."""
        ended = []
        for request, error in self._failed:
            if request.finish_reason is None:
                request.finish_reason, request.error = "error", error
                ended.append(request)
        self._failed.clear()
        return ended

    def end(self, request: Request) -> None:
        """The request is over."""
        self._late.discard(request.request_id)
        self._unforced.discard(request.request_id)

    # -- forced tokens ------------------------------------------------------------------------------------------

    def forced_tokens(self, request: Request, vocab_size: int) -> Sequence[int]:
        """Tokens the request's grammar leaves no choice about, as many as may be drafted; () if it does not say.

        A grammar that fails here is asked no more: that costs drafts, not the request.
        """
        grammar = request.params.grammar
        if grammar is None or not request.speculate or request.request_id in self._unforced:
            return ()
        try:
            tokens = _forced_by(grammar, request.output_token_ids, vocab_size)
        except Exception:
            self._unforced.add(request.request_id)
            log.exception("request %s: its grammar failed to say which tokens are forced", request.request_id)
            return ()
        return tokens if request.max_nodes is None else tokens[: request.max_nodes - 1]

    def with_forced(
        self, max_nodes: Callable[[Request], int], drafter: EngineDrafter, vocab_size: int
    ) -> Callable[[Request], int]:
        """The same nodes for each request, or more if its forced tokens need them."""
        if not may_force(drafter):
            return max_nodes
        return lambda request: max(max_nodes(request), 1 + len(self.forced_tokens(request, vocab_size)))

    def draft_forced(self, drafts: Iterable[Draft], drafter: EngineDrafter, vocab_size: int) -> None:
        """Draft what is forced, as a chain below the root, as far as there is room."""
        for draft in drafts if may_force(drafter) else ():
            tokens = self.forced_tokens(draft.request, vocab_size)[: draft.room]
            if tokens:
                draft.ask(GRAMMAR, len(tokens), 0.0, may_be_pending=False)
                node, chance = ROOT, 0.0
                for place, token in enumerate(tokens):
                    chance += math.log(FORCED_CHANCE if place < len(tokens) - 1 else LAST_CHANCE)
                    node = draft.add(node, token, chance)
                proposal = draft.proposal_of(GRAMMAR)
                draft.believe(proposal, draft.plan.log_chances(draft.request, proposal))


def may_force(drafter: EngineDrafter) -> bool:
    """Not with a drafter that has weights: under masks it draws forced tokens itself, and goes on behind them."""
    return drafter.max_nodes > 1 and drafter.weight_bytes == 0


def ask_ahead(drafts: Iterable[Draft]) -> None:
    """Ask for the masks of all nodes, so that they are computed during the pass."""
    for draft in drafts:
        grammar = draft.request.params.grammar
        if grammar is not None and isinstance(grammar, AsyncGrammarMask):
            for node in draft.verified[1:]:
                mask_ready(draft.request, draft.tree.path_tokens(node))


def _forced_by(grammar: object, output_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """What the grammar says is forced, up to the first that is no token. Raises whatever the grammar does."""
    forced = getattr(grammar, "forced", None)
    tokens = () if forced is None else forced(output_token_ids)[:MAX_FORCED]
    return list(takewhile(lambda token: 0 <= token < vocab_size, map(index, tokens)))
