"""Puts an engine together: drafter, verifier, policy, pool and scheduler for a loaded model.

Knows: every constructor and how much memory there is. Does not know: requests, text, files.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from forerun.cache.block_pool import BlockPool
from forerun.cache.kv_cache import KVCache, bytes_per_block
from forerun.cache.prefix_cache import KeptStates, PrefixCache
from forerun.cache.states import RecurrentStates, bytes_per_slot
from forerun.config import EngineConfig, learned_folder
from forerun.drafters.base import Drafter, DrafterContext, Lessons
from forerun.drafters.named import written
from forerun.drafters.portfolio import Portfolio, build_portfolio
from forerun.drafters.registry import file_stamp, spec_of
from forerun.engine.engine import Engine, Verifier
from forerun.engine.measuring import measure_calls, measure_passes
from forerun.engine.scheduler import Limits, Scheduler
from forerun.engine.timings import Timings
from forerun.errors import ConfigError, ResourceError
from forerun.kernels.cores import step_clock
from forerun.kernels.ops import Kernels
from forerun.kernels.threads import torch_beside
from forerun.learned import Kept, KeptLessons
from forerun.models.base import LayerSpec, Model, passes_of, state_specs_of, with_own_state, with_states
from forerun.models.memory import SHARE_OF_HOST, check_memory, memory_of
from forerun.policy.base import Policy
from forerun.policy.costs import CallCosts, Costs, PassCosts, rows_to_measure
from forerun.policy.fixed import FixedPolicy
from forerun.policy.policy import AdaptivePolicy
from forerun.runtime.bind import bind
from forerun.runtime.parallel.leader import RankedModel
from forerun.runtime.runner import Runner
from forerun.speculation.growth import TreeGrower
from forerun.speculation.verifier import CoupledVerifier, RejectionVerifier
from forerun.tiering import attach_tiers
from forerun.weights.translation import Translation

log = logging.getLogger("forerun.engine")

_KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_SHARE_OF_GPU = 0.85  # of the free memory; the rest is for work space and other programs
_KEPT_STATES = 2  # a request that runs: at the ends of its prompt and of its answer
_ASSUMED_BYTES = 4 << 30  # memory of a machine that does not say

LoadDraft = Callable[[str], Model]
LoadCorpus = Callable[[str], tuple[Any, Any]]
Translate = Callable[[str], Translation | None]  # of a draft model's texts; None: its tokens are the target's


def no_corpus(name: str) -> tuple[Any, Any]:
    """For a model without a tokenizer. Raises ConfigError."""
    raise ConfigError(f"the corpus {name} was given, but this model has no tokenizer to compare it with: leave it out")


def assemble(
    config: EngineConfig, model: Model, kernels: Kernels, load_draft: LoadDraft, folder: Path | None = None,
    load_corpus: LoadCorpus = no_corpus,
    translation: Translate = lambda name: None,
) -> Engine:  # fmt: skip
    """An engine for `model`, read from `folder`. Raises ConfigError or ResourceError if the context does not fit."""
    states = _states(config, model, kernels.device)
    if states is not None:
        if states.num_free < config.max_num_seqs:
            log.warning(
                "memory holds recurrent states of %d requests at a time, fewer than max_num_seqs", states.num_free
            )
        config = replace(config, max_num_seqs=min(config.max_num_seqs, states.num_free))
        model = with_states(model, states)
    drafter = _drafter(config, model, kernels, load_draft, folder, load_corpus, translation)
    kv_cache = _kv_cache(config, model, drafter, kernels)
    own_kvs = kv_cache.layers[: len(model.kv_specs)]
    drafter.attach(own_kvs, kv_cache.layers[len(own_kvs) :])
    model = with_own_state(model)
    kept_states: KeptStates | None = states
    if isinstance(model, RankedModel):
        model = model.opened(kv_cache, states)
        kept_states = None if states is None else model.mirrored(states)
    runner = bind(passes_of(model, drafter.hidden_layers), kernels, own_kvs, config.block_size)
    may_be_bare = bool(drafter.hidden_layers) and kernels.device.type == "cpu"  # a GPU would capture all graphs twice
    bare = bind(passes_of(model), kernels, own_kvs, config.block_size) if may_be_bare else None
    # A model without either runs through transformers row by row, on all threads of torch.
    computes_itself = bool(own_kvs) or states is not None
    torch_threads = torch_beside(kernels) if computes_itself else nullcontext
    max_model_len = min(_longest(config, model), kv_cache.num_rows)
    kept = _kept(config, drafter, model, kernels) if config.keep_learned else None
    with torch_threads():  # passes are measured as steps run them
        policy = _policy(config, runner, drafter, kv_cache, min(model.max_position, kv_cache.num_rows), kept)
    model.release("")  # what was measured
    engine = Engine(
        model=model,
        runner=runner,
        bare=bare,
        drafter=drafter,
        verifier=_verifier(config, kernels),
        policy=policy,
        scheduler=_scheduler(config, kv_cache, max_model_len, bool(own_kvs), kept_states),
        kv_cache=kv_cache,
        timings=Timings() if isinstance(policy, FixedPolicy) else Timings(clock=step_clock(kernels.device)),
        torch_threads=torch_threads,
        keep=_recall(kept, policy, drafter),
    )
    attach_tiers(engine, config, model, kernels, folder, states)
    return engine


def _states(config: EngineConfig, model: Model, device: torch.device) -> RecurrentStates | None:
    """Slots for the requests that run and for states kept at block ends, as far as memory goes; None if no layer is
    recurrent. Raises ResourceError if there is no memory for one slot."""
    specs = state_specs_of(model)
    if not specs:
        return None
    per_slot, memory = bytes_per_slot(specs), (memory_of(device) or _ASSUMED_BYTES) // _num_here(model)
    wanted = config.max_num_seqs * (1 + _KEPT_STATES * config.prefix_caching)
    num_slots = min(wanted, int(memory * SHARE_OF_HOST) // per_slot)
    if num_slots < 1:
        raise ResourceError(
            f"one request of {config.model} keeps {per_slot / 1e6:.0f} MB of recurrent state, but a quarter of the "
            f"{memory / 1e6:.0f} MB available is less: close other programs, or choose a smaller model"
        )
    return RecurrentStates(specs, num_slots, device)


def _verifier(config: EngineConfig, kernels: Kernels) -> Verifier:
    """Of the coupled rule, on a GPU one that brings all nodes' choices to the host at once."""
    if config.verification == "coupled":
        return CoupledVerifier(kernels, at_once=kernels.device.type != "cpu")
    return RejectionVerifier(config.chain_rule)


