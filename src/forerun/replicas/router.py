"""Ray Serve's choice among replicas, made by `routing`.

Knows: Serve's interface for routers, which is public, though it may still change (tried with Ray 2.60). Does not know:
replicas. Serve's own routers look at the number of requests alone, or at characters of prompts. Serve sends this module
to others as it is, so it must hold nothing but the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from ray.serve.request_router import RequestRouter

from forerun.replicas import routing
from forerun.replicas.orders import ReplicaOrder


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends an order where its prefix is, unless that replica has too much to do, or from one to the next."""

    def initialize_state(self, deployment: str, by_prefix: bool = True) -> None:
        """Called by Serve; `deployment`: whose replicas these are."""
        self._by_prefix = by_prefix
        self._routing = routing.PrefixRouting()
        self._turn = count()
        self._open: dict[str, tuple[str, int]] = {}  # samples by order, which Serve names
        routing.ROUTERS[self.app_name, deployment] = self

    async def choose_replicas(self, candidate_replicas: Sequence[Any], pending_request: Any = None) -> list[list[Any]]:
        """The replicas in the order in which they are asked. Called by Serve."""
        order = _order_in(pending_request)
        if order is None or not candidate_replicas:
            return [list(candidate_replicas)]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = dict.fromkeys(by_name, 0.0)
        for name, num_samples in list(self._open.values()):
            loads[name] = loads.get(name, 0.0) + num_samples
        loads = {name: loads[name] for name in by_name}
        names = self._routing.rank(order.prefix, loads, order.avoid) if self._by_prefix else self._next(loads, order)
        return [[by_name[name]] for name in names]

    def _next(self, names: Mapping[str, float], order: ReplicaOrder) -> list[str]:
        listed, start = sorted(names), next(self._turn) % len(names)
        return sorted([*listed[start:], *listed[:start]], key=lambda name: name in order.avoid)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """An order is on its way. Called by Serve."""
        order = _order_in(pending_request)
        if order is not None:
            self._routing.sent(order.prefix, replica_id.unique_id)
            self._open[pending_request.metadata.internal_request_id] = replica_id.unique_id, len(order.written)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """An order has ended, however. Called by Serve."""
        self._open.pop(internal_request_id, None)

    def update_replicas(self, replicas: Sequence[Any]) -> None:
        """Called by Serve when replicas come or go."""
        super().update_replicas(replicas)
        self._routing.keep({replica.replica_id.unique_id for replica in replicas})

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Called by Serve."""
        super().on_replica_actor_died(replica_id)
        self._routing.gone(replica_id.unique_id)


def _order_in(pending_request: Any) -> ReplicaOrder | None:
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first if isinstance(first, ReplicaOrder) else None
