"""`forerun deploy`: what it refuses before anything starts; what it starts is tests/replicas/test_on_ray.py's."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")


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


def test_a_port_that_is_taken(run: Any, file: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file.write_text(f"model: mini\nhttp: {{port: {port}}}\n")
        assert f"cannot listen on 127.0.0.1 port {port}" in refused(run, str(file))
