"""How the ranks of a model find each other: processes this one starts, or those that torchrun has started.

Knows: stores of torch.distributed, greetings, what must be alike on all ranks. Does not know: passes.

Rank 0 writes its address and a random key into the store; the others connect, say who they are and get the options.
Before anything large is read all have compared versions, options and weights.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

import forerun
from forerun.config import EngineConfig, LaunchedRank, exchange_settings, launched_rank
from forerun.errors import ConfigError, ForerunError, RankLost
from forerun.kernels.device import CPU, use_gpu
from forerun.kernels.ops import Kernels
from forerun.kernels.ranks import Ranks, connect_ranks, first_line
from forerun.kernels.select import can_use_gpu, runs_on_gpu, select_kernels
from forerun.models.decoder import Decoder
from forerun.models.loader import LoadedModel, load_model, open_checkpoint
from forerun.models.parts import load_ends
from forerun.models.stages import StagedDecoder
from forerun.runtime.parallel.crew import FLUSH_LIMIT_S, Crew, how_ended
from forerun.runtime.parallel.exchange import PASS_LIMIT_S, Exchange, RankLayout, backend_for
from forerun.runtime.parallel.follower import Inbox, RankFollower, guarded
from forerun.runtime.parallel.leader import RankedModel
from forerun.runtime.parallel.links import AllEnd, Link, LinkClosed
from forerun.runtime.parallel.messages import Kind, RankMessage
from forerun.runtime.parallel.places import RankPlace, Seat, check_places, seats_of
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.resolve import resolve_model

log = logging.getLogger("forerun.parallel")
CONNECT_LIMIT_S = 120.0  # for ranks that have all come
HELLO_LIMIT_S = 10.0  # for somebody who has connected to say who it is
_LEADER, _LOOPBACK = "forerun/leader", "127.0.0.1"
_TAIL_BYTES = 1 << 20  # of each file, that a stamp looks at
_OF_RANKS = ("threads", "pin_threads", "rank_start_s")  # options that each rank may have of its own


class Joined:
    """A process that has found the others: it loads its part of the model with this."""

    def __init__(self, config: EngineConfig, rank: int, seat: Seat, store: Store, is_local: bool) -> None:
        """`seat`: on its machine. is_local: no rank can be elsewhere."""
        self.config = config
        self.layout = RankLayout(config.tensor_parallel, config.pipeline_parallel)
        if runs_on_gpu(config.kernels, config.device, can_use_gpu()):
            use_gpu(seat.gpu)
        pin = False if config.pin_threads is None and seat.num_here > 1 else config.pin_threads
        self.kernels: Kernels = select_kernels(
            config.kernels, seat.threads, device=config.device, pin=pin, activations=config.activations,
            first_core=seat.first_core,
        )  # fmt: skip
        self.exchange = Exchange(self.layout, rank, self.kernels.device)
        self._rank, self._store, self._is_local = rank, store, is_local

    def connect(self) -> Ranks:
        """The shards of this rank's stage; called by all ranks at the same time. Raises RankLost."""
        store, device = PrefixStore("forerun/activations", self._store), self.kernels.device
        limit = timedelta(seconds=CONNECT_LIMIT_S if device == CPU else PASS_LIMIT_S)  # NCCL's is that of exchanges
        try:
            with exchange_settings(self._is_local):
                dist.init_process_group(
                    backend_for(device), store=store, rank=self._rank, world_size=self.layout.num_ranks,
                    timeout=limit, device_id=None if device == CPU else device,
                )  # fmt: skip
                stages = range(self.layout.num_stages)
                groups = [dist.new_group(self.layout.ranks_of(stage), timeout=limit) for stage in stages]
        except RuntimeError as error:
            raise RankLost(f"rank {self._rank} could not connect to the others ({first_line(error)})") from error
        return connect_ranks(groups[self.layout.stage_of(self._rank)], device, enqueued=self.exchange.enqueued)

    def load(self, ranks: Ranks) -> LoadedModel:
        """This rank's part; `ranks`: as connected. Raises ModelError and ResourceError."""
        config = self.config
        loaded = load_model(
            config.model, self.kernels, dtype=config.dtype, generation_config=config.generation_config,
            max_position=config.max_model_len, implementation=config.implementation,
            ranks=ranks, stage=(self.layout.stage_of(self._rank), self.layout.num_stages),
        )  # fmt: skip
        if isinstance(loaded.model, StagedDecoder):
            loaded.model.neighbours = self.exchange
        return loaded


