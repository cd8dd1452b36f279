"""Where ranks run: on which host, on what kind of CPU, and on which of its GPUs, if they run on GPUs.

Knows: who shares a host and its cores, how many GPUs a rank sees, what a launcher says (LOCAL_RANK), which devices add
up alike. Does not know: weights, what ranks exchange.

NCCL gives each rank a GPU of its own. Rank 0 takes the first one: its engine may run on any thread, and a thread begins
with that one.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from forerun.config import EngineConfig
from forerun.errors import ConfigError, ResourceError
from forerun.kernels.cores import allowed_cpus, usable_cores
from forerun.kernels.device import gpu_kind, num_gpus
from forerun.kernels.select import can_use_gpu, has_amx, runs_on_gpu, takes_amx

UNTOLD = -1  # a launcher has not said which of its host's ranks this one is


class RankPlace(NamedTuple):
    """What a rank says of where it runs."""

    host: str
    num_gpus: int  # that it sees and has kernels for
    local_rank: int = UNTOLD
    gpu: str = ""  # what these are called
    has_amx: bool = False  # its CPU
    cpus: str = ""  # which it may run on
    num_cores: int = 1  # that these are
    threads: int = UNTOLD  # it was started with; 0: as many as there is a core for

    @staticmethod
    def here(local_rank: int | None, options: EngineConfig | None = None) -> RankPlace:
        """Of this process; `options`: its own, if any."""
        told = UNTOLD if local_rank is None else local_rank
        has_gpu = can_use_gpu()
        gpus = (num_gpus(), told, gpu_kind()) if has_gpu else (0, told, "")
        threads = UNTOLD if options is None else options.threads or 0
        cpus = ",".join(map(str, sorted(allowed_cpus())))
        return RankPlace(socket.gethostname(), *gpus, has_amx(), cpus, usable_cores(), threads)


class Seat(NamedTuple):
    """What rank 0 gives a rank of its host."""

    num_here: int  # ranks on that host
    gpu: int  # which one it takes, if ranks run on GPUs
    threads: int
    first_core: int  # of those on its CPUs, if its threads are pinned: those before are other ranks'


def seats_of(places: Mapping[int, RankPlace], threads: int | None = None) -> dict[int, Seat]:
    """By rank: where launchers say nothing, the ranks of a host take its GPUs in order, and share its cores.

    `threads`: those of ranks that were started with no options of their own.
    """
    seats = dict[int, Seat]()
    for rank, place in places.items():
        beside = sorted(other for other, its in places.items() if its.host == place.host)

        def threads_of(its: RankPlace, num_here: int = len(beside)) -> int:
            own = threads or 0 if its.threads == UNTOLD else its.threads
            return own or max(1, its.num_cores // num_here)

        before = [places[other] for other in beside if other < rank and places[other].cpus == place.cpus]
        gpu = beside.index(rank) if place.local_rank == UNTOLD else place.local_rank
        seats[rank] = Seat(len(beside), gpu, threads_of(place), sum(map(threads_of, before)))
    return seats


def check_places(config: EngineConfig, places: Mapping[int, RankPlace]) -> None:
    """Raise ConfigError or ResourceError unless ranks are on CPUs that add up alike, or each on a GPU of its own."""
    on_gpu = {rank: runs_on_gpu(config.kernels, config.device, place.num_gpus > 0) for rank, place in places.items()}
    other = next((rank for rank in sorted(places) if on_gpu[rank] != on_gpu[0]), None)
    if other is not None:
        with_gpu, without = (0, other) if on_gpu[0] else (other, 0)
        raise ConfigError(
            f"rank {with_gpu} on {places[with_gpu].host} would run on a GPU, rank {without} on {places[without].host}, "
            "which sees none that it has kernels for, on the CPU: choose device 'cpu', or install torch for CUDA and "
            "triton there and make a GPU visible"
        )
    if on_gpu[0]:
        _check_room(config, places)
        _check_kinds(places)
        _check_seats(places, seats_of(places))
    elif takes_amx(config.kernels):
        _check_cpus(places)


def _check_cpus(places: Mapping[int, RankPlace]) -> None:
    """AMX adds up in an order of its own."""
    other = next((rank for rank in sorted(places) if places[rank].has_amx != places[0].has_amx), None)
    if other is not None:
        with_amx, without = (0, other) if places[0].has_amx else (other, 0)
        raise ConfigError(
            f"rank {with_amx} on {places[with_amx].host} has a CPU with AMX, rank {without} on {places[without].host} "
            "one without, and numbers of both would not be those of one process: choose kernels 'cpu:avx512' or "
            "'cpu:avx2' for all, or use CPUs of one kind"
        )


def _check_room(config: EngineConfig, places: Mapping[int, RankPlace]) -> None:
    for host in sorted({place.host for place in places.values()}):
        seen = [place.num_gpus for place in places.values() if place.host == host]
        if min(seen) < len(seen):
            raise ResourceError(
                f"{len(seen)} of the ranks of tensor_parallel {config.tensor_parallel} with pipeline_parallel "
                f"{config.pipeline_parallel} run on {host}, where a process sees {min(seen)} GPU(s) that it has "
                "kernels for, and each rank needs a GPU of its own: start no more ranks there than it has GPUs, let "
                "each rank see all of them (CUDA_VISIBLE_DEVICES), or choose device 'cpu'"
            )


def _check_kinds(places: Mapping[int, RankPlace]) -> None:
    """Each kind of GPU adds up in its own way."""
    other = next((rank for rank in sorted(places) if places[rank].gpu != places[0].gpu), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} on {places[other].host} has {places[other].gpu!r}, rank 0 on {places[0].host} has "
            f"{places[0].gpu!r}, and numbers of both would not be those of one process: use GPUs of one kind"
        )


def _check_seats(places: Mapping[int, RankPlace], seats: Mapping[int, Seat]) -> None:
    taken = dict[tuple[str, int], int]()
    for rank, seat in sorted(seats.items()):
        host = places[rank].host
        first = taken.setdefault((host, seat.gpu), rank)
        if first != rank or not 0 <= seat.gpu < places[rank].num_gpus or (rank == 0 and seat.gpu):
            raise ConfigError(
                f"rank {rank} on {host} has LOCAL_RANK {seat.gpu}, by which it takes a GPU, but these numbers must be "
                f"0 to {places[rank].num_gpus - 1} there, other ones for all ranks of a host, and 0 for rank 0: start "
                "them by torchrun, or unset LOCAL_RANK"
            )
