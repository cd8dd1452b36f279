"""Options as they are written: of a drafter (NAME, NAME=MODEL, suffix=CORPUS, portfolio=A+B, ...), of an engine.

Knows: what comes with a target to draft with, who takes a draft model, which options name files. Does not know: any
drafter by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from forerun.config import DrafterConfig, EngineConfig
from forerun.drafters import portfolio
from forerun.drafters.base import DrafterSpec
from forerun.drafters.registry import all_specs, check, check_read, drafter_of, read_by, spec_of
from forerun.errors import ConfigError, suggestion
from forerun.weights.resolve import EMBEDDED

AUTO = "auto"  # a portfolio of what the target offers
FILES = ("generation_config", "draft_vocabulary", "corpus")  # engine options that name one
VLLM_OPTIONS = {  # of vLLM's LLM -> what does it here, where no name is like it
    "speculative_config": "drafter and draft_model", "gpu_memory_utilization": "kv_cache_bytes",
    "swap_space": "kv_host_gib", "enable_prefix_caching": "prefix_caching", "enable_lora": "lora",
}  # fmt: skip


def drafter_config(target: str, text: str, draft_model: str | None, options: Mapping[str, Any]) -> DrafterConfig:
    """The options of a drafter for `target`. Raises ConfigError for what does not exist or go together."""
    config = _config(target, text, draft_model, {name: value for name, value in options.items() if value is not None})
    check(config)
    return config


def only_read(target: str, text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options meant for several drafters, `draft_model` among them, without those that this one does not read."""
    model = options.get("draft_model") if takes_model(text) else None
    unread = {field.name for field in fields(DrafterConfig)} - read_by(drafter_config(target, text, model, {}))
    if model is None:
        unread.add("draft_model")
    return {name: value for name, value in options.items() if name not in unread}


def _config(target: str, text: str, draft_model: str | None, given: Mapping[str, Any]) -> DrafterConfig:
    spec, rest = read(text)
    usual = {"max_draft_tokens": spec.max_draft_tokens} if spec.max_draft_tokens else {}
    if "members" not in spec.options:
        if rest and "corpus" in spec.options:
            given, rest = {**given, "corpus": rest}, ""
        model = rest or draft_model or own_model(target, spec)
        return DrafterConfig(name=text.partition("=")[0], model=model, **{**usual, **given})
    parts = rest.split("+") if rest else _offered(target, draft_model)
    shared = {name: value for name, value in given.items() if name != "corpus"}
    members = tuple(
        _config(
            target,
            part,
            draft_model if _needs_model(part) else None,
            given if "corpus" in read(part)[0].options else shared,
        )
        for part in parts
    )
    if draft_model and all(member.model != draft_model for member in members):
        raise ConfigError(f"a draft model was given, but none of {', '.join(parts)} takes it: add draft to them")
    if "corpus" in given and not any(member.corpus for member in members):
        raise ConfigError(f"a corpus was given, but none of {', '.join(parts)} takes it: add suffix to them")
    return DrafterConfig(name=spec.name, members=members, **{**usual, **shared})


def written(drafter: DrafterConfig) -> str:
    """A drafter as on the command line, with its members, or with its model or corpus."""
    if drafter.members:
        return f"{drafter.name}={'+'.join(map(written, drafter.members))}"
    source = drafter.model or drafter.corpus
    return f"{drafter.name}={source}" if source else drafter.name


def read(text: str) -> tuple[DrafterSpec, str]:
    """The spec of the drafter named, and the text after the "=". Raises ConfigError where there is none."""
    name, _, rest = text.partition("=")
    if name == AUTO and rest:
        raise ConfigError(f"auto chooses its drafters itself; to add a model write --drafter auto --draft-model {rest}")
    return (portfolio.SPEC if name == AUTO else spec_of(name)), rest


def takes_model(text: str) -> bool:
    """Whether this drafter can use a draft model given by a separate option."""
    spec, rest = read(text)
    if "members" in spec.options:
        return not rest or any(_needs_model(part) for part in rest.split("+"))
    return bool(spec.model)


def _needs_model(text: str) -> bool:
    """Whether a drafter needs a model and the text names none."""
    spec, rest = read(text)
    return bool(spec.model) and spec.own_modules is None and not rest


def is_chosen_by_target(text: Any) -> bool:
    """Whether the members of this drafter depend on what the target offers."""
    return isinstance(text, str) and "members" in (found := read(text))[0].options and not found[1]


def own_model(target: str, spec: DrafterSpec) -> str | None:
    """The drafter's model that comes with a target: embedded, or the folder TARGET/NAME; None if there is none."""
    embedded, folder = f"{target}-{spec.name}", Path(target) / spec.name
    if not spec.model:
        return None
    if embedded in EMBEDDED:
        return embedded
    return str(folder) if (folder / "config.json").is_file() else None


