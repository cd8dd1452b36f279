"""Programs that a test needs and pip does not install."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NOT_INSTALLED = "not installed:"


def program(name: str) -> str:
    """Its path; skips the test that asks where it is missing, which fails the test in CI."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{NOT_INSTALLED} {name}")
    return path


def build_target(folder: Path, name: str) -> Path:
    """The program of a folder that CMake has configured."""
    subprocess.run([program("cmake"), "--build", folder, "--target", name, "-j1"], check=True)
    return folder / name


def native_test(name: str) -> Path:
    """A program of csrc/tests, linked from the object files of the installed extension."""
    builds = sorted(ROOT.glob("build/cp*/build.ninja"), key=lambda path: path.stat().st_mtime)
    if not builds:
        pytest.skip(f"{NOT_INSTALLED} forerun from this checkout (make install)")
    return build_target(builds[-1].parent, name)
