"""Which GPU each rank takes, and which requests for GPUs are refused before anything is read; no GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from forerun import assemble
from forerun.config import EngineConfig
from forerun.errors import ConfigError, ForerunError, RankLost, ResourceError
from forerun.kernels import device, select
from forerun.kernels.select import runs_on_gpu
from forerun.runtime.parallel import exchange, places, start
from forerun.runtime.parallel.exchange import PASS_LIMIT_S, Exchange, RankLayout, backend_for
from forerun.runtime.parallel.leader import RankedModel
from forerun.runtime.parallel.places import UNTOLD, RankPlace, Seat, check_places, seats_of
from tests.parallel.test_ranks import folder, open_llm

__all__ = ["folder"]
GPU = torch.device("cuda", 1)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="mini", **{"tensor_parallel": 2, **options})


def on(*found: tuple[Any, ...]) -> dict[int, RankPlace]:
    return {rank: RankPlace(*place) for rank, place in enumerate(found)}


def test_ranks_of_a_host_take_its_gpus_in_order() -> None:
    assert seats_of(on(("a", 2), ("b", 2), ("a", 2), ("b", 2))) == {
        0: Seat(2, 0, 1, 0),
        1: Seat(2, 0, 1, 0),
        2: Seat(2, 1, 1, 1),
        3: Seat(2, 1, 1, 1),
    }
    told = on(("a", 2, 0), ("b", 2, 1), ("a", 2, 1), ("b", 2, 0))  # as torchrun has it
    assert [seat.gpu for seat in seats_of(told).values()] == [0, 1, 1, 0]
    check_places(config(pipeline_parallel=2), told)
    check_places(config(), on(("a", 1), ("b", 1)))
    check_places(config(), on(("a", 0), ("a", 0)))  # all on CPUs
    check_places(config(device="cpu"), on(("a", 1), ("a", 0)))


def test_ranks_of_a_host_share_its_cores() -> None:
    """Whose threads are pinned take other cores, but where somebody else has bound them to CPUs of their own."""

    def on_cpus(*found: tuple[str, int, int]) -> list[tuple[int, int]]:
        places = on(*(("a", 0, UNTOLD, "", False, *cpu) for cpu in found))
        return [(seat.threads, seat.first_core) for seat in seats_of(places, threads=3).values()]

    assert on_cpus(("0-7", 8, 0), ("0-7", 8, 0)) == [(4, 0), (4, 4)]
    assert on_cpus(("0-7", 8, UNTOLD), ("0-7", 8, UNTOLD)) == [(3, 0), (3, 3)]
    assert on_cpus(("0-7", 8, 2), ("0-7", 8, 5), ("0-7", 8, 1)) == [(2, 0), (5, 2), (1, 7)]
    assert on_cpus(("0-7", 8, 8), ("8-15", 8, 8)) == [(8, 0), (8, 0)]


@pytest.mark.parametrize(
    ("found", "options", "error", "message"),
    [
        (on(("a", 1), ("a", 1)), {}, ResourceError, "2 of the ranks .* on a, where a process sees 1 .* device 'cpu'"),
        (on(("a", 0), ("a", 0)), {"device": "cuda"}, ResourceError, r"run on a, where a process sees 0 GPU\(s\)"),
        (on(("a", 4), ("b", 1), ("b", 2)), {}, ResourceError, r"2 of the ranks .* run on b, where a process sees 1"),
        (on(("a", 1), ("b", 0)), {}, ConfigError, "rank 0 on a would run on a GPU, rank 1 on b.* device 'cpu'"),
        (on(("a", 0), ("b", 1)), {}, ConfigError, "rank 1 on b would run on a GPU, rank 0 on a"),
        (on(("a", 2, 0), ("a", 2, 0)), {}, ConfigError, "rank 1 on a has LOCAL_RANK 0"),
        (on(("a", 2, 0), ("a", 2, 2)), {}, ConfigError, "LOCAL_RANK 2, .* must be 0 to 1"),
        (
            on(("a", 1, UNTOLD, "H200"), ("b", 1, UNTOLD, "A100")),
            {},
            ConfigError,
            "rank 1 on b has 'A100', rank 0 on a",
        ),
        (on(("a", 2, 1), ("a", 2, 0)), {}, ConfigError, "rank 0 on a has LOCAL_RANK 1.* 0 for rank 0"),
    ],
)
def test_gpus_that_do_not_suffice_are_refused(
    found: Mapping[int, RankPlace], options: dict[str, Any], error: type[ForerunError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_places(config(**options), found)


def test_who_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_is_interpreted", lambda: False)
    asked = [(name, where) for name in ("auto", "triton", "cpu:avx2", "reference") for where in ("auto", "cpu", "cuda")]
    assert [pair for pair in asked if runs_on_gpu(*pair, has_gpu=False)] == [
        ("auto", "cuda"), ("triton", "auto"), ("triton", "cuda"), ("cpu:avx2", "cuda"), ("reference", "cuda"),
    ]  # fmt: skip
    assert runs_on_gpu("auto", "auto", has_gpu=True) and not runs_on_gpu("cpu:avx2", "auto", has_gpu=True)
    monkeypatch.setattr(select, "_is_interpreted", lambda: True)
    assert not runs_on_gpu("triton", "auto", has_gpu=True)


def test_one_gpu_for_two_ranks_ends_before_they_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "can_use_gpu", lambda: True)
    monkeypatch.setattr(places, "num_gpus", lambda: 1)
    monkeypatch.setattr(places, "gpu_kind", lambda: "H200")
    monkeypatch.setattr(start, "_own_store", lambda *_: pytest.fail("ranks were about to start"))
    for options in ({}, {"device": "cuda"}):
        with pytest.raises(ResourceError, match="2 of the ranks of tensor_parallel 1 with pipeline_parallel 2 run on"):
            open_llm(folder, pipeline_parallel=2, **{"kernels": "auto", **options})
    assert RankPlace.here(None)[1:4] == (1, UNTOLD, "H200") and RankPlace.here(3)[1:4] == (1, 3, "H200")


def test_cpus_with_amx_and_without_are_not_mixed() -> None:
    mixed = on(("a", 0, UNTOLD, "", False), ("b", 0, UNTOLD, "", True))
    with pytest.raises(ConfigError, match="rank 1 on b has a CPU with AMX, rank 0 on a one without.* 'cpu:avx512'"):
        check_places(config(), mixed)
    check_places(config(kernels="cpu:avx512"), mixed)
    check_places(config(), on(("a", 0, UNTOLD, "", True), ("b", 0, UNTOLD, "", True)))


def test_a_rank_takes_its_gpu_before_its_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(start, "can_use_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: calls[0])
    monkeypatch.setattr(device, "has_cuda", lambda: True)

    def chosen(*given: Any, **named: Any) -> Any:
        calls.append((named["device"], given[1], named["first_core"], named["pin"]))
        return SimpleNamespace(device=device.cuda_device())

    monkeypatch.setattr(start, "select_kernels", chosen)
    joined = start.Joined(config(), 1, Seat(2, 1, 4, 4), HashStore(), is_local=True)
    assert calls == [1, ("auto", 4, 4, False)] and joined.kernels.device == joined.exchange._device == GPU


def test_nccl_is_for_gpus_and_gloo_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_for(torch.device("cpu")) == "gloo"
    begun, groups, told = list[Any](), list[Any](), list[Any]()

    def begin(backend: str, **named: Any) -> None:
        begun.append((backend, named["device_id"], named["timeout"], named["rank"], named["world_size"]))

    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: groups.append((ranks, timeout)) or len(groups))
    monkeypatch.setattr(start, "connect_ranks", lambda *given, **named: told.append((*given, named["enqueued"])))
    joined: Any = object.__new__(start.Joined)
    joined.layout, joined.kernels, joined._store = RankLayout(2, 2), SimpleNamespace(device=GPU), HashStore()
    joined._rank, joined._is_local, joined.exchange = 3, False, Exchange(RankLayout(2, 2), 3, GPU)
    joined.connect()
    limit = timedelta(seconds=PASS_LIMIT_S)
    assert begun == [("cpu:gloo,cuda:nccl", GPU, limit, 3, 4)]
    assert groups == [([0, 1], limit), ([2, 3], limit)]
    [(group, where, enqueued)] = told
    assert (group, where) == (2, GPU) and enqueued is joined.exchange.enqueued


class Work(dist.Work):
    """An exchange that a GPU was given."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error = RuntimeError(error) if error else None

    def exception(self) -> Exception | None:
        return self.error