def default_drafter(target: str, draft_model: str | None) -> str:
    """The drafter used if none is named: what is given to draft with, else a draft model there is, else n-grams."""
    if draft_model is not None:
        return drafter_of(draft_model) or "draft"
    return "draft" if own_model(target, spec_of("draft")) else "ngram"


def has_own(target: str, spec: DrafterSpec) -> bool:
    """Whether a drafter finds what it drafts with beside the target or in the target's own checkpoint."""
    return own_model(target, spec) is not None or (spec.own_modules is not None and spec.own_modules(target) > 0)


def _offered(target: str, draft_model: str | None) -> list[str]:
    """The default drafters for a target: lookups, and the best available one with weights.

    A draft model may be a folder of heads, whose tensors say which drafter they are for.
    """
    in_order = sorted((spec for spec in all_specs().values() if spec.auto is not None), key=lambda spec: spec.auto or 0)
    lookups = [spec.name for spec in in_order if not spec.model]
    if draft_model is not None and (holder := drafter_of(draft_model)) is not None:
        return [*lookups, f"{holder}={draft_model}"]
    with_model = (spec.name for spec in in_order if spec.model and (draft_model is not None or has_own(target, spec)))
    return [*lookups, *islice(with_model, 1)]


def whole_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, `model` among them, with folders and files of this machine by their whole paths: to be used elsewhere.

    Raises ConfigError for a drafter that does not exist.
    """
    whole = dict(options)
    for name in ("model", "draft_model", *FILES):
        if isinstance(whole.get(name), str) and whole[name] not in (*EMBEDDED, "auto", "none"):
            whole[name] = _whole_path(whole[name])
    if isinstance(whole.get("drafter"), str):
        whole["drafter"] = _whole_drafter(whole["drafter"])
    if isinstance(whole.get("kv_disk"), str):  # it is made when it is not there
        whole["kv_disk"] = os.path.abspath(os.path.expanduser(whole["kv_disk"]))
    if isinstance(whole.get("lora"), dict):
        whole["lora"] = {name: _whole_path(folder) for name, folder in whole["lora"].items()}
    return whole


def _whole_drafter(text: str) -> str:
    """A drafter as it is written, with the whole paths of its file, its model or corpus, and those of its members."""
    name, equals, rest = text.partition("=")
    if ".py:" in name:
        file, _, class_name = name.rpartition(":")
        name = f"{_whole_path(file)}:{class_name}"
        if "=" in name:
            raise ConfigError(f"{name}: the file of a drafter cannot be in a folder with = in its name: move it")
    elif rest and "members" in read(text)[0].options:
        members = [_whole_drafter(member) for member in rest.split("+")]
        if odd := next((member for member in members if "+" in member), None):
            raise ConfigError(f"{odd}: + stands between the members of a portfolio: use a folder without it")
        return f"{name}={'+'.join(members)}"
    return name + equals + (rest if rest in EMBEDDED else _whole_path(rest))


def _whole_path(name: Any) -> Any:
    """A folder or file of this machine by its whole path; anything else as it is."""
    if not isinstance(name, str) or not name:
        return name
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.exists(path) else name  # links stay: files of the hub are some


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from flat options. Raises ConfigError for one that does not exist."""
    drafter_fields = {f.name for f in fields(DrafterConfig)} - {"name", "model"}
    engine_fields = {f.name for f in fields(EngineConfig)} - {"model", "drafter"}
    unknown = sorted(set(options) - drafter_fields - engine_fields - {"drafter", "draft_model"})
    if unknown:
        allowed = sorted(drafter_fields | engine_fields | {"drafter", "draft_model"})
        like = VLLM_OPTIONS.get(unknown[0])
        meant = f"; what vLLM calls {unknown[0]} is {like} here" if like else suggestion(unknown[0], allowed)
        listed = f"{meant.removesuffix('?')}. All options: {', '.join(allowed)}"
        raise ConfigError(f"unknown option {', '.join(unknown)}{listed}")
    given_model = options.get("draft_model")
    wanted = options.get("drafter") or ("none" if given_model is None else default_drafter(model, given_model))
    if isinstance(wanted, DrafterConfig):
        beside = [name for name in (*sorted(drafter_fields), "draft_model") if options.get(name) is not None]
        if beside:
            raise ConfigError(f"{', '.join(beside)} beside a DrafterConfig would not be read: set it there")
        drafter = wanted
        check(drafter)
    else:
        given = {k: v for k, v in options.items() if k in drafter_fields}
        drafter = drafter_config(model, wanted, given_model, given)
        if wanted != AUTO:  # whose members depend on the model
            check_read(drafter, given)
    return EngineConfig(model=model, drafter=drafter, **{k: v for k, v in options.items() if k in engine_fields})
