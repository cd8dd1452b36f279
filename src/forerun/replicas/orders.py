"""A request on its way to a replica, and what can come back beside pieces of its answer.

Knows: which parts of a prepared request a replica needs to go on with it, on another clock and with no grammar
compiled. Does not know: how orders travel, who gets them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from forerun.core import Request, SamplingParams
from forerun.engine.outputs import RequestGroup
from forerun.frontend import Frontend
from forerun.replicas.routing import prefix_keys
from forerun.server.errors import ApiError
from forerun.server.grammar_compiler import GrammarCompiler
from forerun.server.grammar_masks import AfterThinking, PrefixMask
from forerun.server.structured import GrammarSpec

Tokens = tuple[int, ...]


class AskedGrammar(NamedTuple):
    """A grammar as it was asked for, and the tokens between which thinking is free of it, or behind which a call is."""

    spec: GrammarSpec
    is_wrapped: bool  # in `AfterThinking`
    start_id: int | None = None
    marks: tuple[Tokens, ...] = ()
    call_id: int | None = None


@dataclass(slots=True, kw_only=True)
class ReplicaOrder:
    """What a replica is to write: a request, and what its samples have already."""

    prompt: Tokens
    params: SamplingParams  # with a seed, and without the grammar
    grammar: AskedGrammar | None
    adapter: str | None
    options: Mapping[str, Any]  # of `Frontend.prepare`, times apart
    waited_s: float  # since the request arrived
    left_s: float | None  # until its deadline
    constrained: bool
    traced: bool
    written: dict[int, Tokens]  # tokens of the samples that have not ended, by index
    prefix: Sequence[int] = ()  # see `routing.prefix_keys`
    avoid: tuple[str, ...] = ()  # replicas that failed on it
    kind: str = ""  # of what wrote the tokens so far: another kind would not go on as that one


class Accepted(NamedTuple):
    """The first thing a replica says to an order."""

    replica: str
    waits: bool = False  # behind others: it does not compute it yet


class Refusal(NamedTuple):
    """An error for the client, or for whoever sent the order."""

    status: int
    message: str
    param: str | None
    code: str | None
    headers: dict[str, str]

    @staticmethod
    def of(error: ApiError) -> Refusal:
        """The error, as it travels."""
        return Refusal(error.status_code, error.message, error.param, error.code, dict(error.headers or {}))

    def error(self) -> ApiError:
        """The error again."""
        return ApiError(self.status, self.message, param=self.param, code=self.code, headers=self.headers)


class PromptFigures(NamedTuple):
    """Log-probabilities of the prompt's tokens, which only whole answers have."""

    logprobs: dict[int, Any]


@dataclass(slots=True)
class Ordered:
    """A prepared request, from which orders are made, one for each replica that works on it."""

    group: RequestGroup
    constrained: bool
    prefix: Sequence[int] = field(init=False)
    written: dict[int, Tokens] = field(init=False)
    _grammar: AskedGrammar | None = field(init=False)
    _params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        request = self.group.samples[0].request
        self.prefix = keys_of(request)
        self._grammar = _asked(request.params.grammar)
        self._params = replace(request.params, grammar=None, seed=request.seed)
        self.written = {sample.request.sample_index: () for sample in self.group.samples}
        for sample in self.group.samples:
            sample.request.params = self._params  # frees the process that would compute the masks here

    def order(self, avoid: Sequence[str], kind: str) -> ReplicaOrder:
        """What is still to be written."""
        sample = self.group.samples[0]
        request, now = sample.request, perf_counter()
        adapter = request.adapter
        return ReplicaOrder(
            prompt=request.prompt_token_ids,
            params=self._params,
            grammar=self._grammar,
            adapter=None if adapter is None else str(getattr(adapter, "name", adapter)),
            options={
                "cache_salt": request.cache_salt, "speculate": request.speculate, "drafter": request.drafter,
                "max_nodes": request.max_nodes, "priority": request.priority, "prediction": request.prediction,
            },
            waited_s=0.0 if request.arrival_s is None else now - request.arrival_s,
            left_s=None if request.deadline_s is None else request.deadline_s - now,
            constrained=self.constrained,
            traced=sample.trace is not None,
            written=dict(self.written),
            prefix=self.prefix,
            avoid=tuple(avoid),
            kind=kind,
        )  # fmt: skip


def keys_of(request: Request, answer: Tokens = ()) -> tuple[int, ...]:
    """See `routing.prefix_keys`: of a request's prompt, and of an answer behind it."""
    adapter = getattr(request.adapter, "name", "")
    return prefix_keys((*request.prompt_token_ids, *answer), f"{adapter} {request.cache_salt}")


def group_of(order: ReplicaOrder, llm: Frontend, grammars: GrammarCompiler) -> RequestGroup:
    """The request again, on this process's clock; raises what `GrammarCompiler.mask` and `Frontend.prepare` raise."""
    now = perf_counter()
    deadline_s = None if order.left_s is None else now + order.left_s
    params, asked = order.params, order.grammar
    if asked is not None:
        mask: PrefixMask | AfterThinking = (inner := grammars.mask(asked.spec, deadline_s))
        if asked.is_wrapped:
            mask = AfterThinking(inner, asked.start_id, *asked.marks, call_id=asked.call_id)
        params = replace(params, grammar=mask)
    times = {"arrival_s": now - order.waited_s, "deadline_s": deadline_s}
    group = llm.prepare(order.prompt, params, order.adapter, order.written, **order.options, **times)
    for sample in group.samples if order.traced else ():
        sample.trace = []
    return group


def _asked(grammar: object) -> AskedGrammar | None:
    if grammar is None:
        return None
    mask = grammar.inner if isinstance(grammar, AfterThinking) else grammar
    assert isinstance(mask, PrefixMask) and mask.spec is not None, "a grammar of the server's own compiler"
    if not isinstance(grammar, AfterThinking):
        return AskedGrammar(mask.spec, False)
    return AskedGrammar(mask.spec, True, grammar.start_id, tuple(map(tuple, grammar.marks)), grammar.call_id)
