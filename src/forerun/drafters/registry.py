"""Which drafters there are, and which of them a name stands for.

Knows: how to find the drafters of this package and those in files of the user's, and whether options fit a drafter.
Does not know: any drafter by name; engines.
"""

from __future__ import annotations

import hashlib
import importlib.util
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from forerun import drafters
from forerun.config import DrafterConfig
from forerun.drafters.base import DrafterSpec
from forerun.errors import ConfigError, ModelError, suggestion
from forerun.weights.resolve import EMBEDDED, resolve_model

Loaded = TypeVar("Loaded")

# Fields that every drafter takes: one that learns nothing from requests keeps to `across_requests=False` anyway.
_FOR_ALL = ("max_draft_tokens", "adaptive", "across_requests")
_GIVEN = {"model": "a draft model was", "layers": "layers were", "members": "members were", "corpus": "a corpus was"}


@cache
def all_specs() -> Mapping[str, DrafterSpec]:
    """The SPEC of every module of this package that has one, by the drafter's name."""
    found = [import_module(f"{drafters.__name__}.{info.name}") for info in pkgutil.iter_modules(drafters.__path__)]
    specs = {module.SPEC.name: module.SPEC for module in found if hasattr(module, "SPEC")}
    return {name: specs[name] for name in sorted(specs)}


def spec_of(name: str) -> DrafterSpec:
    """The spec of a drafter by its name, or by FILE.py:CLASS.

    Raises ConfigError where there is no such drafter, file or class, and whatever the file raises.
    """
    if ".py:" in name:
        return _spec_from_file(name)
    spec = all_specs().get(name)
    if spec is None:
        names = (*all_specs(), "auto")
        like = (
            f"; a model drafts as draft={name}"
            if name in EMBEDDED or (name and Path(name).is_dir())
            else suggestion(name, names)
        )
        raise ConfigError(f"there is no drafter {name}; choose from {', '.join(names)}, or give FILE.py:CLASS{like}")
    return spec


def check(options: DrafterConfig) -> None:
    """Raise ConfigError where a drafter lacks what it needs, or was given options it does not use."""
    spec = spec_of(options.name)
    if spec.model and spec.own_modules is None and not options.model:
        where = "give --draft-model a folder, a hub id or an embedded name"
        raise ConfigError(f"drafter {options.name!r} needs {spec.model}: {where}")
    for field, were in _GIVEN.items():
        if (got := getattr(options, field)) and field not in spec.options:
            takers = ", ".join(name for name, other in all_specs().items() if field in other.options)
            raise ConfigError(
                f"{were} given but the drafter is {options.name!r}: choose one of {takers}; got {got!r:.80}"
            )
    if "members" in spec.options:
        _check_members(options)


def read_by(options: DrafterConfig) -> frozenset[str]:
    """The fields of DrafterConfig that this drafter, or a member of it, reads; all where it is in a user's file."""
    each = options.members or (options,)
    if any(".py:" in one.name for one in each):
        return frozenset(field.name for field in fields(DrafterConfig))
    return frozenset(_FOR_ALL).union(*(spec_of(one.name).options for one in each))


def check_read(options: DrafterConfig, given: Iterable[str]) -> None:
    """Raise ConfigError where one of the fields of DrafterConfig that were given is read by none of these drafters."""
    usual, read = DrafterConfig(), read_by(options)
    for field in given:
        value = getattr(options, field)
        if field not in read and value != getattr(usual, field):
            names = " and ".join(one.name for one in options.members or (options,))
            takers = ", ".join(name for name, spec in all_specs().items() if field in spec.options)
            raise ConfigError(
                f"{field} {value} was given, but {names} would ignore it: leave it out, or draft with one of {takers}"
            )


def check_heads(options: DrafterConfig) -> None:
    """Raise ConfigError where heads are given to another drafter than theirs, ModelError where there is no such folder.

    Reads headers only.
    """
    for one in options.members or (options,):
        spec = spec_of(one.name)
        if spec.holds_heads is None or one.model is None:
            continue
        folder = resolve_model(one.model)
        with suppress(ModelError):  # reading the heads says what is wrong
            if spec.holds_heads(folder):
                continue
        holder = drafter_of(one.model)
        if holder is not None:
            raise ConfigError(f"{one.model} holds a head for the drafter {holder}, not {one.name}: use "
                              f"{holder}={one.model}")  # fmt: skip


