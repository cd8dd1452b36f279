"""The server's own OpenAPI document, turned against it: generated requests never end in an internal error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from forerun import LLM
from forerun.server.app import create_app
from tests.server.conftest import running
from tests.server.conftest import settings as server_settings

EXAMPLES = 8  # a path


def is_failure(answer: Any) -> bool:
    """A deadline is an answer; every other status from 500 on is a mistake of ours."""
    return bool(answer.status_code >= 500 and "timeout_error" not in answer.text)


def attack(operation: Any) -> set[int]:
    """Send generated requests to one path -> the statuses seen."""
    statuses = set()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    def check(case: Any) -> None:
        answer = case.call(timeout=200)
        statuses.add(answer.status_code)
        assert not is_failure(answer), (case.method, case.path, case.body, answer.text)
        if answer.status_code >= 400:
            anthropic = case.path.startswith("/v1/messages")
            assert set(answer.json()["error"]) == {"message", "type", *(() if anthropic else ("param", "code"))}

    attempted(check)
    return statuses


def attempted(check: Callable[[], None], most: int = 3) -> None:
    """Run it, again where CPython 3.11's parser miscounts because another thread parses, too (cpython#106905)."""
    for attempt in range(1, most + 1):
        try:
            return check()
        except* SystemError:
            if attempt == most:
                raise


def test_generated_requests_find_no_internal_error(llm: LLM, tmp_path: Path) -> None:
    # Here, as processes that only collect this test need not read it; and before a server's threads parse, too (see
    # `attempted`).
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    pytest.importorskip("schemathesis.specs.openapi.schemas")
    app = create_app(llm, server_settings(timeout_s=0.5, grammar_timeout_s=2.0, batch_dir=tmp_path))
    with running(app) as address:
        app.state.context.grammars.start()  # which takes seconds, and longer than some requests may
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json", wait_for_schema=30)
        seen = {operation.label: attack(operation) for operation in (r.ok() for r in schema.get_all_operations())}
    assert len(seen) == 27 and all(seen.values())
    llm.engine.scheduler.check_integrity()
