"""Every option of the engine, frozen; the only module that may read the environment.

Knows: names, defaults, ranges. Does not know: what any option does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from forerun.errors import ConfigError, suggestion

Verification = Literal["coupled", "rejection"]
ChainRule = Literal["block", "token"]
Implementation = Literal["auto", "forerun", "transformers"]
HeadWeights = Literal["stored", "int8", "int4"]

MAX_TREE_NODES = 64  # one 64-bit ancestor mask
MAX_RANKS = 64
_OPTIONAL_SIZES = (
    "max_model_len", "num_kv_blocks", "kv_cache_bytes",
    "max_num_prefill_tokens", "max_num_batched_nodes", "max_num_waiting",
)  # fmt: skip
_OF_LOADING = (
    "model", "dtype", "implementation", "device", "kernels", "activations", "threads", "pin_threads",
    "generation_config", "lora", "tensor_parallel", "pipeline_parallel", "rank_timeout_s", "rank_start_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Who drafts, and how much.

    `name` is a drafter's, or FILE.py:CLASS for one of the user's own; `drafters.registry` checks it and what it needs.
    `max_draft_tokens` bounds the drafted tokens a step and request; the policy may draft fewer, also none.
    `tree_width` above 1 makes a model drafter grow a best-first tree of that many children a node instead of a chain;
    None leaves it at what is usual for the drafter and this target.
    """

    name: str = "none"
    model: str | None = None  # a draft model, or the folder of draft heads
    max_draft_tokens: int = 5
    tree_width: int | None = None
    adaptive: bool = True  # False: always draft max_draft_tokens
    ngram_min: int = 2
    ngram_max: int = 4
    across_requests: bool = True  # suffix and recycling may draft from what other requests said
    corpus: str | None = None  # a file of `forerun train corpus` that suffix drafts from, too
    layers: tuple[int, ...] | None = None  # layers of the target that layer_skip drafts with; None: found on the fly
    head_weights: HeadWeights = "stored"  # matrices of draft heads; int8 or int4: rounded when read
    draft_vocabulary: str | None = None  # file of the only tokens that draft, eagle and mtp may propose; None: all
    members: tuple[DrafterConfig, ...] = ()  # of a portfolio

    @property
    def names(self) -> tuple[str, ...]:
        """Who drafts: the members of a portfolio, or the drafter itself."""
        return tuple(member.name for member in self.members) or (self.name,)

    def __post_init__(self) -> None:
        _range("max_draft_tokens", self.max_draft_tokens, 1, MAX_TREE_NODES - 1)
        _choice("head_weights", self.head_weights, get_args(HeadWeights))
        if self.tree_width is not None:
            _range("tree_width", self.tree_width, 1, 16)
        _range("ngram_min", self.ngram_min, 1, 64)
        _range("ngram_max", self.ngram_max, self.ngram_min, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Raises ConfigError for values out of range.

    `prefix_caching` needs a model that keeps its KV in the pool; one that runs row by row (docs/models.md) does not.
    """

    model: str
    dtype: str = "auto"
    implementation: Implementation = "auto"  # "forerun" or "transformers": insist on that one
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    verification: Verification = "coupled"
    chain_rule: ChainRule = "block"
    max_model_len: int | None = None  # None: what the checkpoint was built for
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512  # rows a step may compute
    max_num_prefill_tokens: int | None = None  # of them for prompts while others decode; None: a quarter
    max_num_batched_nodes: int | None = None  # of them for draft trees, roots included; None: all
    max_num_waiting: int | None = None  # requests that may wait for a seat; None: any number
    priority_s: int = 10  # seconds of waiting that make up for one level of priority
    keep_learned: bool = True  # what the policy learns, between runs, in the user's cache folder
    prefix_caching: bool = True  # keep the KV of computed blocks for prompts that begin alike
    block_size: int = 16
    kv_cache_dtype: str = "auto"  # "auto": the model's own; "int8" halves bfloat16, at the price of other roundings
    num_kv_blocks: int | None = None  # None: enough for max_num_seqs, bounded by kv_cache_bytes
    kv_cache_bytes: int | None = None  # None: a quarter of the memory that is free at start, 85 % of a GPU's
    kv_disk: str | None = None  # folder in which prefixes outlive the process; None: they do not
    kv_disk_gib: float = 10.0  # that the folder may take, all models together
    kv_host_gib: float | None = None  # host memory for prefixes that a GPU's pool loses; None: none
    kv_events: str | None = None  # ZeroMQ address at which routers hear what the prefix cache has, like tcp://*:5557
    kv_events_replay: str | None = None  # where they ask for what they missed
    kv_events_topic: str = ""  # for llm-d: kv@POD@MODEL
    device: str = "auto"  # "cpu", "cuda", or "auto": a GPU where there is one
    kernels: str = "auto"  # "cpu:avx2" and the like: an instruction set below the machine's
    activations: str = "auto"  # in products with integers: "auto" rounds them to 8 bits, "float32" does not (CPUs only)
    threads: int | None = None  # None: the physical cores this process may use
    pin_threads: bool | None = None  # each thread on a core of its own; None: see `kernels.cores.pins`
    tensor_parallel: int = 1  # processes that share each layer
    pipeline_parallel: int = 1  # groups of layers, each in processes of its own
    rank_timeout_s: int = 15  # silence of one of these processes after which all end
    rank_start_s: int = 120  # that they wait for each other at the start; each downloads the model before
    seed: int = 0  # for requests that bring none
    generation_config: str = "auto"  # sampling defaults and end tokens: the model's own, "none", or a file or folder
    lora: Mapping[str, str] = field(default_factory=dict)  # folders of PEFT's LoRA adapters, by the name requests use

    def __post_init__(self) -> None:
        _choice("verification", self.verification, ("coupled", "rejection"))
        _choice("chain_rule", self.chain_rule, ("block", "token"))
        _choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _choice("implementation", self.implementation, ("auto", "forerun", "transformers"))
        _choice("device", self.device, ("auto", "cpu", "cuda"))
        backends = ("auto", "cpu", "triton", "reference")
        if self.kernels not in backends and not self.kernels.startswith("cpu:"):  # what there is of these kernels say
            raise ConfigError(
                f"kernels must be one of {', '.join(backends)}, or cpu:ISA for an instruction set, such as cpu:avx2; "
                f"got {self.kernels!r}{suggestion(self.kernels, backends)}"
            )
        _choice("activations", self.activations, ("auto", "float32"))
        _choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "float32", "bfloat16", "int8"))
        _choice("block_size", self.block_size, (4, 8, 16, 32, 64))
        _range("max_num_seqs", self.max_num_seqs, 1, 4096)
        _range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 65536)
        _range("priority_s", self.priority_s, 0, 86400)
        _choice("prefix_caching", self.prefix_caching, (True, False))
        _range("tensor_parallel", self.tensor_parallel, 1, MAX_RANKS)
        _range("pipeline_parallel", self.pipeline_parallel, 1, MAX_RANKS)
        _range("rank_timeout_s", self.rank_timeout_s, 3, 3600)
        _range("rank_start_s", self.rank_start_s, 1, 86400)
        self._check_tiers()
        _choice("keep_learned", self.keep_learned, (True, False))
        _choice("pin_threads", self.pin_threads, (None, True, False))
        if not isinstance(self.lora, Mapping) or not all(name and isinstance(name, str) for name in self.lora):
            raise ConfigError(
                f"lora must be folders by adapters' names, like {{'sql': 'adapters/sql'}}; got {self.lora!r}"
            )
        check_threads(self.threads)
        for name in _OPTIONAL_SIZES:
            if getattr(self, name) is not None:
                _range(name, getattr(self, name), 1, 2**50)

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel * self.pipeline_parallel

    def _check_tiers(self) -> None:
        for name in ("kv_disk", "kv_host_gib", "kv_events"):
            if getattr(self, name) is not None and not self.prefix_caching:
                raise ConfigError(f"{name} keeps or tells prefixes, but prefix_caching is off: turn it on")
        if self.kv_host_gib is not None and self.num_ranks > 1:
            raise ConfigError(
                f"kv_host_gib keeps prefixes that a GPU has no room for, but {self.num_ranks} ranks compute the model, "
                "which share tiers of KV in folders alone: leave it out, and give kv_disk, or raise kv_cache_bytes"
            )
        for name in ("kv_disk", "kv_events", "kv_events_replay"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, str) or not given.strip()):
                raise ConfigError(f"{name} must be a text that is not empty; got {given!r}")
        for name in ("kv_disk_gib", "kv_host_gib"):
            given = getattr(self, name)
            valid = isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given <= 2**20
            if given is not None and not valid:
                raise ConfigError(f"{name} must be a number of GiB above 0; got {given!r}")
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise ConfigError("kv_events_replay and kv_events_topic go with kv_events: give that, too")

    def check_loaded_as(self, loaded: EngineConfig) -> None:
        """Raise ConfigError if weights or kernels would be others than those loaded for that configuration."""
        for name in _OF_LOADING:
            given, own = getattr(self, name), getattr(loaded, name)
            if given != own:
                raise ConfigError(
                    f"{name} is {own!r} for all engines on these weights and kernels, got {given!r}: make another LLM"
                )


def check_threads(threads: object) -> None:
    """Raise ConfigError for what is neither None nor a number of threads this machine can run."""
    cores = os.cpu_count() or 1
    if threads is not None and (type(threads) is not int or not 1 <= threads <= cores):
        raise ConfigError(f"threads must be from 1 to {cores}, the cores of this machine; got {threads!r}")


def api_key_from_environment() -> str | None:
    """FORERUN_API_KEY, the server's key where the command line names none. Raises ConfigError if it is empty."""
    key = os.environ.get("FORERUN_API_KEY")
    if key is not None and not key.strip():
        raise ConfigError("FORERUN_API_KEY is set but empty: give it a key, or unset it")
    return key


class LaunchedRank(NamedTuple):
    """Which of several processes this is, as torchrun and the like say."""

    rank: int
    num_ranks: int
    address: str
    port: str
    local_rank: int | None = None  # which of those on its host; None: nobody has said

    @property
    def is_local(self) -> bool:
        """Whether all of them must be on this machine, as nobody else reaches the first one at that address."""
        return self.address in ("localhost", "127.0.0.1")


def launched_rank() -> LaunchedRank | None:
    """What RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if it is set, LOCAL_RANK say; None where these are not set.

    Raises ConfigError if only some are, or a number is none.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [os.environ.get(name) for name in names]
    if found[0] is None or found[1] is None:
        return None
    missing = [name for name, value in zip(names, found, strict=True) if not value]
    numbers = [value for value in (*found[:2], found[3]) if value and value.isdigit()]
    if missing or len(numbers) < 3 or int(found[0]) >= int(found[1]):
        got = ", ".join(f"{name}={value}" for name, value in zip(names, found, strict=True))
        raise ConfigError(
            "RANK and WORLD_SIZE are set, so this is one of several processes, which needs RANK below WORLD_SIZE, "
            f"MASTER_ADDR and MASTER_PORT as well; got {got}"
        )
    local = os.environ.get("LOCAL_RANK", "")
    if local and not local.isdigit():
        raise ConfigError(f"LOCAL_RANK must be a number, which of the processes of its host this one is; got {local!r}")
    return LaunchedRank(
        int(found[0]), int(found[1]), str(found[2]), str(found[3]), int(local) if local else None
    )  # fmt: skip


@contextmanager
def exchange_settings(is_local: bool) -> Iterator[None]:
    """A block in which ranks connect; what the environment says already stands.

    is_local: gloo and NCCL listen to this machine alone. NCCL's watchdog ends no process: who is lost is found out by
    others, who can say so.
    """
    loopback = [each for _, each in socket.if_nameindex() if each in ("lo", "lo0")] if is_local else []
    wanted = {name: loopback[0] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback}
    wanted["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def use_ray_token(home: Path | None = None) -> bool:
    """Have Ray send its token if there is one -> whether it does; what RAY_AUTH_MODE says already stands.

    Before Ray is imported. home: the user's folder.
    """
    is_given = bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))
    if is_given or ((home or Path("~").expanduser()) / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


# Replicas hand their tokens over by gRPC instead of Ray's actor calls. With `mini` on two cores of a Xeon with AMX one
# client then loses 33 % of a server's speed instead of 39 %, 64 clients 40 % instead of 57 % (benchmarks/replicas.py).
_SERVE_VARIABLES: Final = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # else the first turns it on: a proxy on the head only, 30 s to shut down
}


def use_serve_grpc() -> None:
    """Have Ray Serve's replicas stream over gRPC; variables that are set already stand.

    Before Ray Serve is imported. A cluster that is started here afterwards has them, too.
    """
    for name, value in _SERVE_VARIABLES.items():
        os.environ.setdefault(name, value)


def follows(num_ranks: int) -> bool:
    """Whether this process was launched as one of so many that does what another one says."""
    place = launched_rank() if num_ranks > 1 else None
    return place is not None and place.rank > 0


def cache_folder() -> Path:
    """Where forerun keeps what it may forget: FORERUN_CACHE, else a folder in the user's cache."""
    own, common = os.environ.get("FORERUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(common or os.path.expanduser("~/.cache")) / "forerun"


def profiles_folder() -> Path:
    """Where `forerun bench drafters` keeps what it found for each model."""
    return cache_folder() / "profiles"


def learned_folder() -> Path:
    """Where what policies learned is kept."""
    return cache_folder() / "learned"


def option_names() -> dict[str, tuple[str, ...]]:
    """Every option by the class that holds it; a test freezes this list."""
    return {cls.__name__: tuple(f.name for f in fields(cls)) for cls in (DrafterConfig, EngineConfig)}


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        names = [str(choice) for choice in allowed]
        raise ConfigError(f"{name} must be one of {', '.join(names)}; got {value!r}{suggestion(str(value), names)}")


def _range(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}; got {value!r}")
