"""Running `forerun` inside the test process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

Run = Callable[..., Result]


@pytest.fixture(scope="session", autouse=True)
def weights_are_read_once() -> Iterator[None]:
    """Commands of one test session share loaded weights and the parser; engines are built anew for each."""
    import forerun.opening

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forerun.opening, "load_model", cache(forerun.opening.load_model))
        patch.setattr(forerun.opening, "select_kernels", cache(forerun.opening.select_kernels))
        patch.setattr("typer.testing._get_command", cache(get_command))  # a tenth of a second each time
        yield


@pytest.fixture
def run() -> Run:
    """run("generate", "hello", status=0) -> the result, its exit status checked."""
    from forerun.cli.app import app

    def invoke(*arguments: str, status: int = 0, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result

    return invoke


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """The same with --json -> the parsed output."""

    def invoke(*arguments: str, status: int = 0, stdin: str | None = None) -> Any:
        return json.loads(run(*arguments, "--json", status=status, stdin=stdin).stdout)

    return invoke
