"""A process that is lost, or computes something else, ends all; no other model of several ranks is open here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from forerun import SamplingParams
from forerun.errors import ConfigError, RankLost, ResourceError
from forerun.runtime.parallel.crew import how_ended
from tests.models import factory
from tests.parallel.test_ranks import WORKER, folder, open_llm, tokens
from tests.support.processes import own_processes

__all__ = ["folder"]


def test_a_port_that_is_taken_and_a_rank_that_does_not_come_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConfigError, match=f"MASTER_PORT {port} .* is the port free"):
            open_llm(folder, pipeline_parallel=2)
    with pytest.raises(RankLost, match="rank 1 did not come within 1 s: start the same command with RANK 1"):
        open_llm(folder, pipeline_parallel=2, rank_start_s=1)


def test_a_rank_with_other_options_hears_why_all_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "forerun.cli", "generate", str(folder), "--pipeline-parallel", "2", "--drafter"]
    other = subprocess.Popen(
        [*command, "none", "--dtype", "bfloat16", "Hello"], env={**os.environ, **place, "RANK": "1"},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for name, value in {**place, "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match="rank 1 on .* was started with "):
            open_llm(folder, pipeline_parallel=2)
        _, said = other.communicate(timeout=30)
    finally:
        other.kill()
    told = " ".join(said.split())
    assert "rank 1 ends with rank 0, which says: rank 1 on " in told and "was started with " in told, said


def test_the_signal_that_ended_a_process_is_named() -> None:
    for code, said in (("import os; os.kill(os.getpid(), 9)", r"killed by signal 9 \(out of memory\?\)"), ("", "")):
        assert re.fullmatch(said, how_ended(subprocess.Popen([sys.executable, "-c", code])))


def test_ranks_that_compute_something_else_are_noticed(folder: Path) -> None:
    with pytest.raises(ResourceError, match="num_kv_blocks"):  # after the other rank has begun: it ends, too
        open_llm(folder, pipeline_parallel=2, max_model_len=64, num_kv_blocks=1, block_size=16)
    with closing(open_llm(folder, pipeline_parallel=2)) as llm:
        crew = llm._shared.crew
        assert crew is not None
        crew._chain += 1  # as if a follower had heard something else
        with pytest.raises(RankLost, match="different numbers for pass 1"):
            for _ in range(100):
                tokens(llm)


@pytest.mark.parametrize(
    ("kind", "divided"), [(signal.SIGKILL, "tensor_parallel"), (signal.SIGSTOP, "pipeline_parallel")]
)
def test_a_lost_rank_ends_all(folder: Path, kind: signal.Signals, divided: str) -> None:
    with closing(open_llm(folder, **{divided: 2})) as llm:
        tokens(llm)
        lost = list[RankLost]()
        llm.on_rank_lost(lost.append)
        [worker] = own_processes(WORKER)
        os.kill(worker, kind)
        begun = time.monotonic()
        why = r"killed by signal 9 \(out of memory\?\)" if kind == signal.SIGKILL else ""
        with pytest.raises(RankLost, match=f"rank 1 on .* is lost: {why}"):
            tokens(llm)
        assert time.monotonic() - begun < 10
        assert len(lost) == 1
        with pytest.raises(RankLost, match="rank 1 on "):
            tokens(llm)
    with pytest.raises(RankLost):
        tokens(llm)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_a_lost_rank_leaves_requests_with_states_and_tiers_clean(tmp_path: Path) -> None:
    """What ends with the rank is stored nowhere, and its blocks are free."""
    (path := tmp_path / "model").mkdir()
    factory.make_checkpoint("lfm2", path)
    with closing(open_llm(path, tensor_parallel=2, kv_disk=str(tmp_path / "kv"), kv_disk_gib=0.1)) as llm:
        stream = llm.stream([*range(5, 26)], SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(9):
            next(stream)
        [worker] = own_processes(WORKER)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 on "):
            list(stream)
        assert not llm.engine.scheduler.running
        llm.engine.scheduler.check_integrity()


def test_a_rank_ends_whatever_its_threads_wait_for() -> None:
    """But not before they have written, if they can."""
    code = (
        "import time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from forerun.runtime.parallel.start import leave\n"
        "thread = ThreadPoolExecutor(1)\n"
        "thread.submit(lambda: (time.sleep(0.3), print('written', flush=True)))\n"
        "thread.submit(time.sleep, 60)\n"
        "leave(1.0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (0, "written\n"), ended.stderr
