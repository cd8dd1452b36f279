"""Steps in which all running requests decode and nothing about them is unusual: few calls, one of them native.

Knows: which requests and engines that holds for, and what such a step has to do. Does not know: how tokens are chosen,
what policies and drafters do. `Engine._go_on` is the reference and takes over where drafts turn out to be no chains:
it does the same phase by phase. Around a small model's pass it is the number of Python's calls that takes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Observed, logits_reader
from forerun.engine.outputs import RequestGroup, SampleRecord
from forerun.kernels.draws import PlainChain
from forerun.models.base import CommittedPath
from forerun.models.decoder import Decoder
from forerun.policy.base import Outcome, StepPlan
from forerun.runtime.runner import Chosen, chain_stepper
from forerun.speculation.draft import Draft
from forerun.speculation.noise import Purpose, stream_id
from forerun.speculation.sampling import is_plain
from forerun.speculation.tree import MAX_NODES
from forerun.speculation.verifier import CoupledVerifier

if TYPE_CHECKING:
    from forerun.engine.engine import Engine

_PATHS: Final = tuple(tuple(range(num)) for num in range(MAX_NODES + 1))  # the first nodes of a chain
_NOBODY: Final = ("",)  # who drafted the token of a plain step


@dataclass(frozen=True, slots=True)
class _Entry:
    """A usual request, and what does not change while it decodes."""

    request: Request
    record: SampleRecord
    stream: int  # of the noise its tokens are chosen with


class SteadySteps:
    """Makes such steps, and says which steps are none."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Other requests will run."""
        self._requests: list[Request] = []  # that ran in the last step
        self._entries: list[_Entry] = []  # theirs; none if one of them is unusual
        self.alone: list[Draft] = []  # their roots, in a step without drafts; nobody reads which tokens these hold
        self._groups: list[RequestGroup] = []  # theirs, each once
        self._commits: Callable[[Sequence[CommittedPath]], None] | None = None  # of a model with a state of its own

    def plan(self, engine: Engine, wanted: StepPlan) -> list[Draft] | None:
        """The drafts of such a step, which are still to grow; None, and nothing has happened, if it is none."""
        running = engine.scheduler.running
        if running != self._requests:
            self._meet(engine, running)
        is_usual = bool(self._entries) and logits_reader(engine.drafter) is None
        num_nodes = engine.scheduler.decode_all(wanted.max_nodes) if is_usual else None
        if num_nodes is None:
            return None
        engine.timings.lap("schedule_s")
        if max(num_nodes) == 1:
            return self.alone
        return [Draft(entry.request, num, False, wanted) for entry, num in zip(self._entries, num_nodes, strict=True)]

    def _meet(self, engine: Engine, running: Sequence[Request]) -> None:
        """Keep what does not change while these run."""
        self._requests, self._entries = list(running), _usual(engine, running)
        self.alone = [Draft(request, 1) for request in running]
        self._groups = list({request.parent_id: engine.groups[request.parent_id] for request in running}.values())
        self._commits = None if type(engine.model) is Decoder else engine.model.commit

    def step(self, engine: Engine, drafts: Sequence[Draft]) -> list[RequestGroup] | None:
        """What follows drafting -> the groups that changed; None if drafts are no chains or have too many rows.

        None, too, where logits are not usable: then a pass has run, and the phases run it again over the same rows.
        Nothing is committed in any of these cases.
        """
        chains = list[PlainChain]()
        for entry, draft in zip(self._entries, drafts, strict=True):
            request, params = entry.request, entry.request.params
            tokens = request.token_ids[-1:] if drafts is self.alone else draft.chain
            if tokens is None:
                return None
            position, seed = request.num_computed, request.seed
            chains.append(PlainChain(request.block_ids, position, tokens, params.temperature, seed, entry.stream))
        chosen = self._decide(engine, chains)
        return None if chosen is None else self._commit(engine, drafts, chains, chosen)

    def _decide(self, engine: Engine, chains: Sequence[PlainChain]) -> Chosen | None:
        """Run the pass and choose tokens from it; None as for `step`."""
        stepper = chain_stepper(engine.runner_for(self._requests))
        chosen = None if stepper is None else stepper.choose(chains)
        if chosen is None:
            return None
        if engine.meanwhile is not None:
            engine.meanwhile()
        engine.timings.lap_pass(chosen.pass_s)
        return chosen

    def _commit(
        self, engine: Engine, drafts: Sequence[Draft], chains: Sequence[PlainChain], chosen: Chosen
    ) -> list[RequestGroup]:
        """Apply what was chosen, and end the step."""
        choices = chosen.choices
        observed, outcomes, num_rows, has_ended = list[Observed](), list[Outcome](), 0, False
        for entry, draft, chain, (num_accepted, token) in zip(self._entries, drafts, chains, choices, strict=True):
            request, record = entry.request, entry.record
            tokens = (*chain.tokens[1 : num_accepted + 1], token)
            num_taken = record.text.take(tokens)
            nodes = _PATHS[min(num_accepted, num_taken) + 1]
            request.num_computed += len(nodes)
            if len(chain.tokens) == 1:
                record.figures.num_plain_steps += 1
                record.emitted(_NOBODY, ())
            else:
                record.drafted(draft, nodes[1:])
                record.emitted([*draft.tree.sources[1 : len(nodes)], ""][:num_taken], ())
            seen = Observed(request, range(num_rows, num_rows + len(nodes)), nodes, tokens[:num_taken])
            observed.append(seen)
            outcomes.append(Outcome(request, draft, seen.tokens))
            num_rows += len(chain.tokens)
            has_ended = has_ended or request.finish_reason is not None
        if self._commits is not None:
            self._commits([CommittedPath(seen.request.request_id, seen.nodes) for seen in observed])
        engine.drafter.observe(observed, chosen.hidden)
        _publish(engine, observed, chosen.hidden)
        engine.timings.lap("commit_s")
        engine.learn(outcomes, num_rows, 0)
        requests, changed = self._requests, self._groups
        if has_ended or engine.scheduler.deadlines.any:
            changed = engine.finish(requests, requests)
        engine.timings.end()
        return list(changed)


def _usual(engine: Engine, requests: Sequence[Request]) -> list[_Entry]:
    """What is kept of requests that have nothing unusual; none if one has, or the engine."""
    is_coupled, is_native = type(engine.verifier) is CoupledVerifier, chain_stepper(engine.runner) is not None
    if not (is_coupled and is_native):
        return []
    entries = [
        _Entry(request, engine.records[request.request_id], stream_id(request.sample_index, Purpose.TARGET))
        for request in requests
    ]
    return entries if all(map(_is_usual, entries)) else []


def _is_usual(entry: _Entry) -> bool:
    """Its tokens are chosen by the temperature alone, and nobody wants to know more than the tokens."""
    request, params = entry.request, entry.request.params
    wants_more = params.logprobs is not None or request.prompt_logprobs is not None or entry.record.trace is not None
    return is_plain(params) and request.adapter is None and not wants_more


def _publish(engine: Engine, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
    """Offer blocks to others: those that this step has filled, and all in which a drafter's own rows may have come."""
    scheduler, size = engine.scheduler, engine.kv_cache.block_size
    if scheduler.prefix_cache is None:
        return
    lags = bool(engine.drafter.kv_specs)
    for seen in observed:
        request, rows = seen.request, seen.rows
        has_filled = request.num_computed // size > (request.num_computed - len(rows)) // size
        if has_filled:
            engine.keep_boundaries(seen, hidden)
        if lags or has_filled:
            scheduler.publish(request, engine.drafter.num_ready(request))
