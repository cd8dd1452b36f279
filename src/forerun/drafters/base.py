"""The drafter protocol: who proposes continuations.

Knows: the verbs, and what a drafter may be built from. Does not know: verification, paging, scheduling. A drafter
catches up, then drafts: its own state may lag a request by any number of tokens, so nothing is special about full
acceptance or preemption.

Every module of this package has a function `build(context)`; `drafters.registry` gives it a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from forerun.config import DrafterConfig
from forerun.core import Request
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import LayerSpec, Model
from forerun.speculation.growth import Draft, TreeGrower


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may be built from.

    `load_draft` loads a draft model by name and makes sure that it shares the target's vocabulary. `folder` is where
    the target was read from, None for a model that never was in a file. `max_rows` bounds the rows of one pass.
    """

    options: DrafterConfig
    model: Model  # the target, as loaded
    folder: Path | None
    kernels: Kernels
    grower: TreeGrower
    block_size: int
    max_rows: int
    load_draft: Callable[[str], Model]


@dataclass(frozen=True, slots=True)
class Observed:
    """What one step made known of a request: computed span tokens and accepted nodes.

    `first_row` is the row of the step's batch where the request's rows begin (span first, then nodes); `nodes` are
    the accepted tree nodes, root first, () when only a span was computed; `tokens` are the tokens emitted.
    """

    request: Request
    first_row: int
    num_span: int
    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


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
        """A step is over: prompt chunks and accepted tokens alike. Called after request.token_ids has grown."""

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Grow the drafts' trees, all in one batched call; leaving a root alone means not to speculate."""

    def end(self, request_id: str) -> None:
        """Finished, aborted or preempted: forget the request's state."""


class Stateless:
    """What a drafter without layers, hidden states or memory of its own need not write: a base class to inherit."""

    hidden_layers: tuple[int, ...] = ()
    kv_specs: tuple[LayerSpec, ...] = ()
    weight_bytes = 0

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Nothing of this drafter is in the pool."""

    def begin(self, request: Request) -> None:
        """Nothing to prepare."""

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Nothing to learn."""

    def end(self, request_id: str) -> None:
        """Nothing to forget."""
