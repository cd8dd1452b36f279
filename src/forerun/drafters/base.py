"""The drafter protocol: who proposes continuations, and what the product knows of each drafter.

Knows: the methods, what a drafter may be built from, its spec. Does not know: verification, paging,
scheduling. A drafter catches up, then drafts: its own state may lag a request by any number of tokens, so nothing is
special about full acceptance or preemption.

A module of this package that has a `SPEC` is a drafter; `drafters.registry` finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, cast
from weakref import ref

from torch import Tensor

from forerun.config import DrafterConfig
from forerun.core import Request
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import LayerSpec, Model
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from forerun.weights.translation import Translation

NUM_APART: Final = 16  # adapters and salts a drafter learns for
_TREES_FROM_BYTES = 200_000_000  # weights that take some 10 ms to read, 20 times as long as preparing a tree level


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """Everything the product knows of a drafter: options, command line, server, benchmarks and docs read it here.

    `own_modules`: how many of this drafter's modules a target's own checkpoint, given by name or folder, contains that
    it can draft with; `holds_heads`: whether a folder holds heads for this drafter.
    """

    name: str
    build: Callable[[DrafterContext], Drafter]
    help: str  # what it guesses from
    options: tuple[str, ...] = ()  # fields of DrafterConfig it reads besides max_draft_tokens and adaptive
    max_draft_tokens: int = 5  # default; 0: it never drafts
    tree_width: int | None = None  # default; None: the option does not apply
    chains_if_quick: bool = False  # the default width is 1 if a pass of the target is very fast
    model: str = ""  # what the option `model` has to name, in words; "": it takes none
    own_modules: Callable[[str | Path], int] | None = None
    holds_heads: Callable[[Path], bool] | None = None
    needs_layers: bool = False  # needs the target's single layers, which transformers models do not give
    runs_layers: bool = False  # runs them, so that they must all be in this process
    reads_prediction: bool = False  # drafts from `Request.prediction`
    auto: int | None = None  # rank in `auto`: all without a model, and the first whose model is available
    vllm_names: tuple[str, ...] = ()  # methods of vLLM's --speculative-config

    @property
    def is_single(self) -> bool:
        """Whether it drafts, by itself: not `none`, and not a portfolio."""
        return self.max_draft_tokens > 0 and "members" not in self.options

    @property
    def drafts_with_model(self) -> bool:
        """Whether its model is a language model, not heads."""
        return bool(self.model) and self.own_modules is None and self.holds_heads is None


def _same_tokens(name: str) -> None:
    """Every draft model has the target's tokenizer."""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may be built from.

    `load_draft` loads a draft model by name; `translation` says how texts get to it and back, None where its tokens are
    the target's. `load_corpus` loads a file of texts, makes sure that it shares the target's vocabulary, and gives its
    token ids and the order of their suffixes. `folder` is where the target was read from, None for a model that never
    was in a file. `max_rows` bounds the rows of one pass.
    """

    spec: DrafterSpec
    options: DrafterConfig
    model: Model  # the target, as loaded
    folder: Path | None
    kernels: Kernels
    grower: TreeGrower
    block_size: int
    max_rows: int
    load_draft: Callable[[str], Model]
    load_corpus: Callable[[str], tuple[Any, Any]]
    translation: Callable[[str], Translation | None] = _same_tokens

    @property
    def width(self) -> int:
        """Children a node (1: chains), as the options say.

        By default, chains if a pass of the target is very fast: a level of a tree is prepared in Python, while a chain
        is drawn in one native call.
        """
        if self.options.tree_width is not None:
            return self.options.tree_width
        is_quick = self.kernels.device.type == "cpu" and self.model.weight_bytes < _TREES_FROM_BYTES
        return 1 if self.spec.chains_if_quick and is_quick else self.spec.tree_width or 1


class Observed(NamedTuple):
    """What one step computed for a request: span tokens and accepted nodes.

    `rows` are the rows of the step's batch that computed them: those of the span, then those of the nodes. `nodes` are
    the accepted nodes of the request's draft, root first, () when only a span was computed; `tokens` are the tokens
    emitted.
    """

    request: Request
    rows: Sequence[int]
    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrafterHealth:
    """A drafter's failed calls so far, and the seconds for which it is still paused after too many of them."""

    num_errors: int
    rest_s: float


