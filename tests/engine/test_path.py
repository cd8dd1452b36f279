"""The path from `LLM.generate` to the C++ of a chain of drafts is the one the documentation tells."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from tests.support import mini
from tests.support.drafting import watch_chains

PATH = [
    "llm.py",
    "engine/engine.py",
    "drafters/portfolio.py",
    "drafters/draft_model.py",
    "drafters/drawing.py",
    "runtime/recorded.py",
]


def test_few_files_lie_between_generate_and_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("forerun.kernels.cpu._native")
    llm = mini.drafting("draft", adaptive=False)
    stacks = watch_chains(monkeypatch)
    llm.generate("The lighthouse keeper", SamplingParams(temperature=0.0, max_tokens=12))
    assert stacks and all(stack == PATH for stack in stacks)