def _scheduler(
    config: EngineConfig, kv_cache: KVCache, max_model_len: int, is_pooled: bool, states: KeptStates | None
) -> Scheduler:
    """`is_pooled`: the model's state is in the pool, so that its blocks can be shared."""
    pool = BlockPool(kv_cache.num_blocks)
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_rows=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_num_prefill_rows=config.max_num_prefill_tokens or max(1, config.max_num_batched_tokens // 4),
        max_num_nodes=config.max_num_batched_nodes,
        max_num_waiting=config.max_num_waiting,
        priority_s=config.priority_s,
    )
    prefix_cache = PrefixCache(pool, config.block_size, states) if config.prefix_caching and is_pooled else None
    return Scheduler(pool, config.block_size, limits, prefix_cache)


def _drafter(
    config: EngineConfig, model: Model, kernels: Kernels, load_draft: LoadDraft, folder: Path | None,
    load_corpus: LoadCorpus,
    translation: Translate,
) -> Portfolio:  # fmt: skip
    if isinstance(model, RankedModel) and any(
        spec_of(each.name).needs_layers for each in (config.drafter, *config.drafter.members)
    ):
        model = model.seen_by_heads()
    context = DrafterContext(
        spec=spec_of(config.drafter.name),
        options=config.drafter,
        model=model,
        folder=folder,
        kernels=kernels,
        grower=TreeGrower(kernels, config.verification == "coupled", model.vocab_size),
        block_size=config.block_size,
        max_rows=config.max_num_batched_tokens,
        load_draft=load_draft,
        load_corpus=load_corpus,
        translation=translation,
    )
    return build_portfolio(context)


def _longest(config: EngineConfig, model: Model) -> int:
    """The context asked for, or all the model was built for."""
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the {model.max_position} positions of {config.model}"
        )
    return config.max_model_len or model.max_position


def _kv_cache(config: EngineConfig, model: Model, drafter: Drafter, kernels: Kernels) -> KVCache:
    """The pool. A context nobody asked for is cut to what the memory holds; one asked for must fit."""
    specs = _stored_specs(config, model, drafter)
    longest = _longest(config, model)
    budget = kv_budget(config, kernels.device) // _num_here(model)
    num_blocks = config.num_kv_blocks or _num_blocks(config, specs, longest, budget)
    needed = -(-longest // config.block_size) if config.max_model_len is not None else 1
    if num_blocks < needed:
        raise ResourceError(
            f"the KV cache has {num_blocks} blocks of {config.block_size} tokens, but one request of {longest} tokens "
            f"needs {needed}: lower max_model_len, or raise num_kv_blocks or kv_cache_bytes"
        )
    needed_bytes = num_blocks * bytes_per_block(specs, config.block_size)
    check_memory(needed_bytes, f"a KV cache of {num_blocks} blocks", kernels.device)
    return KVCache(kernels, specs, num_blocks, config.block_size)


def _stored_specs(config: EngineConfig, model: Model, drafter: Drafter) -> tuple[LayerSpec, ...]:
    """What the pool keeps, the target's layers first, in the precision asked for."""
    specs = (*model.kv_specs, *drafter.kv_specs)
    if config.kv_cache_dtype == "auto":
        return specs
    if not model.kv_specs:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} was given, but {config.model} runs through transformers row by "
            "row, with a cache of its own in the model's precision: leave kv_cache_dtype at 'auto'"
        )
    dtype = _KV_DTYPES[config.kv_cache_dtype]
    if dtype is torch.int8 and any(spec.latent for spec in specs):
        raise ConfigError(
            f"kv_cache_dtype 'int8' was given, but {config.model} keeps latents, which are stored as float32 or "
            "bfloat16 only: choose one of these or 'auto'"
        )
    return tuple(spec._replace(dtype=dtype) for spec in specs)


