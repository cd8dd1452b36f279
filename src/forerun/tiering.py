"""Gives an engine's prefix cache its slower tiers and its listener, and says what their keys stand for.

Knows: everything the bits of a block depend on. Does not know: how blocks are copied, stored or found.

A key is a chain of hashes over tokens that begins at the *identity*: a hash of the weights' bytes, of forerun's own
code and the libraries that compute, of the kernels as far as they round differently (all instruction sets of CPUs give
the same bits, but for AMX: decisions 0009 and 0014), of the shapes and types of all tensors in the pool, and of the
drafters that keep anything there; then of the adapter's bytes and the salt.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

import forerun
from forerun.cache.disk import DiskTier, check_folder
from forerun.cache.events import KVEvents, check_installed
from forerun.cache.spill import Spill
from forerun.cache.states import RecurrentStates
from forerun.cache.tiered import TieredPrefixes
from forerun.cache.tiers import HostTier, Tier
from forerun.config import DrafterConfig, EngineConfig
from forerun.drafters.registry import file_stamp
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.kernels.ops import Kernels
from forerun.models.base import Model, SharesPasses
from forerun.models.decoder import Decoder
from forerun.models.loader import LoadedModel
from forerun.weights.identity import code_digest, digest_of, stamps_of
from forerun.weights.resolve import resolve_model

LEAST_BLOCKS: Final = 16  # that a tier has room for
FORMAT: Final = 1  # of what is in a record


def check_tiers(config: EngineConfig) -> None:
    """Raise ConfigError for a folder or a library that is missing, before weights are read."""
    if config.kv_disk is not None:
        check_folder(config.kv_disk)
    if config.kv_events is not None:
        check_installed()


def check_unchanged(config: EngineConfig, loaded: Iterable[LoadedModel]) -> None:
    """After files were hashed: raise ConfigError if they are not those that the weights were read from."""
    if config.kv_disk is None and config.kv_host_gib is None:
        return
    for each in loaded:
        if each.stamps != stamps_of(each.folder):
            raise ConfigError(
                f"the files of {each.folder} have changed since its weights were read, and tiers of KV (kv_disk, "
                "kv_host_gib) name blocks by these files: load the model again, when nobody writes there"
            )


def attach_tiers(
    engine: Engine, config: EngineConfig, model: Model, kernels: Kernels, folder: Path | None,
    states: RecurrentStates | None,
) -> None:  # fmt: skip
    """Give the engine what `config` asks for. Raises ConfigError for what this model or device cannot have."""
    asked = [name for name in ("kv_disk", "kv_host_gib", "kv_events") if getattr(config, name) is not None]
    cache, pool = engine.scheduler.prefix_cache, engine.scheduler.pool
    if not asked:
        return
    if cache is None:
        raise ConfigError(
            f"{asked[0]} was given, but {config.model} runs through transformers row by row, with a cache of its own: "
            f"leave {asked[0]} out"
        )
    if isinstance(model, SharesPasses) and model.exchanges and asked != ["kv_events"]:
        raise ConfigError(
            f"{asked[0]} was given, but several ranks compute {config.model} and each has a part of every block, which "
            f"tiers do not know: leave {asked[0]} out, or use one rank"
        )
    if config.kv_disk is None and config.kv_host_gib is None:
        cache.names = _names_alone
    else:
        about = _about(config, engine, model, kernels, folder)
        spill = Spill(_tiers(config, kernels, about), engine.kv_cache, states, engine.boundaries)
        _check_room(config, spill)
        cache.names = _names(hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest())
        cache.lower = TieredPrefixes(cache, pool, spill)
    if config.kv_events is not None:
        cache.listener = KVEvents(config.kv_events, config.kv_events_replay, config.kv_events_topic)


def _tiers(config: EngineConfig, kernels: Kernels, about: dict[str, str]) -> list[Tier]:
    tiers: list[Tier] = []
    if config.kv_host_gib is not None:
        if kernels.device.type == "cpu":
            raise ConfigError(
                "kv_host_gib keeps prefixes that a GPU has no room for, but the KV cache lies in host memory already: "
                "leave it out, and raise kv_cache_bytes"
            )
        tiers.append(HostTier(int(config.kv_host_gib * 2**30), pinned=True))
    if config.kv_disk is not None:
        tiers.append(DiskTier(Path(config.kv_disk), int(config.kv_disk_gib * 2**30), about))
    return tiers


def _check_room(config: EngineConfig, spill: Spill) -> None:
    least = LEAST_BLOCKS * (spill.block_bytes + 4096) + 2 * spill.state_bytes
    for tier in spill.tiers:
        if tier.max_bytes < least:
            raise ConfigError(
                f"kv_{tier.name}_gib leaves {tier.max_bytes / 2**20:.1f} MiB, but {LEAST_BLOCKS} blocks of "
                f"{config.model} take {least / 2**20:.1f}: give at least {least / 2**30:.3f}"
            )


# -- what keys stand for ------------------------------------------------------------------------------------------


def _about(config: EngineConfig, engine: Engine, model: Model, kernels: Kernels, folder: Path | None) -> dict[str, str]:
    if folder is None:
        raise ConfigError(
            "kv_disk and kv_host_gib need a model that was read from files, by which its blocks are named"
        )
    tensors = [
        f"{tensor.dtype} {tuple(tensor.shape[1:])}"
        for layer in engine.kv_cache.layers
        for tensor in (layer.keys, layer.values)
    ]
    return {
        "format": str(FORMAT),
        "weights": digest_of(folder),
        "code": _own_code(),
        "libraries": f"torch {torch.__version__}, transformers {_version('transformers')}, triton {_version('triton')}",
        "kernels": _rounding_of(kernels, model),
        "loaded": f"{config.dtype}, {config.implementation}, {model.max_position} positions",
        "blocks": f"{engine.kv_cache.block_size} tokens of {', '.join(tensors)}",
        "drafters": _drafters(config.drafter, engine),
    }


@cache
def _own_code() -> str:
    return code_digest(Path(forerun.__file__).parent)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _rounding_of(kernels: Kernels, model: Model) -> str:
    """Equal for kernels that give the same bits."""
    if not kernels.name.startswith("cpu-"):
        own = f"{kernels.name}, {kernels.reason}{_torch_here() if kernels.device.type == 'cpu' else ''}"
    else:
        own = "cpu with AMX" if "amx" in kernels.name else "cpu"
    by_torch = "" if isinstance(model, Decoder) else _torch_here()
    return f"{own}{', activations in float32' * kernels.float_activations}{by_torch}"


def _torch_here() -> str:
    """Of what torch computes on a CPU: its libraries choose by the processor, and divide sums among threads."""
    return f", torch on {torch.backends.cpu.get_cpu_capability()}, {_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """The fields that tell one model of a processor from another."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return hashlib.sha256(json.dumps([found.get(name) for name in names]).encode()).hexdigest()[:16]


