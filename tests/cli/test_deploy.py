"""`forerun deploy`: what it refuses before anything starts; what it starts is tests/replicas/test_on_ray.py's."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from forerun.cli import deploy as deploy_command
from forerun.config import use_ray_token
from forerun.errors import ConfigError
from forerun.replicas.deployment import Http as HttpConfig
from forerun.server.ray_token import FIRST_CALL, asks_for_token, send_token
from forerun.server.ray_token import refused as refused_by_ray


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "deploy.yaml"
    path.write_text("model: mini\n")
    return path


def refused(run: Any, *arguments: str) -> str:
    result = run("deploy", *arguments, status=2)
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def test_a_field_that_does_not_exist(run: Any, file: Path) -> None:
    file.write_text("model: mini\nreplica: 2\n")
    told = refused(run, str(file))
    assert "there is no field replica" in told and "did you mean replicas" in told and str(file) in told


def test_a_file_that_is_not_there(run: Any, tmp_path: Path) -> None:
    assert "cannot read" in refused(run, str(tmp_path / "nothing.yaml"))


def test_a_cluster_that_is_not_there(run: Any, file: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert f"there is no Ray cluster at {address}" in refused(run, str(file), "--address", address)
    assert "HOST:PORT or auto" in refused(run, str(file), "--address", "somewhere")


def test_an_address_in_brackets_is_connected_to_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("socket.create_connection", lambda *given: asked.append(given) or StringIO())
    deploy_command._check_reachable("[::1]:6379")
    assert asked == [(("::1", 6379), deploy_command.CONNECT_S)]


def test_detached_from_a_cluster_that_ends(run: Any, file: Path) -> None:
    assert "--address" in refused(run, str(file), "--detach")


@pytest.fixture
def made(file: Path) -> Any:
    file.write_text("model: mini\nreplicas: 3\nresources: {num_cpus: 2}\n")
    return deploy_command._read(file)


def test_a_machine_that_is_too_small(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    deploy_command.check_room(made, {"CPU": 6.1}, own=True)
    with pytest.raises(ConfigError, match=r"asks for 6\.1 CPUs, it has 2: lower replicas"):
        deploy_command.check_room(made, {"CPU": 2.0}, own=True)
    assert not capsys.readouterr().err
    deploy_command.check_room(made, {"CPU": 2.0}, own=False)
    assert "asks for 6.1 CPUs, it has 2" in capsys.readouterr().err


def test_serve_listens_elsewhere(made: Any) -> None:
    deploy_command.check_listening(made, HttpConfig(host="127.0.0.1", port=8000))
    for other in (HttpConfig(host="127.0.0.1", port=8001), HttpConfig(host="0.0.0.0")):
        with pytest.raises(ConfigError, match=f"listens on {other.host} port {other.port}"):
            deploy_command.check_listening(made, other)


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("detach", [False, True])
def test_a_start_can_be_interrupted(
    number: signal.Signals, ending: type[BaseException], detach: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def start(*given: Any) -> None:
        signal.raise_signal(number)
        time.sleep(5)

    for name in ("_import_ray", "_send_token", "_fetch", "_check_reachable"):
        monkeypatch.setattr(deploy_command, name, lambda *given: None)
    monkeypatch.setattr(deploy_command, "_cluster", lambda *given: nullcontext())
    monkeypatch.setattr(deploy_command, "_run", start)
    monkeypatch.setattr(deploy_command, "_end", ended.append)
    before = signal.getsignal(number)
    with pytest.raises(ending):
        deploy_command.deploy(file, "cluster:1", "mine", detach)
    assert ended == ([] if detach else ["mine"]) and signal.getsignal(number) is before


def test_a_port_that_is_taken(run: Any, file: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file.write_text(f"model: mini\nhttp: {{port: {port}}}\n")
        told = refused(run, str(file))
        assert f"cannot listen on 127.0.0.1 port {port}" in told and "under http:" in told and "--port" not in told


def test_a_replica_that_cannot_start_is_quoted() -> None:
    said = """The deployment failed to start 3 times in a row. See controller logs for details. Error:
RuntimeError: Traceback (most recent call last):
NotADirectoryError: [Errno 20] Not a directory: '/x'

The above exception was the direct cause of the following exception:
    raise ConfigError(f"kv_disk: cannot write")
forerun.errors.ConfigError: kv_disk: cannot write in the folder /x; choose another
"""
    assert deploy_command.reason(said) == "ConfigError: kv_disk: cannot write in the folder /x; choose another"
    assert deploy_command.reason("") is None and deploy_command.reason("Updating: 1 of 2 is there.") is None


@pytest.mark.parametrize("there", [False, True])
def test_the_token_of_ray_is_used_where_there_is_one(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    if there:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0" * 32)
    assert use_ray_token(tmp_path) == there
    assert os.environ.get("RAY_AUTH_MODE") == ("token" if there else None)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 32)
    assert not use_ray_token(tmp_path) and os.environ["RAY_AUTH_MODE"] == "disabled"


@pytest.mark.parametrize("asks", [False, True])
def test_a_token_is_for_clusters_that_ask_for_one(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    grpc = pytest.importorskip("grpc", reason="the extra 'ray' is not installed")

    def answer(_: bytes, context: Any) -> bytes:
        if asks:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    service, method = FIRST_CALL.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert asks_for_token(address) == asks
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN") if asks else nullcontext():
            send_token(address)
    finally:
        server.stop(None)


def test_a_cluster_that_asks_for_another_token_is_recognised() -> None:
    for said in ("InvalidAuthToken: Authentication token is missing", "Failed to connect to Ray cluster at h:1"):
        told = refused_by_ray("h:1", ConnectionError(said)) or ""
        assert "the Ray cluster at h:1 does not let" in told and "RAY_AUTH_TOKEN" in told and said in told
    assert refused_by_ray("auto", ConnectionError("Could not find any running Ray instance")) is None