def lead(config: EngineConfig) -> tuple[LoadedModel, Kernels, Crew]:
    """Start or find the followers, load rank 0's part -> the model that tells them what to compute.

    In a process that is launched as a rank above 0 this never returns: it follows, and exits.
    Raises ConfigError, RankLost, ModelError and ResourceError.
    """
    place = _place(config)
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialized in this process already: close the other LLM of several ranks "
            "(LLM.close), or make this one in a process of its own"
        )
    if place is not None and place.rank > 0:
        follow(place.rank, _find_store(place, config.rank_start_s), config.rank_start_s, config, place.local_rank)
    own = RankPlace.here(None if place is None else place.local_rank, config)
    store = _own_store(config.num_ranks) if place is None else _find_store(place, config.rank_start_s)
    is_local = place is None or place.is_local
    listener = socket.create_server((_LOOPBACK if is_local else "", 0))
    key, workers, links = secrets.token_hex(16), list[subprocess.Popen[bytes]](), dict[int, Link]()
    address = _LOOPBACK if is_local or place is None else place.address
    store.set(_LEADER, json.dumps([address, listener.getsockname()[1], key]))
    try:
        if isinstance(store, TCPStore) and place is None:
            workers = [_start_worker(rank, config, store) for rank in range(1, config.num_ranks)]
        with listener:
            places = _greet(listener, key, config, workers, own, links)
        check_places(config, places)
        seats, hosts = seats_of(places, config.threads), {rank: place.host for rank, place in places.items()}
        joined = Joined(config, 0, seats[0], store, is_local)
        crew = Crew(joined.exchange, links, hosts, workers, config.rank_timeout_s)
        for rank, link in links.items():
            link.send(Kind.CONFIG, RankMessage(Kind.CONFIG, [*seats[rank]], [options_as_json(config)]).encode())
    except LinkClosed as error:
        _end(workers)
        raise RankLost(f"a rank ended while it started ({error}): look at its own messages") from error
    except BaseException as error:
        _tell_why(links, error)
        _end(workers)
        raise
    atexit.register(crew.close)
    try:
        return _load(joined, crew)
    except BaseException:
        crew.close()
        raise


def _load(joined: Joined, crew: Crew) -> tuple[LoadedModel, Kernels, Crew]:
    stamp = weights_stamp(joined.config)
    with crew.starting():
        crew.compare_weights(stamp)
        crew.shards = joined.connect()
        loaded = joined.load(crew.shards)
        crew.await_ready()
    assert isinstance(loaded.model, Decoder)
    config, part = joined.config, loaded.model
    ends = partial(load_ends, config.model, joined.kernels, config.dtype, part.max_position)
    return replace(loaded, model=RankedModel(part, crew, ends)), joined.kernels, crew