def enqueued(monkeypatch: pytest.MonkeyPatch, looks: int, *works: Work) -> Exchange:
    """Of a GPU that is done after so many looks at it."""
    left = chain(repeat(False, looks), [True])
    monkeypatch.setattr(exchange, "given_work", lambda _: lambda: next(left))
    made = Exchange(RankLayout(2, 1), 0, GPU)
    made.enqueued.update(enumerate(works))
    return made


def test_a_pass_on_a_gpu_ends_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    made = enqueued(monkeypatch, 3, Work("nobody asks for it so soon"))
    made.settle()
    assert not made.enqueued
    Exchange(RankLayout(2, 1), 0, torch.device("cpu")).settle()  # nothing is left to do


def test_who_waits_for_a_gpu_hears_of_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RankLost("rank 1 is lost")

    for looks in (0, 1 << 30):  # as what was broken off is done, and while it hangs
        made = enqueued(monkeypatch, looks)
        made.check = lost
        with pytest.raises(RankLost, match="rank 1 is lost"):
            made.settle()


def test_errors_of_nccl_are_asked_for_in_a_long_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_ASK_S", 0.0)
    with pytest.raises(RankLost, match="rank 0 cannot exchange with the others .remote error"):
        enqueued(monkeypatch, 1 << 30, Work(), Work("remote error\nstack")).settle()


