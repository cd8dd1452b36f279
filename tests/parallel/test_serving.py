"""A server whose model lies in two processes, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

import httpx

from tests.models import factory
from tests.support import tiny
from tests.support.processes import own_processes


def test_a_killed_rank_ends_the_server(tmp_path: Path) -> None:
    """Who waits gets an error, health turns 503 or the server is gone, and its exit status says so."""
    folder = tiny.write_llama(tmp_path, tiny.random_layers(2))
    factory.write_tokenizer(folder)
    options = ["--port", "0", "--log-format", "json", "--drafter", "none", "--threads", "1", "--pipeline-parallel", "2"]
    command = [sys.executable, "-m", "forerun.cli", "serve", str(folder), "--served-model-name", "tiny", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    events = {}
    for line in process.stderr:
        if line.startswith("{"):
            event = json.loads(line)
            events[event["event"]] = event
        if "listening" in events:
            break
    address = events["listening"]["api"]
    assert events["ranks"]["processes"] == events["ranks"]["pipeline_parallel"] == 2
    ended = False
    try:
        with httpx.Client(base_url=address, timeout=30) as client:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
            assert client.post("/completions", json=body).status_code == 200
            [worker] = _workers_of(process.pid)
            os.kill(worker, signal.SIGKILL)
            ended = True
            with pytest.raises(AssertionError):  # an answer, or a server that is gone
                assert client.post("/completions", json=body).status_code == 200
    except httpx.TransportError:
        pass
    finally:
        if not ended:
            process.kill()
        begun = time.monotonic()
        said = process.stderr.read()
        status = process.wait(timeout=30)
        process.stderr.close()
    assert status == 2 and time.monotonic() - begun < 20, said
    assert "rank 1 on " in said and "Traceback" not in said, said
    assert not own_processes("forerun.runtime.parallel")


def test_a_batch_that_loses_a_rank_says_so_last(tmp_path: Path) -> None:
    folder = tiny.write_llama(tmp_path, tiny.random_layers(2))
    factory.write_tokenizer(folder)
    body = {"model": "m", "prompt": "abc", "max_tokens": 400, "ignore_eos": True}
    rows = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(400)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--any-model", "--drafter", "none", "--threads", "1", "--pipeline-parallel", "2", "--max-num-seqs", "1"]
    command = [sys.executable, "-m", "forerun.cli", "batch", "in.jsonl", "out.jsonl", "--model", str(folder), *options]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None and not (tmp_path / "out.jsonl").exists():
            time.sleep(0.05)
        [worker] = _workers_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    last = " ".join(said[said.rindex("error: ") :].split())
    assert "rank 1 on " in last and "is lost: killed by signal 9 (out of memory?)" in last, said
    assert "Traceback" not in said, said
    assert "--resume goes on" in last and not (tmp_path / "out.jsonl.lock").exists(), said


def _workers_of(parent: int) -> list[int]:
    found = [path for path in Path("/proc").glob("[0-9]*") if "forerun.runtime.parallel" in _read(path / "cmdline")]
    parents = {int(path.name): _read(path / "stat").rpartition(")")[2].split()[1:2] for path in found}
    return [worker for worker, own in parents.items() if own == [str(parent)]]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:  # it has ended meanwhile
        return ""