def follow(
    rank: int, store: Store, start_s: float, own: EngineConfig | None, local_rank: int | None = None
) -> NoReturn:  # fmt: skip
    """Be a follower until the leader ends, then exit.

    start_s: how long all ranks are waited for. own: options this process was started with, if any. local_rank: which of
    those on its host it is, if who launched it has said.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader hears of it, too
    torch.set_num_threads(1)  # the kernels have threads of their own
    try:
        store.set_timeout(timedelta(seconds=start_s))
        address, port, key = json.loads(store.get(_LEADER))
        link = Link(socket.create_connection((address, port), CONNECT_LIMIT_S))
        place, options = RankPlace.here(local_rank, own), "" if own is None else options_as_json(own)
        about = [key, str(rank), place.host, release(), options, place.gpu, place.cpus]
        numbers = place.num_gpus, place.local_rank, place.has_amx, place.num_cores, place.threads
        link.send(Kind.HELLO, RankMessage(Kind.HELLO, numbers, about).encode())
        told = link.wait_for(Kind.CONFIG, start_s)
    except AllEnd as error:
        raise RankLost(f"rank {rank} ends with rank 0, which says: {error}") from error
    except (RuntimeError, OSError, LinkClosed) as error:
        raise RankLost(f"rank {rank} found no leader: {first_line(error)}") from error
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who stops a whole group lets the leader finish what runs
    limit_s = json.loads(told.texts[0])["rank_timeout_s"]
    inbox = Inbox(link, rank, limit_s)

    def work() -> None:
        config = options_from(told.texts[0], own)
        joined = Joined(config, rank, Seat(*told.numbers), store, address == _LOOPBACK)
        inbox.tell(RankMessage(Kind.READY, (), [weights_stamp(config)]))
        loaded = joined.load(joined.connect())
        inbox.tell(RankMessage(Kind.READY))
        with torch.inference_mode():
            RankFollower(loaded, joined.kernels, joined.exchange, inbox).run()
        joined.exchange.close()

    guarded(work, inbox, limit_s)
    leave(FLUSH_LIMIT_S)


def leave(limit_s: float) -> NoReturn:
    """Exit when other threads have written what they were given, or after so long: a folder may hang."""
    timer = Timer(limit_s, os._exit, (0,))
    timer.daemon = True
    timer.start()
    sys.exit(0)


def run_worker() -> NoReturn:
    """A follower that the leader has started: it is told on standard input where the others are."""
    rank, num_ranks, port, start_s = json.loads(sys.stdin.readline())
    try:
        store = TCPStore(_LOOPBACK, port, num_ranks, is_master=False, timeout=timedelta(seconds=start_s))
        follow(rank, store, start_s, None)
    except (RuntimeError, RankLost) as error:  # the leader has ended meanwhile
        sys.exit(f"rank {rank} ends: {first_line(error)}")


def _place(config: EngineConfig) -> LaunchedRank | None:
    """Which rank this process was launched as; None if it starts the others itself. Raises ConfigError."""
    place = launched_rank()
    if place is not None and place.num_ranks != config.num_ranks:
        raise ConfigError(
            f"WORLD_SIZE is {place.num_ranks}, but tensor_parallel {config.tensor_parallel} times pipeline_parallel "
            f"{config.pipeline_parallel} is {config.num_ranks}: start as many processes, or unset RANK and WORLD_SIZE"
        )
    return place


def _own_store(num_ranks: int, port: int = 0) -> TCPStore:
    """A store that processes of this machine alone reach; 0 for any port. Raises OSError if it is taken."""
    listener = socket.create_server((_LOOPBACK, port))
    port = listener.getsockname()[1]
    return TCPStore(
        _LOOPBACK, port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _find_store(place: LaunchedRank, start_s: float) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT. Raises ConfigError if that port is taken or nobody answers.

    If all ranks are on this machine nobody else reaches it, unless torchrun has begun one, which listens everywhere.
    """
    if place.is_local and place.rank == 0:
        with suppress(OSError, OverflowError):  # torchrun listens there, or it is no port
            return _own_store(place.num_ranks, int(place.port))
    log.warning(
        "rank %d of %d waits up to %.0f s for the others, at %s:%s",
        place.rank, place.num_ranks, start_s, place.address, place.port,
    )  # fmt: skip
    try:
        limit = timedelta(seconds=start_s)
        store, _, _ = next(rendezvous("env://", timeout=limit))
    except (RuntimeError, OSError, ValueError) as error:
        advice = "is rank 0 running there, and can this machine reach it?"
        if place.rank == 0:
            advice = "is the port free, and the address one of this machine? If not, give all ranks others"
        raise ConfigError(
            f"rank {place.rank} cannot meet the others at MASTER_ADDR {place.address}, MASTER_PORT {place.port} "
            f"({first_line(error)}): {advice}"
        ) from error
    found: Store = store
    return found


