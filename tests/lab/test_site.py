"""The documentation's site: nothing is missing from the references, links lead to pages, pictures load nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

import forerun
from forerun import errors
from forerun.cli.app import app
from forerun.engine.outputs import StepTrace
from reference import PUBLIC, cli_reference, python_reference

ROOT = Path(__file__).resolve().parents[2]


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


def sections(text: str) -> dict[str, str]:
    return {part.partition("\n")[0]: part for part in text.split("\n## ")}


def test_every_option_of_every_command_is_in_the_reference() -> None:
    written = sections(cli_reference())
    for path, command in commands(typer.main.get_command(app), "forerun"):
        options = {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name[0] == "-"}
        assert not {name for name in options if name not in written[path]}, path


def test_every_public_name_and_field_is_in_the_reference() -> None:
    written = sections(python_reference())
    assert set(forerun.__all__) - {"ForerunError", "__version__"} <= set(written)
    for module, names in PUBLIC.items():
        for name in names:
            kind = getattr(import_module(f"forerun.{module}"), name)
            known = [each.name for each in fields(kind) if each.init] if is_dataclass(kind) else []
            methods = [each for each, value in vars(kind).items() if isfunction(value) and not each.startswith("_")]
            assert all(f">{each}<" in written[name] for each in known), name
            assert all(f"### {name}.{each}" in written[name] for each in methods), name
    assert all(name in written["Errors"] for name in vars(errors) if name.endswith("Error"))


def test_signs_of_markdown_are_escaped_but_not_in_code() -> None:
    text = cli_reference()
    assert (
        "&#42;.NAME for all below" in text
        and "`serve` and `batch` take several" in text
        and "&#91;default: 512&#93;" in text
    )


def test_links_lead_to_pages() -> None:
    pytest.importorskip("mkdocs")
    from site_pages import decisions, relinked

    assert relinked("[a](docs/serving.md#threads), [b](CHANGELOG.md), [c](docs/decisions)", "index.md") == (
        "[a](serving.md#threads), [b](changelog.md), [c](decisions/index.md)"
    )
    assert relinked("![p](images/step.svg) [card](../src/forerun/mini/MODEL_CARD.md)", "how-it-works.md") == (
        "![p](images/step.svg) [card](mini.md)"
    )
    assert relinked("[web](https://a.example/b.md) [here](#x)", "log.md") == "[web](https://a.example/b.md) [here](#x)"
    assert relinked("[d](../drafters.md)", "decisions/0001-x.md") == "[d](../drafters.md)"
    listed = decisions()
    assert all(path.name in listed for path in (ROOT / "docs/decisions").glob("*.md"))


@pytest.mark.parametrize("name", ["demo", "step", "tree"])
def test_pictures_load_nothing(name: str) -> None:
    text = (ROOT / "docs" / "images" / f"{name}.svg").read_text("utf-8")
    ElementTree.fromstring(text)
    assert "url(http" not in text and 'url("http' not in text and "href" not in text


def test_a_drawn_tree_has_every_token_where_its_parent_is() -> None:
    from pictures import drawn_tree, interest, places

    step = StepTrace((0, 1, 2, 3), (-1, 0, 0, 2), ("", "draft", "draft", "draft"), (2, 3), (2, 3, 4), 0.0)
    assert interest(step) == (True, 2)
    assert places((-1, 0, 0, 2, 3)) == {0: (0, 0.5), 1: (1, 0), 2: (1, 1), 3: (2, 1), 4: (3, 1)}
    drawn = drawn_tree(step, dict(enumerate(("fox", "sat", "ran", "<over>", "the"))))
    texts = [each.text for each in ElementTree.fromstring(drawn).iter() if each.tag.endswith("text")]
    assert texts == ["fox", "sat", "ran", "<over>", "the"]
    assert drawn.count("<path") == 4 and drawn.count("#1565c0") == 2  # the target's own token, and its line
