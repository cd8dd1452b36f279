"""Gives an engine's prefix cache its slower tiers and its listener, and says what their keys stand for.

Knows: what engine and drafters add to what the bits of a block depend on (`block_identity`). Does not know: how blocks
are copied, stored or found.

A key is a chain of hashes over tokens that begins at the *identity*: a hash of what the model's part in this process
says of itself, and in each other rank; of how it was loaded, and of the drafters that keep anything in the pool; then
of the adapter's bytes and the salt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from forerun.block_identity import about_part
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
from forerun.models.base import Model, exchanges
from forerun.models.loader import LoadedModel
from forerun.runtime.parallel.leader import RankedModel
from forerun.weights.identity import digest_of, stamps_of
from forerun.weights.resolve import resolve_model

LEAST_BLOCKS: Final = 16  # that a tier has room for


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
    is_shared = exchanges(model) and not isinstance(model, RankedModel)
    if is_shared and asked != ["kv_events"]:
        raise ConfigError(
            f"{asked[0]} was given, but several ranks compute {config.model} and this one does not tell the others "
            f"which blocks to store: open it with LLM(..., tensor_parallel=...), or leave {asked[0]} out"
        )
    if config.kv_disk is None and config.kv_host_gib is None:
        cache.names = _names_alone
    else:
        about = _about(config, engine, model, kernels, folder)
        identity = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
        given = _tiers(config, kernels, about), engine.kv_cache, states, engine.boundaries
        spill = model.spill(*given, identity) if isinstance(model, RankedModel) else Spill(*given)
        _check_room(config, spill, _num_sharing(model))
        cache.names = _names(identity)
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


def _num_sharing(model: Model) -> int:
    """Ranks that write into folders of this machine."""
    return model.crew.num_here if isinstance(model, RankedModel) else 1


def _check_room(config: EngineConfig, spill: Spill, num_ranks: int) -> None:
    least = num_ranks * (LEAST_BLOCKS * (spill.block_bytes + 4096) + 2 * spill.state_bytes)
    for tier in spill.tiers:
        if tier.max_bytes < least:
            raise ConfigError(
                f"kv_{tier.name}_gib leaves {tier.max_bytes / 2**20:.1f} MiB, but {LEAST_BLOCKS} blocks of "
                f"{config.model} take {least / 2**20:.1f}: give at least {ceil(least / 2**30 * 1000) / 1000:.3f}"
            )


# -- what keys stand for ------------------------------------------------------------------------------------------


def _about(config: EngineConfig, engine: Engine, model: Model, kernels: Kernels, folder: Path | None) -> dict[str, str]:
    if folder is None:
        raise ConfigError(
            "kv_disk and kv_host_gib need a model that was read from files, by which its blocks are named"
        )
    part = model.part if isinstance(model, RankedModel) else model
    return {
        **about_part(part, kernels, folder, engine.kv_cache),
        **(model.about_ranks() if isinstance(model, RankedModel) else {}),
        "loaded": f"{config.dtype}, {config.implementation}, {model.max_position} positions",
        "drafters": _drafters(config.drafter, engine),
    }


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
