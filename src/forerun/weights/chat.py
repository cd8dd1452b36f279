"""Chat templates: a conversation becomes the text the model was trained on.

Knows: where a folder keeps its template and how transformers renders one (a sandboxed jinja2 with a few helpers).
Does not know: tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from forerun.errors import CheckpointError, PromptError
from forerun.weights.checkpoint import read_optional_json

TEMPLATE_FILE = "chat_template.jinja"


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The folder's template: its own file, else tokenizer_config.json (`settings`), else chat_template.json."""
    if (folder / TEMPLATE_FILE).exists():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    template = settings.get("chat_template") or read_optional_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder}: chat_template must be a string, got {type(template).__name__}")
    return template


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of a conversation; raises PromptError if the template refuses it or fails."""
    if not messages:
        raise PromptError("the conversation is empty; give at least one message with 'role' and 'content'")
    try:
        return _compile(template).render(messages=list(messages), **variables)
    except jinja2.TemplateError as error:
        raise PromptError(f"the chat template refuses these messages: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PromptError(f"the chat template cannot render these messages: {error!r}; check their fields") from error


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """Compiled as transformers does (utils/chat_template_utils.py)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template is not valid jinja (line {error.lineno}): {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks mark what the assistant said (for training); here they are plain text."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: Any) -> Any:
        return caller()


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
