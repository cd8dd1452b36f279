"""Which drafter a name stands for.

Knows: every drafter's module, and how to load a drafter from a file of the user's. Does not know: engines.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from forerun.drafters import draft_model, eagle, layer_skip, medusa, mtp, ngram, none, recycling, suffix
from forerun.drafters.base import Drafter, DrafterContext
from forerun.drafters.guarded import GuardedDrafter
from forerun.drafters.portfolio import Portfolio
from forerun.errors import ConfigError

Build = Callable[[DrafterContext], Drafter]

BUILDERS: Mapping[str, Build] = {
    "none": none.build,
    "ngram": ngram.build,
    "suffix": suffix.build,
    "recycling": recycling.build,
    "draft": draft_model.build,
    "layer_skip": layer_skip.build,
    "medusa": medusa.build,
    "eagle": eagle.build,
    "mtp": mtp.build,
}


def build_portfolio(context: DrafterContext) -> Portfolio:
    """The members of `context.options`, or the one drafter it names, under a guide.

    Raises ConfigError where a drafter's file or class does not exist, and whatever a drafter raises.
    """
    options = context.options
    members = [build_drafter(replace(context, options=member)) for member in options.members or (options,)]
    return Portfolio(members, options.name, options.max_draft_tokens + 1, context.grower.coupled)


def build_drafter(context: DrafterContext) -> Drafter:
    """The drafter of `context.options`, under guard; a name FILE.py:CLASS makes that class from the context.

    Raises ConfigError where file or class does not exist, and whatever the drafter raises.
    """
    name = context.options.name
    build = BUILDERS.get(name)
    drafter = build(context) if build is not None else _class_from_file(name)(context)
    return GuardedDrafter(drafter, context.model.vocab_size)


def _class_from_file(name: str) -> Build:
    """The class a FILE.py:CLASS names."""
    path, _, class_name = name.rpartition(":")
    module = _run_file(Path(path))
    if not hasattr(module, class_name):
        raise ConfigError(f"{path} has no class {class_name!r}; it defines {', '.join(_classes(module)) or 'none'}")
    found: Build = getattr(module, class_name)
    return found


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} to take a drafter from")
    spec = importlib.util.spec_from_file_location(f"forerun_drafter_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names in annotations
    spec.loader.exec_module(module)
    return module


def _classes(module: ModuleType) -> list[str]:
    return sorted(n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__)
