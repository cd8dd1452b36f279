"""`forerun inspect`: what a checkpoint is, what can draft for it, what it needs, which kernels run it.

Knows: how to summarise what configuration and headers tell; weights are not read. Does not know: formats and families.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import date
from typing import TYPE_CHECKING, Any

from forerun.cli import options as opt
from forerun.cli.console import out, print_json, print_note, table
from forerun.cli.engine import note_slow_kernels, prepare, what_part, why_slow
from forerun.cli.groups import values

if TYPE_CHECKING:
    from forerun.config import EngineConfig
    from forerun.drafters.base import DrafterSpec
    from forerun.kernels.ops import Kernels
    from forerun.models.config import ModelConfig
    from forerun.models.overview import Overview


def inspect(
    target: opt.Target,
    machine: opt.Machine,
    json: opt.JsonOption = False,
    dtype: opt.Dtype = "auto",
) -> None:
    """Say what a model is, what can draft for it, the memory it needs and the kernels chosen for it."""
    report = _inspect(target.name, dtype=dtype, **values(machine))
    print_json(report) if json else _show(report)


def _inspect(name: str, **options: Any) -> dict[str, Any]:
    given = {option: value for option, value in options.items() if value is not None}
    prepare(name, "none", **given)
    from forerun.drafters.named import engine_config
    from forerun.drafters.registry import telling_heads
    from forerun.kernels.select import select_kernels
    from forerun.models.overview import look_at, why_refused

    config = engine_config(name, given)
    kernels = select_kernels(
        config.kernels, config.threads, device=config.device, pin=config.pin_threads, activations=config.activations
    )
    with telling_heads(name):
        found = look_at(name, config.dtype, config.activations, kernels.device)
    note_slow_kernels(kernels, given.get("kernels"))
    if (refused := why_refused(found, kernels.device)) is not None:
        print_note(refused)
    if found.ignored_fields:
        print_note(
            f"config.json has fields that forerun does not know and leaves out: {', '.join(found.ignored_fields)}"
        )
    usable = _usable_context(found, config, kernels)
    return {
        "model": name,
        "folder": str(found.folder),
        **_describe(found),
        "usable_context": usable,
        "tokenizer": {"vocab_size": found.tokenizer.vocab_size, "eos_token_ids": list(found.tokenizer.eos_token_ids)},
        "chat_template": found.tokenizer.chat_template is not None,
        "parsers": _parsers(found.tokenizer.chat_template, found.tokenizer.tool_template),
        "adapters": list(found.adapters),
        "drafters": _drafters(name, found),
        "profile": _profile(found, kernels),
        "memory": _memory(found, usable),
        "backend": {"name": kernels.name, "reason": kernels.reason},
        "kernels": kernels.describe(),
    }


def _usable_context(found: Overview, config: EngineConfig, kernels: Kernels) -> int:
    """The positions of one request that fit beside the weights."""
    from forerun.assemble import kv_budget
    from forerun.cache.kv_cache import bytes_per_block

    per_block = bytes_per_block(found.kv_specs, config.block_size)
    if not per_block:
        return found.max_position
    num_blocks = kv_budget(config, kernels.device, found.weight_bytes) // per_block
    return min(found.max_position, num_blocks * config.block_size)


def _parsers(template: str | None, with_tools: str | None) -> dict[str, str | bool | None]:
    """What a server takes for tool calls and for reasoning, going by the chat templates."""
    from forerun.server.reasoning import reasoning_style
    from forerun.server.tools import HARMONY, takes_tools, tool_style

    tools, marks = with_tools and tool_style("auto", with_tools), reasoning_style("auto", template)
    channels = "analysis channel" if tools == HARMONY else None
    reasoning = f"{marks.start} ... {marks.end}" if marks else channels
    return {"tools": tools, "template_takes_tools": takes_tools(with_tools or ""), "reasoning": reasoning}


def _describe(found: Overview) -> dict[str, Any]:
    """Family and sizes, as config.json gives them, and how the weights are stored."""
    from forerun.models.storage import describe_storage

    raw = found.raw_config
    sizes = {
        "num_layers": raw.get("num_hidden_layers") if found.config is None else found.config.num_layers,
        "hidden_size": raw.get("hidden_size"),
        "intermediate_size": raw.get("intermediate_size"),
        "num_heads": raw.get("num_attention_heads"),
        "num_kv_heads": _num_kv_heads(found),
        "vocab_size": found.vocab_size,
        **_special_sizes(found.config),
    }
    bits = round(8 * found.stored_bytes / found.num_parameters, 2)
    storage = {**describe_storage(found.folder), "bits_per_weight": bits}
    return {
        "family": raw.get("model_type"),
        "text_part": what_part(found),
        "implementation": found.implementation,
        "slow": why_slow(found),
        "num_parameters": found.num_parameters,
        "sizes": sizes,
        "dtype": storage["method"],
        "storage": storage,
        "context": found.max_position,
    }


def _num_kv_heads(found: Overview) -> int | None:
    """Heads of keys, of latent attention as config.json has them."""
    raw, config = found.raw_config, found.config
    if config is not None and config.latents is None:
        return config.heads.num_kv
    given: int | None = raw.get("num_key_value_heads", raw.get("num_attention_heads"))
    return given


def _special_sizes(config: ModelConfig | None) -> dict[str, Any]:
    """Sizes of mixtures of experts, of latent attention and of keys and values that differ, if the model has such."""
    from forerun.models.config import active_parameters

    sizes: dict[str, Any] = {}
    if config is not None and config.experts is not None:
        routing = config.experts.routing
        sizes = {"num_experts": routing.num_experts, "experts_per_token": routing.top_k}
        sizes["active_parameters"] = active_parameters(config)
    if config is not None and config.latents is not None:
        sizes["latent_size"] = config.heads.head_dim
    if config is not None and len({shape.heads for shape in config.shapes}) > 1:
        sizes |= _kv_kinds(config)
    return sizes


def _kv_kinds(config: ModelConfig) -> dict[str, Any]:
    """Keys and values of the layers of each kind, and how many layers read those of others."""
    attending = [i for i in range(config.num_layers) if config.has_mixer(i) and not config.is_recurrent(i)]
    own = [i for i in attending if config.shape(i).kv_layer is None]
    kinds = Counter((config.shape(i).heads.num_kv, config.shape(i).heads.head_dim, config.window(i)) for i in own)
    names = ("num_kv_heads", "head_dim", "window", "num_layers")
    described = [dict(zip(names, (*kind, count), strict=True)) for kind, count in kinds.items()]
    return {"kv_kinds": described, "num_kv_shared_layers": len(attending) - len(own)}


def _drafters(name: str, found: Overview) -> dict[str, str]:
    """Drafter -> with what it works already, or what it needs."""
    from forerun.drafters.registry import all_specs

    single = [spec for spec in all_specs().values() if spec.is_single]
    is_open = found.implementation == "forerun"
    return {spec.name: _with_what(name, spec) for spec in single if is_open or not spec.needs_layers}


def _profile(found: Overview, kernels: Kernels) -> dict[str, Any] | None:
    """What `forerun bench drafters` found here; None where it did not run."""
    from forerun.assemble import machine_of
    from forerun.config import profiles_folder
    from forerun.learned import read_profile

    profile = read_profile(profiles_folder(), str(found.folder), machine_of(kernels))
    return None if profile is None else asdict(profile)


def _with_what(name: str, spec: DrafterSpec) -> str:
    from forerun.drafters.named import own_model

    own = own_model(name, spec)
    if not spec.model or own is not None:
        return f"with {own}" if own else "always"
    num_modules = 0 if spec.own_modules is None else spec.own_modules(name)
    if num_modules > 1:
        return f"with the checkpoint's own {num_modules} modules, one behind the other"
    return "with the checkpoint's own module" if num_modules else f"with {spec.model} (--draft-model)"


def _memory(found: Overview, usable_context: int) -> dict[str, int]:
    """Bytes; a model that keeps its own state (transformers) has no KV to count."""
    per_token = sum(spec.bytes_per_position for spec in found.kv_specs)
    state = sum(spec.bytes_per_slot for spec in found.state_specs)
    return {
        "weights_bytes": found.weight_bytes,
        "kv_bytes_per_token": per_token,
        "kv_bytes_at_full_context": per_token * found.max_position,
        "state_bytes": state,
        "bytes_at_usable_context": found.weight_bytes + per_token * usable_context + state,
    }


def _show(report: dict[str, Any]) -> None:
    console = out()
    result = table("", "", title=report["model"])
    result.title_style = "bold"
    result.show_header = False
    result.columns[1].justify = "left"
    for label, value in _lines(report):
        result.add_row(label, value)
    console.print(result)


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    sizes, memory = report["sizes"], report["memory"]
    return [
        ("family", f"{report['family']} (run by {report['implementation']})"),
        *([("text part", report["text_part"])] if report["text_part"] else []),
        *([("slow", report["slow"])] if report["slow"] else []),
        ("parameters", f"{report['num_parameters'] / 1e6:.1f}M, stored as {_stored(report['storage'])}"),
        ("shape", _shape(sizes)),
        *_experts(sizes),
        ("context", _context(report)),
        ("tokenizer", f"{report['tokenizer']['vocab_size']} tokens"),
        ("chat template", _template(report)),
        *([("adapters", ", ".join(report["adapters"]))] if report["adapters"] else []),
        ("can draft", "; ".join(f"{name}: {how}" for name, how in report["drafters"].items())),
        *([("expected", _expected(report["profile"]))] if report["profile"] else []),
        ("on disk", "; ".join(_by_type(*kind) for kind in report["storage"]["bytes"].items())),
        ("weights", f"{_size(memory['weights_bytes'])} in memory"),
        ("KV cache", _kv(memory)),
        *([("state", _state(memory))] if memory["state_bytes"] else []),
        ("memory", f"{_size(memory['bytes_at_usable_context'])} for one request of {report['usable_context']} tokens"),
        ("backend", f"{report['backend']['name']}: {report['backend']['reason']}"),
        ("kernels", _kernels(report["kernels"])),
    ]


def _expected(profile: dict[str, Any]) -> str:
    """Such as "1.46x with suffix (of 5 drafters, 12 built-in prompts, 2026-11-23)"."""
    best, gains, day = profile["recommended"], profile["gains"], date.fromtimestamp(profile["made_s"])
    said = f"{gains[best]:.2f}x with {best}" if best in gains else "no drafter gains"
    return f"{said} (of {len(gains)} drafters, {profile['suite']}, {day})"


def _template(report: dict[str, Any]) -> str:
    parsers = report["parsers"]
    if not report["chat_template"]:
        return "no"
    if parsers["template_takes_tools"]:
        said = f"yes; tool calls as {parsers['tools']}"
    else:
        said = f"yes, without tools (a server describes them in a system message, for calls as {parsers['tools']})"
    return said + (f"; reasoning in {marks}" if (marks := parsers["reasoning"]) else "")


def _stored(storage: dict[str, Any]) -> str:
    """Such as "gptq, 4 bits in groups of 128: 4.60 bits a weight in all"."""
    parts = [storage["method"] + (" (GGUF)" if storage["format"] == "gguf" else "")]
    if storage["format"] == "quantized" and storage["bits"]:
        grouped = f" in groups of {storage['group_size']}" if (storage["group_size"] or -1) > 0 else ""
        parts.append(f"{storage['bits']} bits{grouped}")
    return f"{', '.join(parts)}: {storage['bits_per_weight']:g} bits a weight in all"


def _by_type(kind: str, sizes: dict[str, int]) -> str:
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    return f"{kind} " + " + ".join(f"{_size(nbytes)} {stored}" for stored, nbytes in largest_first)


def _shape(sizes: dict[str, Any]) -> str:
    layers = f"{sizes['num_layers']} layers of {sizes['hidden_size']}"
    if sizes["num_heads"] is None:  # a model without attention, through transformers
        return layers
    return f"{layers}, {sizes['num_heads']} heads, {_kept(sizes)}"


def _kept(sizes: dict[str, Any]) -> str:
    if "latent_size" in sizes:
        return f"one latent of {sizes['latent_size']} kept for all"
    if "kv_kinds" not in sizes:
        return f"{sizes['num_kv_heads']} for keys and values"
    kinds = [
        f"{kind['num_kv_heads']} of {kind['head_dim']} entries in {kind['num_layers']} layers"
        + (f" with a window of {kind['window']}" if kind["window"] else "")
        for kind in sizes["kv_kinds"]
    ]
    shared = f"; {num} layers read those of others" if (num := sizes["num_kv_shared_layers"]) else ""
    return f"keys and values: {', '.join(kinds)}{shared}"


def _experts(sizes: dict[str, Any]) -> list[tuple[str, str]]:
    if "num_experts" not in sizes:
        return []
    active = f"{sizes['active_parameters'] / 1e6:.1f}M parameters"
    return [("experts", f"{sizes['num_experts']}, {sizes['experts_per_token']} a token, which reads {active}")]


def _context(report: dict[str, Any]) -> str:
    """The model's context, and how much of it fits into memory if that is less."""
    less = report["usable_context"] < report["context"]
    return f"{report['context']} tokens" + (f", {report['usable_context']} with the memory at hand" if less else "")


def _kv(memory: dict[str, int]) -> str:
    if not memory["kv_bytes_per_token"]:
        return "kept by transformers"
    full = _size(memory["kv_bytes_at_full_context"])
    return f"{_size(memory['kv_bytes_per_token'])} a token, {full} at full context"


def _state(memory: dict[str, int]) -> str:
    """Of recurrent layers, with what they mean for speed."""
    return f"{_size(memory['state_bytes'])} a request; passes run op by op, neither recorded nor captured"


def _kernels(ops: dict[str, str]) -> str:
    """The ops, grouped by where they run."""
    places: dict[str, list[str]] = {}
    for op, place in ops.items():
        places.setdefault(place, []).append(op)
    return "; ".join(f"{place}: {', '.join(sorted(names))}" for place, names in sorted(places.items()))


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