class Drafter(Protocol):
    """Proposes continuations."""

    name: str
    max_nodes: int  # most nodes of a tree it can use, the root included; 1: never drafts
    hidden_layers: tuple[int, ...]  # target layers whose output it wants to observe
    kv_specs: tuple[LayerSpec, ...]  # KV layers it wants in the pool, under the request's own block table
    weight_bytes: int

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Where the pool keeps the target's layers, and this drafter's (one an entry of kv_specs); called once."""

    def begin(self, request: Request) -> None:
        """The prompt is known."""

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """A step is over: prompt chunks and accepted tokens alike. Called after request.token_ids has grown.

        `hidden` is empty where nobody wanted states (`EngineDrafter.wants_states`).
        """

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Grow the drafts' trees, all in one batched call; leaving a root alone means not to speculate."""

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """How many leading positions of the request have valid KV of this drafter in the pool.

        One number for each kind of KV that lags on its own (a portfolio lists its members' one after the other), ()
        without any. The row of position i may depend on tokens 0 .. i only, never on token i + 1: other requests
        with the same prefix will use it.
        """

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """The request is admitted, for the first time or again, on blocks that others computed.

        The target computes positions from request.num_computed on. `num_ready` is what the method `num_ready` returned
        for those blocks (short or () if nothing is known): less than num_computed if the drafter lagged, more if a
        copied block holds rows beyond it. `boundary` [sum of the widths of hidden_layers, in their order] is the hidden
        state of token num_computed - 1; None if it is not known, which happens only where num_ready goes beyond
        num_computed, the drafter wants no hidden states or is a `StatesReader`.
        """

    def end(self, request_id: str) -> None:
        """Finished, aborted or preempted: forget the request's state."""


class Asked(NamedTuple):
    """What a drafter's call did for one request."""

    request: Request
    num_read: int  # known tokens it had missed before, and read now
    num_drafts: int
    depth: int


class DraftCall(NamedTuple):
    """One call of a drafter, and its duration."""

    member: str
    seconds: float
    is_pending: bool  # the device draws during the target's pass; the seconds are those of enqueueing
    asked: Sequence[Asked]


class EngineDrafter(Drafter, Protocol):
    """What an engine asks for drafts: one drafter or several, whose calls are timed and whose errors are contained."""

    def wants_states(self, requests: Sequence[Request]) -> bool:
        """Whether the states of what the next pass computes for these requests are wanted; else it gives none."""

    @property
    def health(self) -> Mapping[str, DrafterHealth]:
        """How its drafters fare, by name."""

    def take_calls(self) -> Sequence[DraftCall]:
        """The calls of its drafters since the last call."""


class StatesReader(Protocol):
    """The extra method of drafters that do without hidden states where reading them is not worth its time.

    What has no states for some token of a request never drafts for it again.
    """

    def reads(self, request: Request) -> bool:
        """Whether the states of what the request's next pass computes are wanted."""


def states_reader(drafter: Drafter) -> StatesReader | None:
    """The drafter, if it sometimes does without."""
    return cast(StatesReader, drafter) if hasattr(drafter, "reads") else None


class LogitsReader(Protocol):
    """The extra method of drafters that learn from rows the target computed: of the passes for which `wants_logits`."""

    def observe_logits(self, token_ids: Tensor, logits: Tensor, firsts: Sequence[tuple[Request, int]]) -> None:
        """A pass is over: row i of logits [R, vocab_size] tells what follows token_ids[i], [R] int64.

        `firsts`: the requests in the order of their rows, and each one's first row. Rows of rejected nodes are among
        them. Called before `observe`; the logits are not the drafter's to keep.
        """