def _drafters(options: DrafterConfig, engine: Engine) -> str:
    """Of drafters that keep KV in the pool, or read states kept with it; the others change nothing there."""
    drafter = engine.drafter
    if not drafter.kv_specs and not drafter.hidden_layers:
        return "none"
    about = []
    for each in options.members or (options,):
        weights = "" if each.model is None else digest_of(resolve_model(each.model))
        sizes = ("max_draft_tokens", "tree_width", "adaptive", "members", "model")
        given: dict[str, Any] = {name: value for name, value in asdict(each).items() if name not in sizes}
        about.append([given, file_stamp(each.name), weights])
    return json.dumps([about, [list(map(str, spec)) for spec in drafter.kv_specs], list(drafter.hidden_layers)])


def _names(identity: bytes) -> Callable[[object | None, str], bytes]:
    """Adapter and salt -> the key that those of their blocks begin at."""
    known: WeakKeyDictionary[object, str] = WeakKeyDictionary()

    def name(adapter: object | None, salt: str) -> bytes:
        if adapter is not None and adapter not in known:
            known[adapter] = _adapter_digest(adapter)
        own = "" if adapter is None else known[adapter]
        return hashlib.sha256(identity + json.dumps([own, salt]).encode()).digest()

    return name


def _adapter_digest(adapter: object) -> str:
    """Of its files, while they are those it was loaded from; else a name of its own, by which nothing is found."""
    path, stamps = Path(str(getattr(adapter, "path", ""))), getattr(adapter, "stamps", ())
    try:
        digest = digest_of(path)
        if stamps and stamps_of(path) == stamps:
            return digest
    except OSError:
        pass
    return os.urandom(32).hex()


def _names_alone(adapter: object | None, salt: str) -> bytes:
    """For keys that are only told to routers."""
    return hashlib.sha256(json.dumps([str(getattr(adapter, "name", "")), salt]).encode()).digest()
