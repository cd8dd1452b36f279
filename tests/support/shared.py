"""Data that does not come with the repository: small weights, tokenizers, configurations, in `../shared/data`."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MISSING = "../shared/data has no"


def shared_data(name: str) -> Path:
    """A file or folder of it; skips the test that asks where it is missing, which fails the test in CI."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{MISSING} {name}")
    return path