def logits_reader(drafter: Drafter) -> LogitsReader | None:
    """The drafter, if it wants to see the logits of the next pass."""
    return cast(LogitsReader, drafter) if getattr(drafter, "wants_logits", False) else None


Lesson = TypeVar("Lesson")
_Key = tuple[ref[object] | None, str, str]  # adapter, its folder, salt


def _key_of(request: Request) -> _Key:
    adapter = request.adapter
    return None if adapter is None else ref(adapter), _path_of(adapter), request.cache_salt


class Lessons(Generic[Lesson]):
    """What a drafter learns from requests for others, apart for each adapter and each `cache_salt`.

    That of the model alone without a salt is kept, and of the others the NUM_APART that were used last. What was
    learned without a salt can go to a later process (`state`, `recall`), or wait until its adapter is used again.
    """

    def __init__(
        self, make: Callable[[bool], Lesson], write: Callable[[Lesson], Any], read: Callable[[Lesson, Any], None]
    ) -> None:
        """`make`: something empty; told whether it is one of many, which should be small.

        `write`: a lesson as an array of int32; `read`: an empty lesson learns from such an array, or raises ValueError.
        """
        self._make, self._write, self._read, self._own = make, write, read, make(False)
        self._apart: OrderedDict[_Key, Lesson] = OrderedDict()
        self._recalled: dict[str, Any] = {}  # of adapters that nobody uses, by their folders

    def clear(self) -> None:
        """Forget all of it."""
        self._own = self._make(False)
        self._apart.clear()
        self._recalled.clear()

    def find(self, request: Request) -> Lesson | None:
        """As `of`; None if others have its room: where more run than there is room for, they do not take turns."""
        if request.adapter is None and not request.cache_salt:
            return self._own
        if (key := _key_of(request)) not in self._apart:
            return None
        self._apart.move_to_end(key)
        return self._apart[key]

    def of(self, request: Request) -> Lesson:
        """What may be used for this request, and taught by it. It may take another's room: once a request."""
        if (known := self.find(request)) is not None:
            return known
        for unloaded in [old for old in self._apart if old[0] is not None and old[0]() is None]:
            self._put_away(unloaded)
        self._apart[_key_of(request)] = lesson = self._make(True)
        if not request.cache_salt:
            self._recall(lesson, _path_of(request.adapter))
        if len(self._apart) > NUM_APART:
            self._put_away(next(iter(self._apart)))
        return lesson

    def state(self) -> dict[str, Any]:
        """What was learned without a salt, by the adapter's folder; "": without an adapter."""
        used = {path: lesson for (_, path, salt), lesson in self._apart.items() if path and not salt}
        found = {"": self._own, **used}
        return self._recalled | {path: self._write(lesson) for path, lesson in found.items()}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Begin with what `state` gave in an earlier process; call it before any request."""
        self._recalled = dict(state)
        self._recall(self._own, "")

    def _put_away(self, key: _Key) -> None:
        """Let others have the room; of what adapters taught without a salt the NUM_APART last are kept as arrays."""
        (_, path, salt), lesson = key, self._apart.pop(key)
        if path and not salt:
            self._recalled.pop(path, None)
            self._recalled[path] = self._write(lesson)
            for oldest in list(self._recalled)[:-NUM_APART]:
                del self._recalled[oldest]

    def _recall(self, lesson: Lesson, path: str) -> None:
        if path in self._recalled:
            with suppress(ValueError):
                self._read(lesson, self._recalled.pop(path))


def _path_of(adapter: object) -> str:
    return str(getattr(adapter, "path", ""))


class Stateless:
    """A base class for drafters without layers, hidden states or state of their own."""

    hidden_layers: tuple[int, ...] = ()
    kv_specs: tuple[LayerSpec, ...] = ()
    weight_bytes = 0

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Nothing of this drafter is in the pool."""

    def begin(self, request: Request) -> None:
        """Nothing to prepare."""

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Nothing to learn."""

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """No KV."""
        return ()

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Nothing to resume."""

    def end(self, request_id: str) -> None:
        """Nothing to forget."""
