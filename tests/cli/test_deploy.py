"""`forerun deploy`: what it refuses before anything starts; what it starts is tests/replicas/test_on_ray.py's."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from forerun.cli import deploy as deploy_command
from forerun.errors import ConfigError
from forerun.replicas.deployment import Http as HttpConfig


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

    def start(deployment: Any, name: str) -> None:
        signal.raise_signal(number)
        time.sleep(5)

    for name in ("_import_ray", "_fetch", "_check_reachable"):
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
        assert f"cannot listen on 127.0.0.1 port {port}" in refused(run, str(file))
