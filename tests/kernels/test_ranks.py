"""Parts of several ranks: how things are shared out, over shared memory and gloo; what a dead rank does to others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.kernels.rank_process import PROMPT
from tests.models import factory
from tests.support import tiny
from tests.support.ranks import on_ranks

from forerun.errors import RankLost
from forerun.kernels import shared_memory
from forerun.kernels.ranks import ALONE, Ranks, SharedRanks
from forerun.kernels.shared_memory import SharedMemory, reserve_memory
from forerun.models.loader import load_model

ROOT = Path(__file__).resolve().parents[2]


def parts_of(size: int, rows: int, widths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, widths[rank], generator=generator) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 5, 48, 112, 4096, 5000])
def test_shares_cover_everything_once(size: int, count: int) -> None:
    owned = [Ranks(rank, size).share(count) for rank in range(size)]
    assert [index for own in owned for index in range(own.start, own.stop)] == list(range(count))
    assert Ranks(0, size).shares(count) == [own.stop - own.start for own in owned]
    assert max(Ranks(0, size).shares(count)) - min(Ranks(0, size).shares(count)) <= 16


def test_a_process_alone_copies_nothing() -> None:
    part = torch.ones(2, 3)
    assert ALONE.gather(part) is part
    assert (ALONE.messages, ALONE.sent_bytes) == (0, 0)


def test_threads_gather_in_the_order_of_ranks() -> None:
    widths = [3, 0, 5]
    parts = parts_of(3, 4, widths)
    for made in on_ranks(3, lambda ranks: ranks.gather(parts[ranks.rank], widths)):
        assert torch.equal(made, torch.cat(parts, dim=1))


def shared(size: int, limit_s: float = 20.0) -> list[SharedRanks]:
    with reserve_memory(size) as (path, _):
        if not path:
            pytest.skip("no shared memory here")
        opened = [SharedMemory.open(path, rank, size, limit_s) for rank in range(size)]
    assert not Path(path).exists(), "the file is not left behind"
    return [SharedRanks(one) for one in opened if one is not None]


def test_memory_is_shared_over_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of several slots among them; ranks are threads, each with a view of its own."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 4096)
    size, rounds = 3, [(rows, [1 + rows % 5, 40, rows]) for rows in range(1, 60)]
    made: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def run(ranks: SharedRanks) -> None:
        for rows, widths in rounds:
            made[ranks.rank].append(ranks.gather(parts_of(size, rows, widths)[ranks.rank], widths))

    ranks = shared(size)
    threads = [threading.Thread(target=run, args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (rows, widths) in enumerate(rounds):
        for own in made:
            assert torch.equal(own[index], torch.cat(parts_of(size, rows, widths), dim=1))
    assert ranks[1].messages == 2 * len(rounds)
    assert ranks[1].sent_bytes == 2 * sum(rows * widths[1] * 4 for rows, widths in rounds)


def test_who_closed_is_not_waited_for() -> None:
    ranks = shared(2)
    thread = threading.Thread(target=lambda: (ranks[0].gather(torch.ones(1, 1)), ranks[0].close()))
    thread.start()
    thread.join(0.2)
    assert torch.equal(ranks[1].gather(torch.zeros(1, 1)), torch.tensor([[1.0, 0.0]])), "its last part still counts"
    thread.join()
    begun = time.monotonic()
    with pytest.raises(RankLost, match="rank 0 of 2 ended"):
        ranks[1].gather(torch.zeros(1, 1))
    assert time.monotonic() - begun < 5


def test_who_does_not_come_is_waited_for_until_the_limit() -> None:
    ranks = shared(2, limit_s=0.2)
    with pytest.raises(RankLost, match=r"rank 1 of 2 .* did not come within 0.2 s"):
        ranks[0].gather(torch.ones(1, 1))


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_two_processes(transport: str, tmp_path: Path) -> None:
    """They give the bits of one; then one is killed, or stopped over gloo, and the other says so in time."""
    folder = tiny.write_llama(tmp_path, tiny.random_layers(2))
    alone = load_model(folder, tiny.kernels()).model
    expected = factory.Runner(alone, 16).span(PROMPT).logits
    first, second = (start(rank, port, transport, folder) for port in [free_port()] for rank in range(2))
    try:
        assert second.stdout is not None
        assert second.stdout.readline() == "ready\n"
        os.kill(second.pid, signal.SIGKILL if transport == "shared" else signal.SIGSTOP)
        out, errors = first.communicate(timeout=60)
        said = json.loads(out.splitlines()[-1])
        assert said["kind"] == {"shared": "SharedRanks", "gloo": "GroupRanks"}[transport], errors
        assert torch.equal(torch.tensor(said["logits"]), expected)
        assert "rank" in said["error"]
        assert said["waited_s"] < 10
    finally:
        for one in (first, second):
            one.kill()
            one.wait()
            for pipe in (one.stdout, one.stderr):
                assert pipe is not None
                pipe.close()


def start(rank: int, port: int, transport: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kernels.rank_process", str(rank), str(port), transport, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
