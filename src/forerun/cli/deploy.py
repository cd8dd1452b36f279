"""`forerun deploy`: replicas of one model on a Ray cluster, behind one OpenAI-compatible address.

Knows: clusters, addresses, when to stop. Does not know: replicas, requests.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import print_note
from forerun.cli.engine import fetch, needing
from forerun.cli.serve import check_address
from forerun.config import use_serve_grpc
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.replicas.deployment import Deployment

CONNECT_S = 5.0  # for a cluster's address to answer
APPLICATION = "forerun"
TAKEN = "write another host or port under http: into the file"

File = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="What to deploy; see docs/several-machines.md.")]
Cluster = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray cluster, or auto for the one on this machine; without it, one is started."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Leave the deployment to the cluster, and return.")]
Application = Annotated[
    str, typer.Option("--name", help="The deployment's name in the cluster; deploying it again updates it.")
]


def deploy(file: File, address: Cluster = None, name: Application = APPLICATION, detach: Detach = False) -> None:
    """Serve a model by several replicas on a Ray cluster; a request goes on elsewhere if its replica is lost."""
    if detach and address is None:
        raise ConfigError("--detach leaves the deployment to a cluster, but one started here ends with this command: "
                          "give an --address")  # fmt: skip
    deployment = _read(file)
    if address not in (None, "auto"):
        _check_reachable(address or "")
    if address is not None:
        _send_token(address)
    _import_ray()
    _fetch(deployment)
    with _cluster(address, deployment) as more:
        try:
            with _interruptible():
                _run(deployment, name, more)
        except (KeyboardInterrupt, SystemExit):
            if not detach:
                _end(name)
            raise
        with _until_told() as told:
            print_note(f"listening on http://{deployment.http.host}:{deployment.http.port}/v1")
            if not detach:
                told.wait()
                print_note(f"stopping: requests have {deployment.drain_s:g} s to end")
                _end(name)


def _read(file: Path) -> Deployment:
    with needing("ray", "deploy"):
        from forerun.replicas.deployment import read_deployment
    return read_deployment(file)


def _send_token(address: str) -> None:
    from forerun.server.ray_token import send_token

    send_token(address)


def _import_ray() -> None:
    use_serve_grpc()
    with needing("ray", "deploy"):
        import ray.serve  # noqa: F401


def _fetch(deployment: Deployment) -> None:
    """Download what is missing, and refuse what is not there, before replicas try."""
    config = deployment.engine_config()
    for name in (config.model, config.drafter.model, *(member.model for member in config.drafter.members)):
        if name is not None:
            fetch(name)


@contextmanager
def _cluster(address: str | None, deployment: Deployment) -> Iterator[str]:
    """Connected to a cluster where Serve listens -> what says more; one that was started here ends with the block."""
    import ray
    from ray import serve

    from forerun.server.ray_token import refused

    if address is None:
        check_address(deployment.http.host, deployment.http.port, TAKEN)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    try:
        begun = ray.init(address=address or "local", **(quiet if address is None else {"log_to_driver": False}))
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        none = f"there is no Ray cluster to connect to at {address}: {_line(error)}; start one with "
        none += "`ray start --head`, or leave --address out"
        raise ConfigError((address and refused(address, error)) or none) from error
    try:
        check_room(deployment, ray.cluster_resources(), own=address is None)
        if serve.status().proxies:
            check_listening(deployment, serve.context._get_global_client().http_config)
        else:
            check_address(deployment.http.host, deployment.http.port, TAKEN)
            serve.start(http_options={"host": deployment.http.host, "port": deployment.http.port})
        yield "`serve status`" if address else f"the folder {begun.address_info['session_dir']}/logs/serve"
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address must be HOST:PORT or auto; got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address}: {error}; start one with `ray start --head`"
        ) from error


def check_room(deployment: Deployment, have: Mapping[str, float], own: bool) -> None:
    """Raise ConfigError if the cluster is too small; one that is not `own` may grow, so that a note must do."""
    short = [
        f"{number:g} {name}s, it has {have.get(name, 0.0):g}"
        for name, number in deployment.needed().items()
        if number > have.get(name, 0.0) + 1e-6
    ]
    if short and own:
        raise ConfigError(
            f"this machine has too little for the deployment, which asks for {'; '.join(short)}: lower replicas, "
            "resources or http.ingresses, or give the --address of a larger cluster"
        )
    if short:
        print_note(f"the cluster must grow before all replicas start: the deployment asks for {'; '.join(short)}")


def check_listening(deployment: Deployment, real: Any) -> None:
    """Raise ConfigError if Serve listens elsewhere already, since it has one address for all it serves."""
    asked = deployment.http
    if (asked.host, asked.port) != (real.host, real.port):
        raise ConfigError(
            f"Ray Serve listens on {real.host} port {real.port} on this cluster already, http asks for {asked.host} "
            f"port {asked.port}: write the former into the file, or end what runs there with `serve shutdown`"
        )


def _run(deployment: Deployment, name: str, more: str) -> None:
    from ray import serve

    from forerun.replicas.on_ray import build

    try:
        serve.run(build(deployment), name=name)
    except RuntimeError as error:
        raise ConfigError(f"the deployment did not start: {_why(name) or _line(error)}; {more} says more") from error


def _why(name: str) -> str | None:
    """The error of the first deployment of an application that has one."""
    from ray import serve

    with suppress(Exception):  # Serve may have ended, too
        deployments = serve.status().applications[name].deployments.values()
        return next(filter(None, (reason(each.message) for each in deployments)), None)
    return None


def reason(message: str) -> str | None:
    """The last error of the traceback in what Ray Serve says of a deployment; None where there is none."""
    errors = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception|Lost): .+)$", message, re.MULTILINE)
    return _line(errors[-1]) if errors else None


def _end(name: str) -> None:
    from ray import serve

    serve.delete(name)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGINT end the block, by SystemExit and KeyboardInterrupt."""

    def leave(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    with _handled({signal.SIGTERM: leave, signal.SIGINT: signal.default_int_handler}):
        yield


@contextmanager
def _until_told() -> Iterator[Event]:
    """An event that SIGTERM and SIGINT set."""
    told = Event()
    with _handled(dict.fromkeys((signal.SIGTERM, signal.SIGINT), lambda *_: told.set())):
        yield told


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Callable[..., Any]]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(error: Any) -> str:
    return " ".join(str(error).split())[:300]