def test_exchanges_of_gpus_are_broken_off_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(dist, "is_initialized", lambda: not calls)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(exchange, "_abort_process_group", lambda: calls.append("aborted"))
    made = Exchange(RankLayout(2, 1), 0, GPU)
    made.abort()
    made.close()
    assert calls == ["aborted"]
    monkeypatch.setattr(exchange, "_ABORT_S", 0.01)
    calls.clear()
    with made._ending:  # which hangs
        made.close()
    made.close()
    assert calls == ["aborted"], "to destroy it, all ranks of NCCL would have to come"
    calls.clear()
    Exchange(RankLayout(2, 1), 0, torch.device("cpu")).close()
    assert calls == ["destroyed"]


def test_a_broken_connection_that_cannot_be_given_up_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise AssertionError("no backend")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(exchange, "_abort_process_group", broken)
    made = Exchange(RankLayout(2, 1), 0, GPU)
    made.abort()
    made.close()
    assert not made._ending.locked()


def test_only_what_a_gpu_was_given_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's exchanges hold the memory of their results, and a pass has hundreds of them."""

    class Sent(Work):
        def wait(self, timeout: timedelta = timedelta()) -> bool:
            return True

    monkeypatch.setattr(dist, "isend", lambda tensor, dst: Sent())
    made = Exchange(RankLayout(1, 3), 1, GPU)
    for rank in (0, 2, 0, 2, 2):
        made.send_to(rank, torch.ones(1))
    assert sorted(made.enqueued) == [0, 2]


def test_a_checked_pass_is_done_before_it_is_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the host would wait for the GPU where it cannot hear of a lost rank."""
    looked = list[str]()
    monkeypatch.setattr(exchange, "given_work", lambda _: lambda: looked.append("waited") or True)
    monkeypatch.setattr(exchange, "checksum_of", lambda *_: looked.append("summed") or 7)
    made = Exchange(RankLayout(1, 2), 0, GPU)
    made.note(torch.ones(1))
    assert not looked
    made.digest = 0
    made.note(torch.ones(1))
    assert looked == ["waited", "summed"] and made.digest == 7


@pytest.mark.parametrize(("num_gpus", "kept"), [(0, 1), (1, 2)])
def test_ranks_on_gpus_do_not_share_memory(num_gpus: int, kept: int) -> None:
    where = GPU if num_gpus else torch.device("cpu")
    model: Any = object.__new__(RankedModel)
    model.device, model.crew = where, SimpleNamespace(num_here=2)
    assert 2 // assemble._num_here(model) == kept
