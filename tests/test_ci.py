"""In CI a test that skips for want of data fails, everywhere else it skips; what an sdist leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest
from tests.support.shared import shared_data

def test_that_needs_data():
    shared_data("nothing")

@pytest.fixture
def data():
    return shared_data("nothing")

def test_with_a_fixture_that_needs_data(data):
    pass

def test_with_another_reason():
    pytest.skip("no GPU")
"""


@pytest.mark.parametrize(("is_ci", "said"), [(True, "1 failed, 1 skipped, 1 error"), (False, "3 skipped")])
def test_a_skip_for_want_of_data_fails_in_ci(tmp_path: Path, is_ci: bool, said: str) -> None:
    (tmp_path / "test_made.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if name != "FORERUN_CI"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"FORERUN_CI": "1"} if is_ci else {}
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "tests.conftest", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert said in done.stdout and done.returncode == is_ci, done.stdout
    assert ("../shared/data has no nothing" in done.stdout) == is_ci


def test_what_a_source_distribution_leaves_out_is_anchored() -> None:
    """Else `tests` would mean csrc/tests, too, which CMakeLists.txt names: no kernels could be built from an sdist."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    assert all(pattern.startswith("/") for pattern in settings["sdist"]["exclude"])
