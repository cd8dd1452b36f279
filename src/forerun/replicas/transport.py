"""How orders reach replicas, and how one is lost.

Knows: what is asked of whoever carries orders. Does not know: Ray, how a replica is chosen, what is done about a loss.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from forerun.replicas.orders import Accepted, Refusal, ReplicaOrder
from forerun.replicas.replica import Said
from forerun.server.metrics import EngineLoad


class ReplicaLost(Exception):
    """The replica ended, cannot be reached, or refused what another may accept."""

    def __init__(self, why: str, refusal: Refusal | None = None) -> None:
        super().__init__(why)
        self.refusal = refusal
        self.accepted: Accepted | None = None  # what it had said when it took the order

    @property
    def died(self) -> bool:
        """Whether it ended, or its engine, after it had taken the order: the order may be why."""
        return self.accepted is not None and (self.refusal is None or self.refusal.code == "engine_error")


class Replicas(Protocol):
    """How orders reach replicas."""

    def run(self, order: ReplicaOrder) -> AsyncIterator[Said]:
        """What a replica, chosen by the order, says; raises ReplicaLost."""

    def loads(self) -> Mapping[str, EngineLoad]:
        """How busy the replicas are that could take an order, by name, as of a moment ago."""

    async def metrics_texts(self) -> Mapping[str, bytes]:
        """The metrics of each."""
