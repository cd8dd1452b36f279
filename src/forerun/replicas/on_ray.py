"""Replicas as actors of Ray Serve: who starts them, which of them gets an order, and when one counts as lost.

Knows: Ray. Does not know: how answers are made, how one goes on elsewhere, HTTP. `serve run forerun.replicas.on_ray:app
config=FILE.yaml` deploys it, as `forerun deploy FILE.yaml` does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from fastapi import FastAPI
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

from forerun.replicas.deployment import Deployment, read_deployment
from forerun.replicas.fleet import Fleet, RemoteFrontend, described_by
from forerun.replicas.orders import ReplicaOrder
from forerun.replicas.prefill import PromptReader
from forerun.replicas.replica import Description, Replica, Said
from forerun.replicas.routing import ROUTERS
from forerun.replicas.transport import ReplicaLost
from forerun.server import logs
from forerun.server.app import application
from forerun.server.memory import bound_arenas
from forerun.server.metrics import EngineLoad

STATS_S: Final = 2.0  # how often replicas tell how busy they are
METRICS_S: Final = 5.0  # for them to hand over their metrics
ENGINE: Final = "Engine"  # the deployment of the replicas that answer, in an application
PREFILL: Final = "Prefill"  # of those that read prompts for them
_IDLE: Final = EngineLoad(0, 0, 0.0, True, {}, 0, {})  # what a replica has to do that has not told yet


class RayReplicas:
    """See `transport.Replicas`."""

    def __init__(self, handle: Any, application: str, deployment: str) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._served = application, deployment

    async def run(self, order: ReplicaOrder) -> AsyncIterator[Said]:
        """What a replica, chosen by the router, says; raises ReplicaLost."""
        response = self._streaming.run.remote(order)
        try:
            async for said in response:
                yield said
        except BaseException as error:  # nobody reads on: a replica that lives shall not, either
            response.cancel()
            if isinstance(error, RayError | RayServeException | AioRpcError):
                raise ReplicaLost(" ".join(f"{type(error).__name__} {error}".split())[:300]) from error
            raise

    def loads(self) -> Mapping[str, EngineLoad]:
        """How busy the replicas are that the router knows, as they told last."""
        router = ROUTERS.get(self._served)
        replicas = list(router.curr_replicas.values()) if router is not None else []
        return {replica.replica_id.unique_id: replica.routing_stats.get("load", _IDLE) for replica in replicas}

    async def metrics_texts(self) -> Mapping[str, bytes]:
        """The metrics of each replica that answers."""
        try:
            asked = self._handle.broadcast("metrics_text")
            told = await asked.results_async(timeout_s=METRICS_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):  # none is there, or one is stuck
            return {}
        return dict(each for each in told if isinstance(each, tuple))


class EngineDeployment:
    """A replica as Serve starts it; `prefill_only`: it reads prompts for others."""

    def __init__(self, deployment: Deployment, prefill_only: bool = False) -> None:
        bound_arenas()
        logs.configure("text", "warning")
        self._deployment = deployment
        self._stuck_s = deployment.health.stuck_s
        self._name = serve.get_replica_context().replica_id.unique_id
        settings = replace(deployment.settings(), prefill_only=prefill_only)
        self._replica = Replica(self._name, deployment.open(), settings)

    async def describe(self, deployment: Deployment) -> Description | None:
        """What it runs; None if that is not this deployment but the one that it takes the place of."""
        return self._replica.describe() if deployment == self._deployment else None

    async def run(self, order: ReplicaOrder) -> AsyncIterator[Said]:
        """See `Replica.run`."""
        async with aclosing(self._replica.run(order)) as said:  # type: ignore[type-var]
            async for each in said:
                yield each

    async def metrics_text(self) -> tuple[str, bytes]:
        """Name and metrics."""
        return self._name, self._replica.metrics_text()

    def record_routing_stats(self) -> dict[str, EngineLoad]:
        """Called by Serve, for the routers."""
        return {"load": self._replica.load()}

    def check_health(self) -> None:
        """Called by Serve, which starts another replica in place of one that raises."""
        self._replica.check(self._stuck_s)

    def __del__(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.stop()


class Ingress:
    """The OpenAI-compatible application, in a process without weights."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, deployment: Deployment, engines: Any, readers: Any = None
    ) -> None:
        logs.configure("text", "warning")
        described = await described_by(lambda: engines.describe.remote(deployment))
        application_name = serve.get_replica_context().app_name
        replicas = RayReplicas(engines, application_name, ENGINE)
        settings, prefill = deployment.settings(), deployment.prefill
        reader = None
        if prefill is not None:
            reader = PromptReader(RayReplicas(readers, application_name, PREFILL), prefill.min_tokens, prefill.wait_s)
            self._asked = readers.describe.remote(deployment)  # not awaited: it is for the router to begin
        fleet = Fleet(replicas, described, settings, deployment.failover, reader)
        self._app = application(fleet, RemoteFrontend(described), settings, f"application {application_name}")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve."""
        return self._app


def build(deployment: Deployment) -> Any:
    """The Serve application of a deployment."""
    scaling, prefill = deployment.autoscaling, deployment.prefill
    many: dict[str, Any] = {"num_replicas": deployment.replicas}
    if scaling is not None:
        many = {"autoscaling_config": scaling.model_dump(exclude_none=True)}
    engines = _engines(deployment, ENGINE).options(**many).bind(deployment)
    readers = None
    if prefill is not None:
        reading = deployment.reading()
        options = _engines(reading, PREFILL).options(num_replicas=prefill.replicas)
        readers = options.bind(reading, prefill_only=True)
    ingress = serve.deployment(serve.ingress()(Ingress), name="Ingress").options(
        num_replicas=deployment.http.ingresses,
        max_ongoing_requests=deployment.settings().max_connections,
        ray_actor_options={"num_cpus": deployment.http.num_cpus},
        graceful_shutdown_timeout_s=deployment.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return ingress.bind(deployment, engines, readers)


def _engines(deployment: Deployment, name: str) -> Any:
    """A Serve deployment of engines, without their number."""
    engine = deployment.engine_config()
    return serve.deployment(EngineDeployment, name=name).options(
        max_ongoing_requests=engine.max_num_seqs + deployment.settings().max_queue,
        ray_actor_options={"num_cpus": deployment.resources.num_cpus, "num_gpus": deployment.resources.num_gpus},
        health_check_period_s=deployment.health.period_s,
        health_check_timeout_s=deployment.health.timeout_s,
        graceful_shutdown_timeout_s=deployment.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config=RequestRouterConfig(
            request_router_class="forerun.replicas.router.PrefixRouter",
            request_router_kwargs={"deployment": name, "by_prefix": deployment.routing == "prefix"},
            request_routing_stats_period_s=STATS_S,
        ),
    )


def app(options: Mapping[str, str]) -> Any:
    """The builder for `serve run`: `config=FILE.yaml`."""
    return build(read_deployment(options["config"]))
