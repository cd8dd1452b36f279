"""`forerun batch --ray`: a cluster writes the answers of one machine, when a node dies under it, too."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun.cli.app import app as cli
from forerun.server.batch_files import errors_path
from tests.server.test_batches import batch, chat_row, lines_of, rows, sorted_lines, write

__all__ = ["batch"]  # a fixture
OPTIONS = ("--drafter", "none", "--max-model-len", "256", "--threads", "1", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of this machine with a CPU each."""
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def on_cluster(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(cli, ["batch", *map(str, arguments), *OPTIONS], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


def test_a_cluster_writes_the_same_answers(cluster: Any, batch: Callable[..., Any], tmp_path: Path) -> None:
    """It goes on with a file, does failed rows again, and one of its two nodes dies after the first answers."""
    many = [chat_row(f"r{i}", f"Say {i % 5}", max_tokens=24, ignore_eos=True) for i in range(24)]
    given = write(tmp_path / "in.jsonl", [*many, *rows(), chat_row("model", model="gpt-4"), "no JSON"])
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    batch(given, here)
    there.write_bytes(b"".join(lines_of(here)[:3]) + lines_of(here)[3][:20])
    errors_path(there).write_bytes(lines_of(errors_path(here))[0].replace(b"gpt-4", b"gpt-3"))
    found: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 120
        while len(lines_of(there)) < 6 and time.monotonic() < until:
            time.sleep(0.01)
        found.append(len(lines_of(there)))
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)

    killing = threading.Thread(target=kill)
    killing.start()
    said = on_cluster(given, there, "--ray", cluster.address, "--json", "--resume", "--retry-errors")
    killing.join()
    assert 6 <= found[0] < 33
    assert sorted_lines(there) == sorted_lines(here)
    assert sorted_lines(errors_path(there)) == sorted_lines(errors_path(here))
    figures = json.loads(said.stdout)  # Ray's own messages do not get in between
    assert [figures[name] for name in ("answered", "failed", "done_before", "left")] == [30, 2, 3, 0]


def test_a_cluster_that_cannot_do_it_is_one_error(cluster: Any, tmp_path: Path) -> None:
    given, path = write(tmp_path / "in.jsonl", rows()), tmp_path / "out.jsonl"
    wanted = {
        ("--ray-cpus", "64"): "no node of the cluster has 64 CPUs",
        ("--ray-gpus", "1"): "and 1 GPUs for a worker",
        ("--model", str(tmp_path / "nothing"), "--ray-workers", "1"): "nothing",
    }
    for options, words in wanted.items():
        said = " ".join(on_cluster(given, path, "--ray", cluster.address, *options, status=2).output.split())
        assert words in said and "Traceback" not in said, said
    assert not path.exists()


def test_a_cluster_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    given, path = write(tmp_path / "in.jsonl", rows()), tmp_path / "out.jsonl"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        for address in (nobody, f"ray://{nobody}"):
            said = " ".join(on_cluster(given, path, "--ray", address, status=2).output.split())
            assert f"no Ray cluster answers at {address}: start one with" in said
    assert "must be HOST:PORT" in on_cluster(given, path, "--ray", "somewhere", status=2).output


def test_options_of_a_cluster_need_one(tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", rows())
    said = " ".join(on_cluster(given, tmp_path / "out.jsonl", "--ray-workers", "2", status=2).output.split())
    assert "--ray" in said and "give its address" in said


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    given = write(tmp_path / "in.jsonl", rows())
    said = on_cluster(given, tmp_path / "out.jsonl", "--ray", "auto", status=2).output
    assert 'pip install ".[ray]"' in said
