"""Programs that a test needs and pip does not install."""

from __future__ import annotations

import shutil

import pytest

NOT_INSTALLED = "not installed:"


def program(name: str) -> str:
    """Its path; skips the test that asks where it is missing, which fails the test in CI."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{NOT_INSTALLED} {name}")
    return path
