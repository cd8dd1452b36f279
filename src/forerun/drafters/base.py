"""The drafter protocol: who proposes continuations.

Knows: the five verbs. Does not know: verification, paging, scheduling. A drafter catches up, then drafts: its own
state may lag a request by any number of tokens, so nothing is special about full acceptance or preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.core import Request
from forerun.models.base import LayerSpec
from forerun.speculation.growth import Draft


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

    def begin(self, request: Request) -> None:
        """The prompt is known."""

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """A step is over: prompt chunks and accepted tokens alike. Called after request.token_ids has grown."""

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Grow the drafts' trees, all in one batched call; leaving a root alone means not to speculate."""

    def end(self, request_id: str) -> None:
        """Finished, aborted or preempted: forget the request's state."""
