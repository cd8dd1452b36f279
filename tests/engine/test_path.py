"""The path from `LLM.generate` to the C++ of a chain of drafts is the one ARCHITECTURE.md tells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun import SamplingParams
from tests.support import mini
from tests.support.drafting import watch_chains

ROOT = Path(__file__).resolve().parents[2]


def test_six_files_lie_between_generate_and_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("forerun.kernels.cpu._native")
    *python, native = re.findall(r"^\d\. `(\S+)`", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE)
    assert len(python) == 5 and (ROOT / native).is_file()
    llm = mini.drafting("draft", adaptive=False)
    stacks = watch_chains(monkeypatch)
    llm.generate("The lighthouse keeper", SamplingParams(temperature=0.0, max_tokens=12))
    assert stacks and all([f"src/forerun/{file}" for file in stack] == python for stack in stacks)