def _start_worker(rank: int, config: EngineConfig, store: TCPStore) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen(
        [sys.executable, "-m", "forerun.runtime.parallel"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # what is written there is the leader's
        process_group=0,  # an interrupt at the keyboard is the leader's to handle
    )
    assert worker.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which is noticed soon
        worker.stdin.write(json.dumps([rank, config.num_ranks, store.port, config.rank_start_s]).encode() + b"\n")
        worker.stdin.close()
    return worker


def _tell_why(links: Mapping[int, Link], error: BaseException) -> None:
    """Ranks that have come would only see that the connection ends."""
    text = str(error) if isinstance(error, ForerunError) else "it was ended while the ranks started"
    for link in links.values():
        with suppress(LinkClosed):
            link.send_if_room(RankMessage(Kind.LOST, (), [text.replace("\0", " ")]))


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.kill()
        worker.wait()


def _greet(
    listener: socket.socket, key: str, config: EngineConfig, workers: Sequence[subprocess.Popen[bytes]], own: RankPlace,
    links: dict[int, Link],
) -> dict[int, RankPlace]:  # fmt: skip
    """Wait for all followers, whose connections are put into `links` -> places, by rank; `own`: rank 0's.

    Raises RankLost and ConfigError.
    """
    places, until = {0: own}, time.monotonic() + config.rank_start_s
    listener.settimeout(0.2)
    while len(links) < config.num_ranks - 1:
        ended = [rank for rank, worker in enumerate(workers, 1) if worker.poll() is not None]
        if ended:
            how = how_ended(workers[ended[0] - 1])
            raise RankLost(f"rank {ended[0]} ended while it started{how and f' ({how})'}: look at its own messages")
        if time.monotonic() > until:
            missing = [rank for rank in range(1, config.num_ranks) if rank not in links]
            raise RankLost(
                f"rank {missing[0]} did not come within {config.rank_start_s} s: start the same command with RANK "
                f"{missing[0]}, let it reach this machine, or raise --rank-start-timeout if it downloads"
            )
        with suppress(TimeoutError):
            link = Link(listener.accept()[0])
            with suppress(LinkClosed):  # somebody else's
                hello = link.wait_for(Kind.HELLO, HELLO_LIMIT_S)
                given, *about = hello.texts
                if secrets.compare_digest(given, key):
                    rank = int(about[0])
                    links[rank] = link
                    compare(rank, about[1], about[2], about[3:4], config)
                    num_gpus, local_rank, has_amx, *cpu = hello.numbers
                    places[rank] = RankPlace(about[1], num_gpus, local_rank, about[4], bool(has_amx), about[5], *cpu)
    return places


def compare(rank: int, host: str, version: str, options: Sequence[str], config: EngineConfig) -> None:
    """Raise ConfigError for a rank of another release, or one that was started with other options."""
    if version != release():
        raise ConfigError(f"rank {rank} on {host} has {version}, rank 0 has {release()}: install the same on all")
    if not options or not options[0]:
        return
    theirs, own = json.loads(options[0]), json.loads(options_as_json(config))
    different = [name for name in own if name not in _OF_RANKS and theirs.get(name) != own[name]]
    if different:
        name = different[0]
        raise ConfigError(
            f"rank {rank} on {host} was started with {name} {theirs.get(name)!r}, rank 0 with {own[name]!r}: give all "
            "ranks the same options"
        )


def release() -> str:
    """What all ranks must have alike."""
    return f"forerun {forerun.__version__} and torch {torch.__version__}"


def options_as_json(config: EngineConfig) -> str:
    """What followers load; they know nothing of drafters."""
    kept = [field.name for field in fields(EngineConfig) if field.name != "drafter"]
    values = asdict(config)
    return json.dumps({name: values[name] for name in kept})


def options_from(text: str, own: EngineConfig | None) -> EngineConfig:
    """The options of `options_as_json`, but for those that a rank has of its own, if it was started with any."""
    kept = {} if own is None else {name: getattr(own, name) for name in _OF_RANKS}
    return EngineConfig(**{**json.loads(text), **kept})


def weights_stamp(config: EngineConfig) -> str:
    """What tells a model's weights from others: configuration, headers, and the end of every file."""
    folder = resolve_model(config.model)
    checkpoint = open_checkpoint(folder)
    stamp = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for entry in sorted(checkpoint.stored()):
        stamp.update(repr(entry).encode())
    for path in checkpoint.files if isinstance(checkpoint, Checkpoint) else [folder]:
        stamp.update(_tail(Path(path)))
    return stamp.hexdigest()


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read()