def _num_blocks(config: EngineConfig, specs: Sequence[LayerSpec], longest: int, budget: int) -> int:
    """Blocks for every sequence at full length, as far as the memory for KV goes, `budget` bytes."""
    wanted = config.max_num_seqs * -(-longest // config.block_size)
    per_block = bytes_per_block(specs, config.block_size)
    return min(wanted, budget // per_block) if per_block else wanted


def _num_here(model: Model) -> int:
    """Ranks of the model that share the memory of this one; a GPU has one rank."""
    return model.crew.num_here if isinstance(model, RankedModel) and model.device.type == "cpu" else 1


def kv_budget(config: EngineConfig, device: torch.device, weight_bytes: int = 0) -> int:
    """Bytes for KV; `weight_bytes`: of a model that is not in memory yet."""
    share = SHARE_OF_HOST if device.type == "cpu" else _SHARE_OF_GPU
    free = (memory_of(device) or _ASSUMED_BYTES) - weight_bytes
    return config.kv_cache_bytes or int(max(free, 0) * share)


def _policy(
    config: EngineConfig, runner: Runner, drafter: Portfolio, kv_cache: KVCache, longest: int, kept: Kept | None
) -> Policy:
    """`longest`: rows of one sequence that model and pool can hold; what is measured is one."""
    if drafter.max_nodes <= 1 or not config.drafter.adaptive:
        return FixedPolicy(drafter.max_nodes)
    max_rows = min(config.max_num_batched_tokens, longest)
    rows = rows_to_measure(drafter.max_nodes * config.max_num_seqs, max_rows)
    unknown = {member.name: CallCosts(draws_levels=member.drafter.weight_bytes > 0) for member in drafter.members}
    is_coupled, is_host = config.verification == "coupled", kv_cache.device.type == "cpu"
    costs = kept.costs(rows, unknown) if kept is not None else None
    if costs is None:
        costs = Costs(PassCosts(measure_passes(rows, runner, kv_cache)))
        for member in drafter.members:
            alone = Portfolio([member], member.name, drafter.max_nodes, is_coupled)
            costs.calls[member.name] = measure_calls(alone, runner, kv_cache, longest)
    options = config.drafter.members or (config.drafter,)
    names = zip(options, drafter.members, strict=True)
    readers = frozenset(member.name for one, member in names if spec_of(one.name).reads_prediction)
    return AdaptivePolicy(drafter.max_nodes, costs, is_coupled, is_host, readers=readers)


def _kept(config: EngineConfig, drafter: Drafter, model: Model, kernels: Kernels) -> Kept:
    """The file of what was learned for this model, drafter and machine."""
    stamps = [file_stamp(each.name) for each in (config.drafter, *config.drafter.members)]
    about = {
        "model": f"{config.model} ({model.weight_bytes} bytes, {config.dtype})",
        "drafter": f"{drafter.name} ({drafter.weight_bytes} bytes)",
        "options": f"{config.drafter}{''.join(stamps)} {config.verification} {config.kv_cache_dtype}",
        "machine": machine_of(kernels) + (f", {config.num_ranks} ranks" if config.num_ranks > 1 else ""),
    }
    return Kept(learned_folder(), about, written(config.drafter))


def machine_of(kernels: Kernels) -> str:
    """What measured times hold for."""
    return f"{platform.node()} {platform.machine()}, {kernels.name}, {kernels.reason}"


def start_from(engine: Engine, config: EngineConfig, model: Model, kernels: Kernels) -> None:
    """Let later engines with these options begin with what this one's policy has learned, unless they know something.

    `model`: as loaded.
    """
    assert isinstance(engine.drafter, Portfolio)
    kept = _kept(config, engine.drafter, model, kernels)
    if isinstance(engine.policy, AdaptivePolicy) and kept.is_new:
        kept.save(engine.policy)


def _recall(kept: Kept | None, policy: Policy, drafter: Portfolio) -> Callable[[], None] | None:
    """Let the policy and drafters begin with what is kept -> what keeps what they learn."""
    if kept is None:
        return None
    found = {member.name: getattr(member.drafter, "lessons", None) for member in drafter.members}
    lessons = KeptLessons(
        kept.path.with_suffix(".npz"), {name: each for name, each in found.items() if isinstance(each, Lessons)}
    )
    finalize(drafter, lessons.save, at_once=True)  # when the engine is gone, or the process ends
    if not isinstance(policy, AdaptivePolicy):
        return lessons.save
    kept.load(policy)
    finalize(drafter, kept.save, policy, at_end=True)

    def keep() -> None:
        kept.save(policy)
        lessons.save()

    return keep
