"""The reference pages of the documentation, written from the code: commands with their options, the Python API.

Knows: how typer describes a command, and how classes, fields and their comments look in source. Does not know: the
site these pages are part of (`site_pages.py`), nor what anything does. Nothing of torch is imported.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

import forerun
from forerun.cli.app import app

PACKAGE = Path(forerun.__file__).parent
PUBLIC = {  # module -> its classes, in the order of the page
    "llm": ("LLM",),
    "core": ("SamplingParams", "RequestOutput", "CompletionOutput", "RequestStats", "DrafterCount", "DepthCount",
             "PositionLogprobs", "TokenLogprob"),
    "config": ("EngineConfig", "DrafterConfig"),
    "drafters.base": ("DrafterSpec", "DrafterContext", "Drafter", "Stateless"),
}  # fmt: skip
CLI_TITLE = "# Commands and options\n\nWritten from the code; `forerun COMMAND --help` prints the same."
PYTHON_TITLE = (
    "# Python API\n\nWritten from the code. What `import forerun` offers by itself: "
    + ", ".join(f"`{name}`" for name in forerun.__all__)
    + ". Other classes are imported from the module that is given."
)


def cli_reference() -> str:
    """Every command of `forerun` with its arguments and options."""
    return "\n\n".join([CLI_TITLE, *_command(typer.main.get_command(app), None, "forerun")])


def _command(command: Any, parent: Any, name: str) -> Iterator[str]:
    context = command.context_class(command, parent=parent, info_name=name)
    yield f"## {context.command_path}"
    yield _escaped(command.help or "")
    yield f"```text\n{' '.join(command.get_usage(context).split()).removeprefix('Usage: ')}\n```"
    panels = sorted(command.params, key=lambda each: each.rich_help_panel or "")  # stable: the order of --help
    for panel, params in groupby(panels, key=lambda each: each.rich_help_panel or ""):
        yield _table(panel or "Arguments and options", [param.get_help_record(context) for param in params])
    for child_name, child in getattr(command, "commands", {}).items():
        yield from _command(child, context, child_name)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| <code>{_escaped(left)}</code> | {_escaped(right)} |" for left, right in rows]
    return "\n".join([f"| {title} | |", "|---|---|", *lines])


def _escaped(text: str) -> str:
    """A text of the code as Markdown shows it unchanged, but that what stands in backticks is code."""
    parts = text.split("`")
    return "`".join(part if index % 2 else _plain(part) for index, part in enumerate(parts))


def _plain(text: str) -> str:
    return re.sub(r"([\[\]*|])", lambda found: f"&#{ord(found[1])};", html.escape(text, quote=False))


def python_reference() -> str:
    """The classes of PUBLIC and the tree of errors."""
    parts = [PYTHON_TITLE]
    for module, names in PUBLIC.items():
        source = (PACKAGE / (module.replace(".", "/") + ".py")).read_text("utf-8")
        classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
        for name in names:
            parts += _class(classes[name], f"forerun.{module}", source.splitlines())
    return "\n\n".join([*parts, *_errors()])


def _errors() -> Iterator[str]:
    tree = (ast.get_docstring(ast.parse((PACKAGE / "errors.py").read_text("utf-8"))) or "").split("\n\n")[1]
    yield "## Errors"
    yield "All of them are in `forerun.errors`; catch `forerun.ForerunError` for any of them."
    yield f"```text\n{tree}\n```"


def _class(node: ast.ClassDef, module: str, lines: list[str]) -> Iterator[str]:
    yield f"## {node.name}"
    yield f"`{module}.{node.name}`: {_escaped(ast.get_docstring(node) or '')}"
    rows = [row for each in node.body for row in _field(each, lines)]
    if rows:
        yield "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows])
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and (not each.name.startswith("_") or each.name == "__init__"):
            yield from _method(each, node.name)


def _field(node: ast.stmt, lines: list[str]) -> Iterator[str]:
    """A row for an annotated field, with the comment behind it."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
        return
    default = _default(node.value)
    if "init=False" in default:
        return
    comment = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].strip().removeprefix("# ")
    cells = (node.target.id, ast.unparse(node.annotation), default)
    code = " | ".join(f"<code>{_escaped(cell)}</code>" if cell else "" for cell in cells)
    yield f"| {code} | {_escaped(comment)} |"


def _default(value: ast.expr | None) -> str:
    text = "" if value is None else ast.unparse(value)
    return re.sub(r"^field\(default_factory=(\w+)\)$", r"\1()", text)


def _method(node: ast.FunctionDef, owner: str) -> Iterator[str]:
    is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    title = owner if node.name == "__init__" else f"{owner}.{node.name}"
    if title != owner:
        yield f"### {title}"
    shown = returns.replace(" -> ", ": ") if is_property else f"({arguments}){returns}"
    yield f"```python\n{title}{shown}\n```"
    yield _escaped(ast.get_docstring(node) or "")
