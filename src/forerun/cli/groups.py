"""Options in groups: a command takes dataclasses, and each of their fields is an option of its own.

Errors of the library name options as Python does; commands say them as they are typed.

Knows: how typer reads a command's parameters. Does not know: any option.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from typer.models import OptionInfo

from forerun.errors import ForerunError

# No part of a path, not quoted or given a value, and not behind a colon, where fields of files are named.
_LONG_NAME = re.compile(r"(?<![\w.\-/'\"\[])(?<!: )\w+_\w+(?![\w=\[/]|\.\w)")
# Names of one word are words with other meanings, too; here the message says what is allowed for it.
_FIRST_NAME = re.compile(r"^\w+(?= (?:must|may|and) )")


def ungrouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: a parameter for each field of its parameters that are dataclasses."""
    kinds = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()

    def flat(**given: Any) -> None:
        taken = {p.name: _take(kinds[p.name], given) if is_dataclass(kinds[p.name]) else given[p.name] for p in own}
        try:
            command(**taken)
        except ForerunError as error:
            error.args = (as_typed(str(error), spelled),)
            raise

    run: Any = flat
    run.__signature__ = inspect.Signature([each for p in own for each in _parameters(p, kinds[p.name])])
    run.__doc__ = command.__doc__
    spelled = dict(_spelled(run.__signature__.parameters.values()))
    return flat


def as_typed(message: str, spelled: Mapping[str, str]) -> str:
    """A message that names options as Python does, with each of them `spelled` as it is typed."""

    def typed(found: re.Match[str]) -> str:
        return spelled.get(found[0], found[0])

    return _LONG_NAME.sub(typed, _FIRST_NAME.sub(typed, message))


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


def _spelled(parameters: Iterable[inspect.Parameter]) -> Iterator[tuple[str, str]]:
    """The names of options in Python, and how each is typed."""
    for parameter in parameters:
        for info in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(info, OptionInfo):
                # Of names that are given, typer has the first as the default until it reads the parameter.
                names = [str(name) for name in (info.default, *(info.param_decls or ())) if str(name).startswith("--")]
                yield parameter.name, [*names, f"--{parameter.name.replace('_', '-')}"][0].partition("/")[0]
