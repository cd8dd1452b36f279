"""Benchmarks begin with nothing that earlier runs learned: figures would depend on what was measured before."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import serving

import policy

GIVEN = Namespace(
    model="mini", drafter="draft", num_prefixes=1, repeats=1, input_len=1, prefix_len=1, max_tokens=1, num_requests=1,
    concurrency=2,
)  # fmt: skip


def test_engines_whose_policy_is_measured() -> None:
    assert policy.PRIVATE["keep_learned"] is policy._fixed(3)["keep_learned"] is False


@pytest.mark.parametrize("measure", [serving.one_prefix, serving.all_parts])
def test_servers_that_draft(measure: Callable[[Namespace, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def record(model: str, arguments: list[str]) -> Any:
        started.extend(arguments)
        raise InterruptedError

    monkeypatch.setattr(serving, "server", record)
    with pytest.raises(InterruptedError):
        measure(GIVEN, "draft")
    assert "--drafter" in started and "--no-keep-learned" in started
