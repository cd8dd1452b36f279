"""Options in groups: a command takes dataclasses, and each of their fields is an option of its own.

Knows: how typer reads a command's parameters. Does not know: any option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def ungrouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: a parameter for each field of its parameters that are dataclasses."""
    kinds = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()

    def flat(**given: Any) -> None:
        command(**{p.name: _take(kinds[p.name], given) if is_dataclass(kinds[p.name]) else given[p.name] for p in own})

    run: Any = flat
    run.__signature__ = inspect.Signature([each for p in own for each in _parameters(p, kinds[p.name])])
    run.__doc__ = command.__doc__
    return flat


def values(group: Any) -> dict[str, Any]:
    """The values of a group's fields, by name."""
    return {field.name: getattr(group, field.name) for field in fields(group)}


def _take(kind: Any, given: Mapping[str, Any]) -> Any:
    return kind(**{field.name: given[field.name] for field in fields(kind)})


def _parameters(parameter: inspect.Parameter, kind: Any) -> Iterator[inspect.Parameter]:
    if not is_dataclass(kind):
        yield parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=kind)
        return
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        default = parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
