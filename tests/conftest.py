"""In CI (FORERUN_CI is set, as `.ci/run` does) a test that would skip for want of data fails."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.shared import MISSING

# Test -> why CI may do without its data. A reviewed list: empty, for CI has all of it.
MAY_BE_SKIPPED: dict[str, str] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn such a skip into a failure."""
    report = yield
    why: Any = report.longrepr
    if os.environ.get("FORERUN_CI") and report.skipped and MISSING in str(why) and item.nodeid not in MAY_BE_SKIPPED:
        report.outcome, report.longrepr = "failed", f"skipped in CI: {why[-1]}"
    return report
