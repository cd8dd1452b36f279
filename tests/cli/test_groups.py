"""An option is stated once: a field of a group is an option of every command that takes the group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from forerun.bench.serve_events import AnswerError
from forerun.cli import options, serve
from forerun.cli.groups import as_typed, ungrouped, values
from forerun.config import EngineConfig, option_names
from forerun.errors import ForerunError, PromptError, ResourceError, SamplingError
from forerun.server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a cake needs."""

    eggs: Annotated[int, typer.Option(help="How many.", min=1)] = 3
    sugar_g: Annotated[float | None, typer.Option("--sugar")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Large(Size):
    """The same for many guests."""

    eggs: Annotated[int, typer.Option("--eggs")] = 9


def test_fields_are_options_and_come_back_as_the_group() -> None:
    seen: list[tuple[object, ...]] = []

    def bake(name: str, size: Size, *, hot: bool = False) -> None:
        """Bake."""
        seen.append((name, size, hot))

    app = typer.Typer()
    app.command()(ungrouped(bake))
    assert CliRunner().invoke(app, ["nut", "--eggs", "4", "--sugar", "2.5", "--hot"]).exit_code == 0
    assert CliRunner().invoke(app, ["nut"]).exit_code == 0
    assert seen == [("nut", Size(eggs=4, sugar_g=2.5), True), ("nut", Size(), False)]
    assert CliRunner().invoke(app, ["nut", "--eggs", "0"]).exit_code == 2
    assert "How many." in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        (SamplingError, "--eggs"),
        (PromptError, "--eggs"),
        (ResourceError, "--eggs"),
        (partial(AnswerError, "bad answer"), "bad answer: eggs"),
    ],
)
def test_errors_name_options_as_they_are_typed(kind: Callable[[str], ForerunError], first: str) -> None:
    def bake(size: Size, *, ice_cream: Annotated[bool, typer.Option("--ice/--no-ice")] = False) -> None:
        raise kind(f"eggs must be even and sugar_g above 0, got {size.eggs}: leave ice_cream out")

    app = typer.Typer()
    app.command()(ungrouped(bake))
    error = CliRunner().invoke(app, []).exception
    assert isinstance(error, type(kind(""))), "of the class it had"
    assert str(error) == f"{first} must be even and --sugar above 0, got 3: leave --ice out"


@pytest.mark.parametrize(
    "message",
    [
        "there is no file in/sugar_g or sugar_g/in, and no sugar_g.json",
        "'sugar_g' is none of \"sugar_g\", [sugar_g]",
        "a function takes f(sugar_g=3) or sugar_g[0]",
        "cake.json: sugar_g must be a number",
        "cake.sugar_g and xsugar_gx are other names",
        "the eggs must be fresh",
        "eggs of hens",
    ],
)
def test_other_words_are_no_options(message: str) -> None:
    assert as_typed(message, {"sugar_g": "--sugar", "eggs": "--eggs"}) == message


def test_a_group_may_change_a_default() -> None:
    assert values(Large()) == {"eggs": 9, "sugar_g": None}
    assert inspect.signature(ungrouped(lambda: None)).parameters == {}


@pytest.mark.parametrize(
    ("group", "config"),
    [
        (options.Loading, EngineConfig),
        (serve.ServedEngine, EngineConfig),
        (serve.Serving, ServerSettings),
    ],
)
def test_defaults_are_those_of_the_settings(group: type, config: type) -> None:
    stated = {field.name: None if field.default is MISSING else field.default for field in fields(config)}
    assert {field.name: stated[field.name] for field in fields(group)} == values(group())


def test_what_is_drafted_are_options_of_the_drafter() -> None:
    names = {field.name for field in fields(options.DraftSizes)} - {"draft_model"}
    assert names <= set(option_names()["DrafterConfig"])


def test_no_command_reads_its_own_locals() -> None:
    folder = Path(options.__file__).parent
    assert not [path.name for path in folder.glob("*.py") if "locals()" in path.read_text("utf-8")]