def _check_members(options: DrafterConfig) -> None:
    specs = [spec_of(member.name) for member in options.members]
    if not specs or not all(spec.is_single for spec in specs):
        raise ConfigError(f"a {options.name}'s members are single drafters, at least one: neither none nor another")
    check_names([spec.name for spec in specs])
    for member in options.members:
        check(member)


def check_prediction(options: DrafterConfig) -> None:
    """Raise ConfigError if no drafter of an engine with these options reads what an answer is expected to repeat."""
    if not any(spec_of(each.name).reads_prediction for each in options.members or (options,)):
        readers = ", ".join(name for name, spec in all_specs().items() if spec.reads_prediction)
        raise ConfigError(
            f"a prediction is read by the drafter {readers} alone, and this engine has {options.name}: use auto or a "
            "portfolio that has it, or leave the prediction out"
        )


def draft_models(options: DrafterConfig) -> list[str]:
    """The language models, each with a tokenizer of its own, that these options name to draft with."""
    each = [(spec_of(one.name), one.model) for one in options.members or (options,)]
    return [model for spec, model in each if model is not None and spec.drafts_with_model]


def check_names(members: Sequence[str]) -> None:
    """Raise ConfigError where two members of a portfolio have one name, under which their drafts are counted."""
    for name, num in Counter(members).items():
        if num > 1:
            raise ConfigError(f"a portfolio has {num} members named {name}: name each drafter once")


@contextmanager
def telling_heads(name: str) -> Iterator[None]:
    """Say of a draft head that was taken for a model that it is one. Raises ConfigError."""
    try:
        yield
    except ModelError as error:
        drafter = drafter_of(name)
        if drafter is None:
            raise
        raise ConfigError(
            f"{name} is a draft head, not a model: draft with it for the model it was trained with by drafter "
            f"'{drafter}={name}' (on the command line --drafter {drafter}={name})"
        ) from error


def named_heads(load: Callable[[str], Loaded]) -> Callable[[str], Loaded]:
    """The same way to load a model, which says of a draft head that it is one."""

    def load_or_tell(name: str) -> Loaded:
        with telling_heads(name):
            return load(name)

    return load_or_tell


def drafter_of(name_or_folder: str | Path) -> str | None:
    """The drafter whose heads this model or folder holds; None if there are none."""
    try:
        folder = resolve_model(name_or_folder)
        specs = all_specs().values()
        return next((spec.name for spec in specs if spec.holds_heads is not None and spec.holds_heads(folder)), None)
    except ModelError:
        return None


def _spec_from_file(name: str) -> DrafterSpec:
    """The file's SPEC if it is that of the class named, else one with the usual settings."""
    file, _, class_name = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"there is no file {path} to take a drafter from")
    module = _run_file(path, path.stat().st_mtime_ns)
    if not hasattr(module, class_name):
        raise ConfigError(f"{path} has no class {class_name!r}; it defines {', '.join(_classes(module)) or 'none'}")
    build, stated = getattr(module, class_name), getattr(module, "SPEC", None)
    if isinstance(stated, DrafterSpec) and stated.build is build:
        return stated
    return DrafterSpec(name=name, build=build, help=f"what {path} says")


def file_stamp(name: str) -> str:
    """Which file the drafter FILE.py:CLASS comes from, and the hash of what it says; "" for one of this package."""
    path = Path(name.rpartition(":")[0])
    return f" {path.resolve()} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" if ".py:" in name else ""


@cache
def _run_file(path: Path, changed_ns: int) -> ModuleType:
    """The module in a file, which is run again once it was changed."""
    spec = importlib.util.spec_from_file_location(f"forerun_drafter_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    return module


def _classes(module: ModuleType) -> list[str]:
    return sorted(n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__)
