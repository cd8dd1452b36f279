"""A drafter that may fail: whatever it raises or proposes, its requests go on without it.

Knows: which requests a drafter failed for and what a usable tree is. Does not know: how drafters work, verification.
The text never depends on drafts, so a drafter that is left out costs its requests speed and nothing else.

What a failing drafter has drawn stays in the tree where the distribution it was drawn from is recorded: to drop drawn
nodes by what they are would change the distribution of what the rejection rule puts out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterHealth, Observed, logits_reader
from forerun.errors import ConfigError
from forerun.kernels.ops import LayerKV
from forerun.speculation.draft import Draft
from forerun.speculation.tree import ROOT

MAX_ERRORS: Final = 3  # after so many failed calls a drafter rests
FIRST_REST_S: Final = 60.0  # the first time; twice as long each time it fails again
LONGEST_REST_S: Final = 3600.0
GOOD_S: Final = 600.0  # without an error, after which earlier ones count no more
NEEDED: Final = ("name", "max_nodes", "hidden_layers", "kv_specs", "weight_bytes", "propose", "attach", "begin",
                 "observe", "num_ready", "resume", "end")  # fmt: skip

log = logging.getLogger("forerun.drafters")


class GuardedDrafter:
    """The drafter inside, as long as it behaves.

    A call that raises, or a tree that cannot be verified, is logged (the first with its traceback) and puts the
    drafter's name into `failed_drafters` of the requests concerned, for which it is not asked again. After MAX_ERRORS
    such calls it rests: requests of that time count as failed, too, since it saw only part of them. Then it is tried
    with new requests, and one error sends it back for twice as long. Raises ConfigError if `inner` lacks part of the
    protocol.
    """

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        _check_protocol(inner)
        self.inner = inner
        self.name = inner.name
        self.max_nodes = inner.max_nodes
        self.hidden_layers = inner.hidden_layers
        self.kv_specs = inner.kv_specs
        self.weight_bytes = inner.weight_bytes
        self._reader = logits_reader(inner)
        self.wants_logits = self._reader is not None
        self.num_errors = 0  # in all
        self._num_counted = 0  # of them, that count towards the next rest
        self._rests_until = self._erred_at = -math.inf
        self._rest_s = FIRST_REST_S
        self._vocab_size = vocab_size
        self._num_kinds = 0  # of KV that lags on its own, as `num_ready` said last

    @property
    def is_off(self) -> bool:
        """It failed too often to be asked now."""
        return time.monotonic() < self._rests_until

    @property
    def health(self) -> DrafterHealth:
        """How it fares."""
        return DrafterHealth(self.num_errors, max(0.0, self._rests_until - time.monotonic()))

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Pass it on; nothing runs yet, so an error here is the user's to see."""
        self.inner.attach(target, own)

    def begin(self, request: Request) -> None:
        """Pass it on, in a rest too: every `end` has had its `begin`."""
        if self.is_off:
            self._leave(request)
        self._try("begin", [request], lambda: self.inner.begin(request))

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Pass on what concerns requests it still drafts for."""
        seen = [each for each in observed if self._drafts_for(each.request)]
        if seen:
            self._try("observe", [each.request for each in seen], lambda: self.inner.observe(seen, hidden))

    def observe_logits(self, token_ids: Tensor, logits: Tensor) -> None:
        """Pass it on to a drafter that wants logits."""
        reader = self._reader
        if reader is not None and not self.is_off:
            self._try("observe_logits", [], lambda: reader.observe_logits(token_ids, logits))

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Let it draft for the requests it has not failed; take back what cannot be verified."""
        asked = [draft for draft in drafts if self._drafts_for(draft.request)]
        if not asked:
            return
        worked = self._try("propose", [draft.request for draft in asked], lambda: self.inner.propose(asked))
        found = [(draft, find_nonsense(draft, self._vocab_size)) for draft in asked]
        nonsense = [(draft, what) for draft, what in found if what is not None]
        if nonsense and worked:
            self._fail("propose", [draft.request for draft, _ in nonsense], ValueError(nonsense[0][1]))
        for draft, what in found:
            if what is not None or not (worked or _was_drawn(draft)):
                draft.take_back()

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """As it says; nothing is ready of a request it failed for."""
        said: list[tuple[int, ...]] = []
        self._try("num_ready", [request], lambda: said.append(self.inner.num_ready(request)))
        if said:
            self._num_kinds = len(said[0])
        return said[0] if said and self._drafts_for(request) else (0,) * self._num_kinds

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Pass it on."""
        if self._drafts_for(request):
            self._try("resume", [request], lambda: self.inner.resume(request, num_ready, boundary))

    def end(self, request_id: str) -> None:
        """Pass it on, for failed requests too: it may hold memory for them."""
        self._try("end", [], lambda: self.inner.end(request_id))

    def _drafts_for(self, request: Request) -> bool:
        if self.is_off:
            self._leave(request)
        return self.name not in request.failed_drafters

    def _leave(self, request: Request) -> None:
        if self.name not in request.failed_drafters:
            request.failed_drafters = (*request.failed_drafters, self.name)

    def _try(self, verb: str, requests: Sequence[Request], call: Callable[[], None]) -> bool:
        """Call it; whether that went well."""
        try:
            call()
        except Exception as error:  # whatever a drafter raises
            self._fail(verb, requests, error)
            return False
        return True

    def _fail(self, verb: str, requests: Sequence[Request], error: Exception) -> None:
        self.num_errors += 1
        for request in requests:
            self._leave(request)
        if self.is_off:
            return  # what its `end` raises now was said before
        self._count_error()
        left = f"it rests for {self.health.rest_s:.0f} s" if self.is_off else f"it leaves the {len(requests)} concerned"
        said = f"drafter {self.name} failed in {verb}: {type(error).__name__}: {error}; {left}; the text is the same"
        log.error(said, exc_info=error if self.num_errors == 1 else None)

    def _count_error(self) -> None:
        """Rest if there were too many; those before a good while without any are forgotten."""
        now = time.monotonic()
        if now - max(self._erred_at, self._rests_until) > GOOD_S:
            self._num_counted, self._rest_s = 0, FIRST_REST_S
        self._num_counted, self._erred_at = self._num_counted + 1, now
        if self._num_counted >= MAX_ERRORS:
            self._rests_until = now + self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)


def find_nonsense(draft: Draft, vocab_size: int) -> str | None:
    """What makes a proposed tree unusable, None if nothing does."""
    if draft.pending is not None:
        return None  # what a device drew
    tree = draft.tree
    if len(tree) > draft.max_nodes:
        return f"the tree has {len(tree)} nodes, but {draft.max_nodes} were allowed"
    if tree.tokens[ROOT] != draft.request.token_ids[-1]:
        return f"the root holds token {tree.tokens[ROOT]}, but the last known token is {draft.request.token_ids[-1]}"
    strange = next((t for t in tree.tokens if not isinstance(t, int) or not 0 <= t < vocab_size), None)
    if strange is not None:
        return f"the tree holds token {strange!r}; the vocabulary is 0 to {vocab_size - 1}, as int"
    if len(draft.survival) != len(tree) or any(map(math.isnan, draft.survival)):
        return f"{len(draft.survival)} chances for {len(tree)} nodes, or one that is no number: add nodes by Draft.add"
    return None


def _was_drawn(draft: Draft) -> bool:
    """Some node's children were drawn from a distribution that counts in verification."""
    if draft.pending is not None:
        return False
    return any(draft.tree.proposal(node) is not None for node in range(len(draft.tree)))


def _check_protocol(drafter: Drafter) -> None:
    missing = [name for name in NEEDED if not hasattr(drafter, name)]
    if missing:
        raise ConfigError(
            f"{type(drafter).__name__} is no drafter: it lacks {', '.join(missing)}; inherit "
            "forerun.drafters.base.Stateless and set name, max_nodes and propose"
        )
