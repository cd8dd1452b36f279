"""Which requests a step can choose tokens for: those whose grammar mask has arrived or arrives in a moment.

Knows: requests and their masks. Does not know: grammars, what else a step needs. Masks are computed in other
processes; a request that has to wait longer for one is left out of steps until it arrives, so that others do not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

from forerun.core import Request
from forerun.errors import GrammarError
from forerun.speculation.draft import Draft
from forerun.speculation.sampling import WAIT_S, AsyncGrammarMask, give_up_at, mask_ready


class MaskWaits:
    """Tracks which requests wait for a mask. Only those of the last step delay a step: a first mask may take long."""

    def __init__(self) -> None:
        self._late: set[str] = set()  # requests that were left out of a step
        self._failed: list[tuple[Request, GrammarError]] = []

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
        grammar = request.params.grammar
        if grammar is None or not isinstance(grammar, AsyncGrammarMask):  # isinstance takes 10 us
            return True
        try:
            return grammar.ready(request.output_token_ids, wait_s)
        except GrammarError as error:
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


def ask_ahead(drafts: Iterable[Draft]) -> None:
    """Ask for the masks of all nodes, so that they are computed during the pass."""
    for draft in drafts:
        grammar = draft.request.params.grammar
        if grammar is not None and isinstance(grammar, AsyncGrammarMask):
            for node in draft.verified[1:]:
                mask_ready(draft.request, draft.tree.path_tokens(node))
